"""Training and evaluation mode of a model, parts of which the job may have put into evaluation mode for good."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from torch import nn

Modes = Sequence[tuple[nn.Module, bool]]  # a module comes before those below it


def in_training(model: nn.Module) -> nn.Module:
    """Return `model`, put into training mode by its own `train()`, as a script does before its loop.

    Modules that are in evaluation mode within a model in training mode were put there by hand, and are put back.
    """
    by_hand = [(module, False) for module in model.modules() if not module.training] if model.training else []
    model.train()
    _restore(by_hand)
    return model


def has_own_modes(model: nn.Module) -> bool:
    """Return whether a module has a `train()` or `eval()` of its own, which may do more than set modes."""
    return any(
        "train" in vars(one)
        or "eval" in vars(one)
        or {type(one).train, type(one).eval} != {nn.Module.train, nn.Module.eval}
        for one in model.modules()
    )


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Put `model` into evaluation mode; on exit call its `train()` and give each module the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(modes[0][1])
        _restore(modes)


def _restore(modes: Modes) -> None:
    """Give modules their modes, by their own `train()` where it reaches no module that is to have another."""
    known = {id(module): mode for module, mode in modes}
    for module, mode in modes:
        if module.training != mode and all(known.get(id(one)) == mode for one in module.modules()):
            module.train(mode)
    for module, mode in modes:  # a train() of its own may have decided otherwise
        module.training = mode
