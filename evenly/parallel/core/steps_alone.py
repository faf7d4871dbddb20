"""Whether an optimizer steps every parameter by itself, found out on small copies of its own.

One that looks at all parameters together (at the norm of all gradients, say), counts what it has stepped, or draws
random numbers in the order of parameters computes something else where it steps a part of them. No class says so:
copies of the optimizer, as it is set up, step small parameters of the same dims, all together and in two parts, with
gradients of all sizes; any difference of a single bit tells.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn, optim

from evenly.data.generators import undisturbed
from evenly.parallel.core.optimizer_kinds import is_changed

LONGEST = 3  # of a dim of a small parameter
ALIKE = 4  # parameters of one group with equally many dims that are looked at
STEPS = 3
SCALES = (1e-4, 1e4, 1.0)  # of gradients, from one parameter and step to the next

Small = dict[nn.Parameter, nn.Parameter]


def steps_alone(optimizer: optim.Optimizer) -> bool:
    """Whether `optimizer`, which has not stepped yet, may step each parameter on another rank.

    False where it cannot be found out, and for one that has state already or does more than its class says.
    """
    if is_changed(optimizer) or any(optimizer.state.values()):
        return False
    chosen = _chosen(optimizer)
    first, second = ({p for number, p in enumerate(chosen) if number % 2 == part} for part in (0, 1))
    try:
        with warnings.catch_warnings(), undisturbed():
            warnings.simplefilter("ignore")
            together = _stepped(optimizer, {*chosen}, chosen)
            apart = _stepped(optimizer, first, chosen) | _stepped(optimizer, second, chosen)
    except Exception:  # code of the job: whatever it cannot do on small parameters
        return False
    return all(_same(together[parameter], apart[parameter]) for parameter in chosen)


def _chosen(optimizer: optim.Optimizer) -> list[nn.Parameter]:
    """Of each group some parameters of each number of dims, in its order."""
    found: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        by_dims: dict[int, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_dims.setdefault(parameter.dim(), []).append(parameter)
        few = {parameter for alike in by_dims.values() for parameter in alike[:ALIKE]}
        found += [parameter for parameter in group["params"] if parameter in few]
    return found


def _stepped(
    optimizer: optim.Optimizer, part: set[nn.Parameter], chosen: Iterable[nn.Parameter]
) -> dict[nn.Parameter, list[torch.Tensor]]:
    """Of each parameter of `part`, its small copy after each step of a copy of `optimizer` that has only these."""
    if not part:
        return {}
    draw = torch.Generator().manual_seed(0)
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    small = {parameter: _small(parameter, draw) for parameter in every}
    copied = _copy(optimizer, small, part)
    found: dict[nn.Parameter, list[torch.Tensor]] = {parameter: [] for parameter in part}
    torch.manual_seed(0)
    for step in range(STEPS):
        for number, parameter in enumerate(chosen):
            one = small[parameter]
            gradient = torch.randn(one.shape, generator=draw, dtype=torch.float64) * SCALES[(number + step) % 3]
            one.grad = gradient.to(one.dtype) if parameter in part else None
        copied.step()
        for parameter, after in found.items():
            after.append(small[parameter].detach().clone())
    return found


def _small(parameter: nn.Parameter, draw: torch.Generator) -> nn.Parameter:
    shape = [min(length, LONGEST) for length in parameter.shape]
    return nn.Parameter(torch.randn(shape, generator=draw).to(parameter.dtype), parameter.requires_grad)


def _copy(optimizer: optim.Optimizer, small: Mapping[nn.Parameter, nn.Parameter], part: set[nn.Parameter]) -> Any:
    """A copy of `optimizer` with all its attributes, over the `small` ones of `part`; empty groups are left out."""
    copied: Any = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(parameter): one for parameter, one in small.items()} | {id(optimizer): copied}
    vars(copied).update(copy.deepcopy(vars(optimizer), memo))
    copied.state = defaultdict(dict)
    wanted = {id(small[parameter]) for parameter in part}
    for group in copied.param_groups:
        places = [place for place, parameter in enumerate(group["params"]) if id(parameter) in wanted]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [group[key][place] for place in places]
    copied.param_groups = [group for group in copied.param_groups if group["params"]]
    return copied


def _same(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True) for a, b in pairs)
