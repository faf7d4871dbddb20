"""Continuing from a checkpoint."""

from __future__ import annotations

import torch

from evenly.checkpoint.state import check_values, install, targets
from evenly.checkpoint.store import Checkpoint


def restore(checkpoint: Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Continue from `checkpoint`: its tensors into the model in place, its state into the optimizer.

    A collective. A schedule is to be built before and loaded after, since building one sets options.
    Raises `CheckpointError`, with nothing changed, if it is of another model or optimizer.
    """
    check_values(model, optimizer, checkpoint.values)
    tensors = targets(model, optimizer, checkpoint.forms)
    checkpoint.read(tensors)
    install(model, optimizer, tensors, checkpoint.values)
