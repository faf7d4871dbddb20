"""The parameters of an optimizer's groups, with the names that torch keeps of them, and full ones in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn, optim

from evenly.parallel.core.memory import local

Members = dict[str, list[Any]]  # of a group: its parameters, and their names if it has them


def members(optimizer: optim.Optimizer) -> list[Members]:
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


class WholeParameter(nn.Parameter):
    """A full parameter, stepped in place of one of the model, called `stands_for` there; empty but within a step."""

    stands_for: str

    @classmethod
    def of(cls, name: str, parameter: nn.Parameter, *, on_host: bool = False) -> WholeParameter:
        """Return an empty one for `parameter`, with the attributes that the job has given it."""
        empty = torch.empty(0, dtype=parameter.dtype, device="cpu" if on_host else local(parameter).device)
        whole = cls(empty, parameter.requires_grad)
        declared = {key for kind in type(parameter).__mro__ for key in vars(kind).get("__annotations__", ())}
        vars(whole).update({key: value for key, value in vars(parameter).items() if key not in declared})
        whole.stands_for = name
        return whole
