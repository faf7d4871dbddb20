"""What a model's last forward gave, whose backward all ranks run together though the loss may be a constant."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from evenly.data.nest import hidden_in, tensors_by_path
from evenly.torch_private import begin_sharded_backward


class LastOutputs:
    """Zeros that follow from the outputs of `model`, from a forward until its backward; the outputs are not kept."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._called = model, False
        self._zeros: list[torch.Tensor] = []
        self.handle = model.register_forward_hook(self._note)

    def zero(self) -> torch.Tensor | None:
        """A zero that follows from all; None where the model was not called, or nothing of it has a gradient."""
        return sum(self._zeros, torch.zeros(())) if self._zeros else None

    def watch_backward(self, root: torch.Tensor) -> None:
        """Lets a backward from `root` begin as that of the model, wherever the forward has left its results."""
        if self._called:
            root.register_hook(self._begin_backward)

    def clear(self) -> None:
        """Lets go of them."""
        self._zeros.clear()
        self._called = False

    def _begin_backward(self, _: torch.Tensor) -> None:
        begin_sharded_backward(self._model)

    def _note(self, _: nn.Module, __: Any, output: Any) -> None:
        self._called = True
        results = (*(tensor for _, tensor in tensors_by_path(output)), *hidden_in(output))
        tensors = [one for one in results if isinstance(one, torch.Tensor) and one.requires_grad]
        self._zeros = [tensor.narrow(0, 0, 0).sum() if tensor.dim() else tensor * 0 for tensor in tensors]
