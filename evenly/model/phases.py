"""Which parameters of a model each phase of a job updates: a function of their names."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from evenly.errors import UserError
from evenly.job import Phase


def parameters_of(phases: Mapping[str, Phase], names: Mapping[str, bool]) -> dict[str, frozenset[str]]:
    """By phase, the names of its parameters.

    names: of all parameters -> whether they can be trained. Raises `UserError` for a phase that has none which can, and
    for those that belong to several phases, or can be trained and belong to none.
    """
    found = {
        phase: frozenset(name for name in names if any(fnmatchcase(name, one) for one in given.patterns))
        for phase, given in phases.items()
    }
    few = ", ".join([*names][:5]) + (", ..." if len(names) > 5 else "")
    for phase, own in found.items():
        if not any(names[name] for name in own):
            what = "all of them are frozen" if own else "no parameter of the model has such a name"
            raise UserError(
                f"phase {phase!r} with parameters={phases[phase].parameters!r}",
                what,
                f"give patterns for names as model.named_parameters() gives them: {few}",
            )
    for name in names:
        owners = [phase for phase, own in found.items() if name in own]
        if len(owners) > 1:
            both = " and ".join(map(repr, owners))
            raise UserError(f"parameter {name}", f"it belongs to phases {both}", "give it to one of them")
        if names[name] and not owners:
            do = 'give it to a phase, or keep it frozen (frozen={"' + name + '": None})'
            raise UserError(f"parameter {name}", "no phase updates it", do)
    return found


def check_phases(model: nn.Module, phases: Mapping[str, Phase] | None) -> None:
    """Raises `UserError` where phases do not share the parameters of `model` among them, as `parameters_of`."""
    if phases:
        parameters_of(phases, {name: parameter.requires_grad for name, parameter in model.named_parameters()})
