"""Training and evaluation mode of a model, parts of which the job may have put into evaluation mode for good."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn


def in_training(model: nn.Module) -> nn.Module:
    """`model` in training mode: as it is, or all of it where it is in evaluation mode, as loaders leave it."""
    return model if model.training else model.train()


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Within, `model` is in evaluation mode; afterwards each module is in its own again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
