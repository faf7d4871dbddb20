"""Buffers that follow what a model computes, the same on every rank as on one device.

Which rules are known: `normalisation` (running statistics), `power_iteration` (spectral norm),
`moving_averages`. A rank sees only its own
microbatches, so during a step what their calls do is recorded, and afterwards every rank computes the buffers that one
device would have from the one sum over ranks that this needs. What else changes is refused (`mutation_guard`).
"""

from __future__ import annotations

from collections.abc import Container, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from evenly.comm.collectives import all_reduce
from evenly.comm.exact_reduce import begin_exact_all_reduce
from evenly.comm.exact_sum import ExactSum
from evenly.comm.groups import Group
from evenly.parallel.core.buffer_rules import BufferRule, Term
from evenly.parallel.core.moving_averages import MovingAverage
from evenly.parallel.core.mutation_guard import MutationGuard
from evenly.parallel.core.normalisation import Normalisation, check_normalisation, keeps_statistics
from evenly.parallel.core.power_iteration import power_iterations
from evenly.torch_private import add_to_each, scale_each


class RunningStatistics:
    """Keeps the buffers of `model` that change by a rule those of one device, over the ranks of `group`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        group: Group,
        alone: bool | None = None,
        whole: bool = True,
        elsewhere: Container[str] = (),
        exact: bool = False,
    ) -> None:
        """alone: whether no other copy of `model` shares a step; by default, whether `group` is of one rank.

        whole: whether the rank holds all parameters as they are. elsewhere: names of layers' buffers that other ranks
        hold; their layers are counted and not kept. exact: whether the bits must not depend on which rank calls what.
        """
        shared = group.size > 1 if alone is None else not alone
        self._model, self._group, self._exact = model, group, exact
        self._all = rules_of(model, shared=shared)
        self._layers = [rule for rule in self._all if f"{rule.name}.{rule.buffers[0]}".lstrip(".") not in elsewhere]
        own = {id(getattr(rule.module, name)) for rule in self._layers for name in rule.buffers}
        self._others = MutationGuard(model, but=own, parameters=whole) if shared else None
        self._handles: list[Any] = [handle for rule in self._layers for handle in rule.attach()]

    @property
    def layers(self) -> int:
        return len(self._all)

    def share_with(self, first: RunningStatistics) -> None:
        """Says that `first` is of the same model on another device of this process."""
        for mine, theirs in zip(self._layers, first._layers, strict=True):
            mine.share(theirs)

    def recording(self, microbatch: int | None) -> AbstractContextManager[None]:
        """Around the forward of `microbatch`; `LOOK` or None: of one that leaves no trace, as calls outside."""
        return self._recording(microbatch) if self._layers or self._others else nullcontext()

    @contextmanager
    def _recording(self, microbatch: int | None) -> Generator[None]:
        for rule in self._layers:
            rule.begin(microbatch)
        if microbatch is not None and microbatch >= 0:
            Normalisation.prepare([rule for rule in self._layers if isinstance(rule, Normalisation)])
        try:
            with nullcontext() if self._others is None else self._others.watching():
                yield
        finally:
            for rule in self._layers:
                rule.end()

    def evaluating(self) -> AbstractContextManager[Any]:
        """Around the forward of an evaluation; raises `RunError` where it changes a moving average."""
        stack = ExitStack()
        for rule in self._layers:
            if isinstance(rule, MovingAverage):
                stack.enter_context(rule.evaluating())
        return stack

    @contextmanager
    def noticing(self) -> Generator[set[str]]:
        """Within, buffers that change by no known rule are named in the set, and not refused."""
        changed: set[str] = set()
        if self._others is not None:
            self._others.noticed = changed
        try:
            yield changed
        finally:
            if self._others is not None:
                self._others.noticed = None

    def add_averages(self, factors: Mapping[str, float]) -> None:
        """From now on the buffers of these names are moving averages with these factors, 1 for a counter."""
        if self._others is not None:
            self._others.allow(factors)
        modules = dict(self._model.named_modules())
        for name, a in factors.items():
            prefix, _, own = name.rpartition(".")
            rule = MovingAverage(prefix, modules[prefix], own, a)
            self._all.append(rule)
            self._layers.append(rule)

    def calls(self, microbatch: int) -> list[int]:
        """How often each layer was called in the forward of `microbatch`; of those elsewhere, never."""
        return [rule.calls(microbatch) for rule in self._all]

    def merge(self, other: RunningStatistics) -> None:
        """Takes over what the layers of `other`, of a copy of the model on another device, left in this step."""
        for mine, theirs in zip(self._layers, other._layers, strict=True):
            mine.merge(theirs)

    def drop(self) -> None:
        """Ends a step that is not to count: the buffers are as it began."""
        for rule in self._layers:
            rule.drop()

    def sync(self, calls: Sequence[Sequence[int]]) -> None:
        """Ends a step. calls[j][l]: how often layer l was called in microbatch j, over all microbatches of the step.

        Raises `RunError`, on all ranks alike, where the rule of a layer does not hold.
        """
        if not self._layers:
            return
        columns = {id(rule): [row[number] for row in calls] for number, rule in enumerate(self._all)}
        terms = [rule.terms(columns[id(rule)]) for rule in self._layers]
        flat = self._exactly_summed(terms) if self._exact else self._summed(terms)
        sums = dict(zip(self._layers, self._split(flat), strict=True))
        for kind in {type(rule) for rule in self._layers}:
            rules = [rule for rule in self._layers if type(rule) is kind]
            kind.apply(rules, [sums[rule] for rule in rules], [columns[id(rule)] for rule in rules])

    def close(self) -> None:
        """Takes the hooks off the layers."""
        for handle in self._handles:
            handle.remove()
        for rule in self._layers:
            rule.detach()

    def rules_in(self, module: nn.Module) -> list[BufferRule]:
        parts = {id(part) for part in module.modules()}
        return [rule for rule in self._layers if id(rule.module) in parts]

    def _split(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        return flat.split([rule.width for rule in self._layers])

    def _zeros(self) -> torch.Tensor:
        width = sum(rule.width for rule in self._layers)
        return torch.zeros(width, dtype=torch.float64, device=self._layers[0].device)

    def _summed(self, terms: Sequence[Sequence[Term]]) -> torch.Tensor:
        """The sums over ranks of the terms of each layer, one layer after the other, in float64.

        Terms of all layers are added together: a call for each layer is what a GPU waits for.
        """
        totals = self._split(flat := self._zeros())
        for number in range(max(map(len, terms))):
            having = [place for place, own in enumerate(terms) if number < len(own)]
            together = torch.cat([terms[place][number][1] for place in having]).double()
            scaled = together.split([self._layers[place].width for place in having])
            scale_each(scaled, [terms[place][number][0] for place in having])
            add_to_each([totals[place] for place in having], scaled)
        return all_reduce(flat, self._group, label="running statistics")

    def _exactly_summed(self, terms: Sequence[Sequence[Term]]) -> torch.Tensor:
        sums, start = ExactSum(self._zeros()), 0
        for rule, own in zip(self._layers, terms, strict=True):
            for factor, term in own:
                sums.add(factor * term.double(), start)
            start += rule.width
        begin_exact_all_reduce(sums, self._group, label="running statistics")()
        return sums.rounded()


def rules_of(model: nn.Module, *, shared: bool = True) -> list[BufferRule]:
    """What changes buffers of `model` by a rule; shared: whether other devices run some of the microbatches.

    Raises `UserError` for a layer whose rule depends on the ranks.
    """
    found: list[BufferRule] = []
    for name, module in model.named_modules():
        check_normalisation(name, module)
        found += [Normalisation(name, module)] if keeps_statistics(module) else []
        found += power_iterations(name, module, shared=shared)
    return found


def changing_buffers(model: nn.Module) -> list[torch.Tensor]:
    return [getattr(rule.module, name) for rule in rules_of(model) for name in rule.buffers]
