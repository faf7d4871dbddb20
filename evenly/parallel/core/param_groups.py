"""The parameters of an optimizer's groups, with the names that torch keeps of them in the order of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn, optim

Members = dict[str, list[Any]]  # of a group: its parameters, and their names if it has them


def members(optimizer: optim.Optimizer) -> list[Members]:
    """Those of each group."""
    return [{key: group[key] for key in ("params", "param_names") if key in group} for group in optimizer.param_groups]


def remove_parameters(optimizer: optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Removes `parameters` from `optimizer`."""
    elsewhere = {id(parameter) for parameter in parameters}
    for group in optimizer.param_groups:
        names = [*group["param_names"]] if "param_names" in group else []
        kept = [place for place, parameter in enumerate(group["params"]) if id(parameter) not in elsewhere]
        group["params"] = [group["params"][place] for place in kept]
        if names:
            group["param_names"] = [names[place] for place in kept]
    for parameter in parameters:
        optimizer.state.pop(parameter, None)
