"""What a model's last forward gave, whose backward all ranks run together though the loss may be a constant."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from evenly.data.nest import tensors_in


class LastOutputs:
    """The outputs of `model`, from a forward until its backward."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors: list[torch.Tensor] = []
        self.handle = model.register_forward_hook(self._note)

    def zero(self) -> torch.Tensor | None:
        """A zero that follows from them; None where the model was not called, or nothing of it has a gradient."""
        return sum((one.sum() * 0 for one in self._tensors), torch.zeros(())) if self._tensors else None

    def clear(self) -> None:
        """Lets go of them."""
        self._tensors.clear()

    def _note(self, _: nn.Module, __: Any, output: Any) -> None:
        self._tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
