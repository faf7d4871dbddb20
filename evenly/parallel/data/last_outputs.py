"""What a model's last forward gave, whose backward all ranks run together though the loss may be a constant."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from evenly.data.nest import tensors_in


class LastOutputs:
    """Zeros that follow from the outputs of `model`, from a forward until its backward; the outputs are not kept."""

    def __init__(self, model: nn.Module) -> None:
        self._zeros: list[torch.Tensor] = []
        self.handle = model.register_forward_hook(self._note)

    def zero(self) -> torch.Tensor | None:
        """A zero that follows from all; None where the model was not called, or nothing of it has a gradient."""
        return sum(self._zeros, torch.zeros(())) if self._zeros else None

    def clear(self) -> None:
        """Lets go of them."""
        self._zeros.clear()

    def _note(self, _: nn.Module, __: Any, output: Any) -> None:
        tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        self._zeros = [tensor.narrow(0, 0, 0).sum() if tensor.dim() else tensor * 0 for tensor in tensors]
