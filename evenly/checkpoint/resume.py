"""Continuing from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import torch

from evenly.checkpoint.state import check_values, install, targets
from evenly.checkpoint.store import Checkpoint


class SplitAdapter(Protocol):
    """Knows which of the tensors that a rank holds are parts of a checkpoint's."""

    def shapes_here(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, tuple[int, ...]]:
        """From shapes in the checkpoint to those of what this rank holds."""
        ...

    def new_target(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Where to read a checkpoint into, for this rank's `tensors`."""
        ...

    def set_value(self, read: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
        """Fills `tensors` from what was read."""
        ...


def restore(
    checkpoint: Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer, parts: SplitAdapter | None = None
) -> None:
    """Continue from `checkpoint`: its tensors into the model in place, its state into the optimizer.

    A collective. A schedule is to be built before and loaded after, since building one sets options.
    Raises `ResumeError`, with nothing changed, if it is of another model or optimizer.
    """
    check_values(model, optimizer, checkpoint.values)
    forms = checkpoint.forms
    if parts is None:
        tensors = targets(model, optimizer, forms)
        checkpoint.read(tensors)
    else:
        shapes = parts.shapes_here({name: form.shape for name, form in forms.items()})
        tensors = targets(model, optimizer, {name: replace(form, shape=shapes[name]) for name, form in forms.items()})
        read = dict(parts.new_target(tensors))
        checkpoint.read(read)
        parts.set_value(read, tensors)
    install(model, optimizer, tensors, checkpoint.values)
