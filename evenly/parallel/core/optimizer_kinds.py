"""What an optimizer may look at in a step: single elements, whole tensors, or anything."""

from __future__ import annotations

from torch import optim

from evenly.torch_private import has_step_hooks

# Exactly these classes: a subclass may do more.
ELEMENTWISE = frozenset(
    [
        optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax,
        optim.ASGD, optim.NAdam, optim.RAdam, optim.RMSprop, optim.SGD,
    ]
)  # fmt: skip
# These and their subclasses do on whole tensors what no DTensor can.
WHOLE = (optim.Adafactor, optim.Rprop, *filter(None, [getattr(optim, "Muon", None)]))


def steps_elements(optimizer: optim.Optimizer) -> bool:
    """Whether `optimizer` treats every element by itself: one of torch's classes, as it is."""
    return type(optimizer) in ELEMENTWISE and not is_changed(optimizer)


def is_changed(optimizer: optim.Optimizer) -> bool:
    """Whether its steps do more than its class says: by hooks, or a `step` of its own."""
    return has_step_hooks(optimizer) or "step" in vars(optimizer)


def needs_whole(optimizer: optim.Optimizer) -> bool:
    """Whether `optimizer` can step nothing but whole tensors."""
    return isinstance(optimizer, WHOLE)
