"""Optimizers whose update is known: exactly these classes, as torch has them. Nothing is known of any other."""

from __future__ import annotations

from torch import optim

from evenly.torch_private import has_step_hooks

ELEMENTWISE = frozenset(
    [
        optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax,
        optim.ASGD, optim.NAdam, optim.RAdam, optim.RMSprop, optim.SGD,
    ]
)  # fmt: skip
# They update each parameter by itself, and need all of it.
SEPARABLE = frozenset([optim.Adafactor, optim.Rprop, *filter(None, [getattr(optim, "Muon", None)])])


def steps_elements(optimizer: optim.Optimizer) -> bool:
    """Return whether `optimizer` is known to update every element by itself."""
    return type(optimizer) in ELEMENTWISE and not is_changed(optimizer)


def is_separable(optimizer: optim.Optimizer) -> bool:
    """Return whether `optimizer`, not yet used, is known to update every parameter by itself."""
    known = steps_elements(optimizer) or (type(optimizer) in SEPARABLE and not is_changed(optimizer))
    return known and not (type(optimizer) in SEPARABLE and any(optimizer.state.values()))


def is_known(optimizer: optim.Optimizer) -> bool:
    """Return whether `optimizer` is of a class that is known here, hooks aside."""
    return type(optimizer) in ELEMENTWISE | SEPARABLE


def is_changed(optimizer: optim.Optimizer) -> bool:
    """Return whether its steps do more than its class says: by hooks, or a `step` of its own."""
    return has_step_hooks(optimizer) or "step" in vars(optimizer)
