"""Which parameters of a model a job keeps frozen, and how long: a function of their names and of the step.

Those that are frozen for ever require no gradient. Of the others the gradient is dropped while they are frozen: the
graph of the model, and what is split of it, is the same in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch import nn

from evenly.errors import UserError

Steps = Mapping[str, int | None]


def frozen_steps(names: Iterable[str], patterns: Steps) -> dict[str, int | None]:
    """For how many steps each of the parameters is frozen, None: for ever; those that never are have no entry.

    Raises `UserError` naming all `patterns` that match none of `names`.
    """
    found: dict[str, int | None] = {}
    all_names = [*names]
    for pattern, steps in patterns.items():
        found |= dict.fromkeys((name for name in all_names if fnmatchcase(name, pattern)), steps)
    if idle := [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in all_names)]:
        few = ", ".join(all_names[:5]) + (", ..." if len(all_names) > 5 else "")
        raise UserError(
            f"keeping parameters frozen as {', '.join(map(repr, idle))}",
            "no parameter of the model has such a name",
            f"write the patterns for names as model.named_parameters() gives them: {few}",
        )
    return {name: steps for name, steps in found.items() if steps != 0}


def frozen_at(steps: Steps, step: int) -> frozenset[str]:
    """The names of those that are frozen in `step`, of which the first is 1, among those of `frozen_steps`."""
    return frozenset(name for name, count in steps.items() if count is None or step <= count)


def freeze(model: nn.Module, patterns: Steps | None) -> None:
    """Has what is frozen for ever require no gradient.

    Raises `UserError` where a pattern matches nothing, or where the first step would train nothing.
    """
    named = dict(model.named_parameters())
    steps = frozen_steps(named, patterns or {})
    for name, count in steps.items():
        if count is None:
            named[name].requires_grad_(False)
    first = frozen_at(steps, 1)
    if first and not any(p.requires_grad and name not in first for name, p in named.items()):
        raise UserError(
            "training step 1",
            "all parameters are frozen in it",
            'take some out of frozen= (a later pattern decides: {"*": 500, "head.*": 0})',
        )
