"""Gradients of parameters without dims under ZeRO 3: nothing of them can be cut, so they are whole on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from evenly.comm.collectives import all_reduce
from evenly.comm.groups import Group


class ScalarSums:
    """Sums their gradients over the microbatches of a step and the ranks of `group`, in float64.

    named: name and parameter, of all parameters. counts: called with the number of one that got a gradient; whether
    that counts. `names`: of those without dims.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], group: Group, counts: Callable[[int], bool]) -> None:
        found = [(n, name, p) for n, (name, p) in enumerate(named) if p.dim() == 0 and p.requires_grad]
        self._group, self._counts = group, counts
        self.names = {name for _, name, _ in found}
        self._parameters = [parameter for _, _, parameter in found]
        self._sums = torch.zeros(len(found), dtype=torch.float64, device=group.device)
        self.handles: list[Any] = [
            parameter.register_hook(partial(self._add, place, number))
            for place, (number, _, parameter) in enumerate(found)
        ]

    def begin(self) -> None:
        """Begins a step."""
        self._sums.zero_()

    def reduce(self) -> None:
        """Writes the sums over ranks to the gradients."""
        if self._parameters:
            sums = all_reduce(self._sums, self._group, label="gradients without dims")
            for parameter, total in zip(self._parameters, sums, strict=True):
                parameter.grad = total.to(parameter.dtype)

    def _add(self, place: int, number: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None and self._counts(number):
            self._sums[place] += gradient.double()
