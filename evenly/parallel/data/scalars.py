"""Gradients of parameters without dims under ZeRO 3: nothing of them can be cut, so they are whole on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from evenly.comm.collectives import all_reduce
from evenly.comm.exact_reduce import begin_exact_all_reduce
from evenly.comm.exact_sum import ExactSum
from evenly.comm.groups import Group


class ScalarSums:
    """Sums their gradients over the microbatches of a step and the ranks of `group`, in float64.

    named: name and parameter, of all parameters. counts: called with the number of one that got a gradient; whether
    that counts. exact: whether sums are exact and rounded once.
    """

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], group: Group, counts: Callable[[int], bool], *, exact: bool
    ) -> None:
        found = [(n, name, p) for n, (name, p) in enumerate(named) if p.dim() == 0 and p.requires_grad]
        self._group, self._counts = group, counts
        self._names = {name for _, name, _ in found}
        self._parameters = [parameter for _, _, parameter in found]
        self._sums = torch.zeros(len(found), dtype=torch.float64, device=group.device)
        self._exact = ExactSum(self._sums) if exact else None
        self.handles: list[Any] = [
            parameter.register_hook(partial(self._add, place, number))
            for place, (number, _, parameter) in enumerate(found)
        ]

    def begin(self) -> None:
        """Begins a step."""
        self._sums.zero_()
        if self._exact is not None:
            self._exact.clear()

    def reduce(self) -> None:
        """Writes the sums over ranks to the gradients."""
        if self._parameters:
            for parameter, total in zip(self._parameters, self._reduced(), strict=True):
                parameter.grad = total.to(parameter.dtype)

    def counted(self, gradients: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Those of all `gradients`, by name, that this rank counts for the norm: the first rank counts ours."""
        once = self._names if self._group.position else ()
        return [gradient for name, gradient in gradients.items() if name not in once]

    def _reduced(self) -> torch.Tensor:
        label = "gradients without dims"
        if self._exact is None:
            return all_reduce(self._sums, self._group, label=label)
        begin_exact_all_reduce(self._exact, self._group, label=label)()
        return self._exact.rounded() + 0.0  # -0.0 becomes 0.0

    def _add(self, place: int, number: int, gradient: torch.Tensor | None) -> None:
        if gradient is None or not self._counts(number):
            return
        if self._exact is not None:
            self._exact.add(gradient.detach().view(1), place)
        else:
            self._sums[place] += gradient.double()
