"""Which parameters of a model can be split, which of them together, and what each such group communicates.

Read from a trace: the rules unite the factors (see `factors`) of all tensors that must be split together. Every factor
that is left allowed and stands in a parameter is a *group*: wherever it stands, its *units* can be dealt to ranks. Two
neighbouring factors can be one group too: where heads of queries are 2 kv heads x 4, all 8 can be dealt.

A group is checked by following it through the calls: which tensors are split, where their parts are summed over
ranks, and which whole tensors meet them, whose gradients are summed in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import chain
from math import inf
from typing import Any

from evenly.errors import PlanError
from evenly.parallel.tensor.dim_factors import Dim
from evenly.parallel.tensor.graph import Graph
from evenly.parallel.tensor.ops import OPS
from evenly.parallel.tensor.trace import CallTrace, TracedCall

Run = tuple[int, ...]  # one factor, or two neighbours


@dataclass(frozen=True)
class ParameterSplit:
    """One dim of a parameter as outer x units x inner; the units are dealt to ranks.

    name:  the parameter's first in `model.named_parameters()`.
    outer: 1 but for packed layouts, such as 3 for queries, keys and values in one matrix.
    """

    name: str
    dim: int
    outer: int
    units: int
    inner: int


@dataclass(frozen=True)
class SplitGroup:
    """Parameters that can be split together; bytes and products are those of one traced forward and its backward.

    units:          what is dealt to ranks; their number should divide it.
    parameters:     in order of definition.
    elements:       of these parameters together.
    forward_bytes:  of tensors summed over ranks in the forward: outputs of contractions and lookups.
    backward_bytes: of gradients summed over ranks in the backward: of whole tensors that meet split ones, each once.
    products:       multiplications of the forward that are shared out, of matrices with parameters or one another.
    sums:           names of the modules whose output is summed, in order.
    """

    units: int
    parameters: tuple[ParameterSplit, ...]
    elements: int
    forward_bytes: int
    backward_bytes: int
    products: int
    sums: tuple[str, ...]


@dataclass(frozen=True)
class Derivation:
    """What can be split, and why the rest cannot.

    groups:   in order of their first parameter; of two neighbouring factors last.
    elements: of each parameter, by its first name.
    aliases:  every name of every parameter -> its first.
    forbidden:   parameter -> for each dim the reason why it is in no group, empty where it is in one.
    """

    groups: tuple[SplitGroup, ...]
    elements: dict[str, int]
    aliases: dict[str, str]
    forbidden: dict[str, tuple[str, ...]]


class NotTogether(Exception):
    """Factors that cannot be split as one group after all."""


def derive(trace: CallTrace) -> Derivation:
    """Everything that can be split in the model of `trace`."""
    found = _SplitSearch(trace)
    groups = found.groups()
    parameters = found.parameters
    split = {(one.name, one.dim) for group in groups for one in group.parameters}
    return Derivation(
        groups=tuple(groups),
        elements={trace.values[index].name: trace.values[index].elements for index in parameters},
        aliases={name: trace.values[index].name for name, index in trace.parameters.items()},
        forbidden={
            trace.values[index].name: tuple(
                "" if (trace.values[index].name, at) in split else found.reason(index, dim)
                for at, dim in enumerate(found.dims[index])
            )
            for index in parameters
        },
    )


class _SplitSearch:
    def __init__(self, trace: CallTrace) -> None:
        self.trace = trace
        self.graph = Graph(trace, {name: op.propagate for name, op in OPS.items()})
        self.factors = self.graph.factors
        self.dims = {index: [self.factors.now(dim) for dim in dims] for index, dims in self.graph.dims.items()}
        self.parameters = [*dict.fromkeys(trace.parameters.values())]
        self.used = {index for call in trace.calls for index in call.inputs}
        self.ended = {
            at: [(self.factors.now(partial.dim), partial.kind) for partial in sums]
            for at, sums in self.graph.partial_sums.items()
        }
        self.calls_of = self._calls_by_factor()
        self.with_factor: dict[int, dict[int, None]] = {}  # the used parameters that have it, in order
        for index in (one for one in self.parameters if one in self.used):
            for factor in chain.from_iterable(self.dims[index]):
                self.with_factor.setdefault(factor, {})[index] = None

    def groups(self) -> list[SplitGroup]:
        """Single factors by their first parameter, then pairs."""
        found: list[SplitGroup] = []
        for run in (*self._runs(1), *self._runs(2)):
            try:
                found.append(_Following(self, run).group())
            except NotTogether:
                continue
        alike = self._unseen_alike()
        return [self._with_unseen(group, alike) for group in found]

    def _unseen_alike(self) -> dict[str, list[int]]:
        """Parameter -> those that no call takes and that differ by one number in the name: of an expert or a layer that
        other numbers choose.
        """
        first: dict[Any, int] = {}
        alike: dict[str, list[int]] = {}
        for index in sorted(self.parameters, key=lambda one: one not in self.used):  # those first that calls take
            value = self.trace.values[index]
            parts = value.name.split(".")
            keys = [(value.shape, *parts[:at], "", *parts[at + 1 :]) for at, one in enumerate(parts) if one.isdigit()]
            if index in self.used:
                for key in keys:
                    first.setdefault(key, index)
            elif found := [first[key] for key in keys if key in first]:
                alike.setdefault(self.trace.values[min(found)].name, []).append(index)
        return alike

    def _with_unseen(self, group: SplitGroup, alike: dict[str, list[int]]) -> SplitGroup:
        values = self.trace.values
        added = [(one, index) for one in group.parameters for index in alike.get(one.name, ())]
        parameters = (*group.parameters, *(replace(one, name=values[index].name) for one, index in added))
        return replace(
            group, parameters=parameters, elements=group.elements + sum(values[index].elements for _, index in added)
        )

    def reason(self, parameter: int, dim: Dim) -> str:
        """Why a dim of a parameter is in no group."""
        if parameter not in self.used:
            ended = self.trace.ended
            return f"no call takes it before the trace ends: {ended}" if ended else "no call takes it"
        if not dim:
            return "has one element"
        return next(filter(None, map(self.factors.reason, dim)), "would stand twice in a tensor")

    def _runs(self, length: int) -> Iterable[Run]:
        """Neighbouring allowed factors of parameters, each run once."""
        runs = (
            dim[start : start + length]
            for index in self.parameters
            if index in self.used
            for dim in self.dims[index]
            for start in range(len(dim) - length + 1)
        )
        return (run for run in dict.fromkeys(runs) if not any(map(self.factors.reason, run)) and len({*run}) == length)

    def _calls_by_factor(self) -> dict[int, list[int]]:
        calls: dict[int, dict[int, None]] = {}
        for at, call in enumerate(self.trace.calls):
            for index in (*call.inputs, *call.outputs):
                for dim in self.dims[index]:
                    for factor in dim:
                        calls.setdefault(factor, {})[at] = None
        return {factor: [*found] for factor, found in calls.items()}


@dataclass(eq=False)
class _Following:
    """One run of factors followed through the calls, its parameters split and all else whole at first."""

    search: _SplitSearch
    run: Run
    split: set[int] = field(default_factory=set[int])
    entered: set[int] = field(default_factory=set[int])  # full, and used with split ones
    summed: list[int] = field(default_factory=list[int])
    sums: dict[str, None] = field(default_factory=dict[str, None])
    products: int = 0

    def group(self) -> SplitGroup:
        """Raises `NotTogether` where a split tensor would hold the run in no single place."""
        factors, values = self.search.factors, self.search.trace.values
        alone = len(self.run) == 1
        parameters = [
            index for index in self.search.with_factor.get(self.run[0], ()) if self._holds(index, strict=alone)
        ]
        if len(parameters) < len(self.run):  # neighbours in one parameter alone are split as well each by itself
            raise NotTogether
        self.split.update(parameters)
        for at in self.search.calls_of.get(self.run[0], []):
            self._follow(at, self.search.trace.calls[at])
        return SplitGroup(
            units=factors.length(self.run),
            parameters=tuple(self._parameter(index) for index in parameters),
            elements=sum(values[index].elements for index in parameters),
            forward_bytes=sum(values[index].bytes for index in self.summed),
            backward_bytes=sum(values[index].bytes for index in self.entered),
            products=self.products,
            sums=tuple(self.sums),
        )

    def _holds(self, index: int, *, strict: bool = True) -> bool:
        dims = self.search.dims[index]
        whole = sum(len(_starts(dim, self.run)) for dim in dims)
        single = sum(factor in self.run for dim in dims for factor in dim)
        if whole == 1 and single == len(self.run):
            return True
        if single and strict:
            raise NotTogether
        return False

    def _parameter(self, index: int) -> ParameterSplit:
        factors, dims = self.search.factors, self.search.dims[index]
        ((at, start),) = [(at, start) for at, dim in enumerate(dims) for start in _starts(dim, self.run)]
        outer, inner = dims[at][:start], dims[at][start + len(self.run) :]
        name = self.search.trace.values[index].name
        return ParameterSplit(name, at, factors.length(outer), factors.length(self.run), factors.length(inner))

    def _follow(self, at: int, call: TracedCall) -> None:
        inputs = {*call.inputs}
        if not inputs & self.split:
            return
        outputs = [index for index in call.outputs if self._holds(index)]
        self.split.update(outputs)
        ending = "" if outputs else self._ending(at)
        if ending == "sum":
            self.summed.extend(call.outputs)
            self.sums[call.module] = None
        values = self.search.trace.values
        for index in inputs - self.split:
            # What is added to a sum, a bias, is whole in it without entering.
            if values[index].requires_grad and (ending != "sum" or self._holds(index)):
                self.entered.add(index)
        self.products += self.search.graph.multiplied.get(at, 0) * values[call.outputs[0]].elements

    def _ending(self, at: int) -> str:
        for dim, kind in self.search.ended.get(at, []):
            if _starts(dim, self.run):
                return kind
        raise NotTogether


def _starts(dim: Dim, run: Run) -> list[int]:
    return [start for start in range(len(dim) - len(run) + 1) if dim[start : start + len(run)] == run]


# Units that do not divide are dealt all the same where no rank gets more than this times the mean: a vocabulary of
# 50,257 entries over 2 ranks, but not 3 heads.
LARGEST_SHARE = 1.1
# A lookup computes nothing that splitting would shorten: it must save as many bytes as it moves. Saved are, for an
# element, a parameter, its gradient and two numbers of the optimizer's.
SAVED_BYTES = 16


@dataclass(frozen=True)
class Selection:
    """What is split over `ranks` ranks.

    splits: first name of each split parameter -> how.
    chosen: the groups that are split, in the derivation's order.
    unsplit: the groups that are not, each with the reason.
    share:  of all elements of the model's parameters, those that are split.
    """

    ranks: int
    splits: dict[str, ParameterSplit]
    chosen: tuple[SplitGroup, ...]
    unsplit: tuple[tuple[SplitGroup, str], ...]
    share: float


def select(derivation: Derivation, ranks: int, exclude: Sequence[str] = ()) -> Selection:
    """The groups to split over `ranks` ranks: of those that want the same parameter, the one that splits most per byte.

    exclude: patterns (`fnmatch`) of names of parameters that are not split; a tied parameter goes by each of its names.

    Raises `PlanError` for a pattern that no parameter has.
    """
    excluded = _excluded(derivation, exclude)
    splits: dict[str, ParameterSplit] = {}
    reasons: dict[int, str] = {}
    order = sorted(range(len(derivation.groups)), key=lambda at: -_worth(derivation.groups[at]))  # of equals the first
    for at in order:
        group = derivation.groups[at]
        reason = _reason(group, ranks, excluded, splits)
        if reason:
            reasons[at] = reason
        else:
            splits.update({one.name: one for one in group.parameters})
    split = sum(derivation.elements[name] for name in splits)
    return Selection(
        ranks=ranks,
        splits={name: splits[name] for name in derivation.elements if name in splits},
        chosen=tuple(group for at, group in enumerate(derivation.groups) if at not in reasons),
        unsplit=tuple((derivation.groups[at], reasons[at]) for at in sorted(reasons)),
        share=split / max(sum(derivation.elements.values()), 1),
    )


def _worth(group: SplitGroup) -> float:
    moved = group.forward_bytes + group.backward_bytes
    return group.elements / moved if moved else inf


def _reason(group: SplitGroup, ranks: int, excluded: dict[str, str], splits: dict[str, ParameterSplit]) -> str:
    """Why the group is not split, given what is split already; empty where it is."""
    for one in group.parameters:
        if one.name in excluded:
            return f"{one.name} is excluded by {excluded[one.name]!r}"
    if not _even(group.units, ranks):
        return f"{group.units} units do not divide by {ranks} ranks"
    for one in group.parameters:
        if one.name in splits:
            split = splits[one.name]
            units = f"{split.outer} x {split.units} x {split.inner}"
            return f"{one.name} is split along dim {split.dim} as {units}, for fewer bytes"
    moved = group.forward_bytes + group.backward_bytes
    if not group.products and moved > SAVED_BYTES * group.elements:
        return f"its {group.elements} elements are too few for the {moved} bytes that would be moved"
    return ""


def _even(units: int, ranks: int) -> bool:
    largest = -(-units // ranks)
    return ranks * largest <= LARGEST_SHARE * units and (ranks - 1) * largest < units


def _excluded(derivation: Derivation, patterns: Iterable[str]) -> dict[str, str]:
    excluded: dict[str, str] = {}
    unknown: list[str] = []
    for pattern in patterns:
        matching = [name for name in derivation.aliases if fnmatchcase(name, pattern)]
        excluded.update({derivation.aliases[name]: pattern for name in matching})
        if not matching:
            close = get_close_matches(pattern, derivation.aliases, n=3, cutoff=0.4)
            unknown.append(f"no parameter is named {pattern!r}" + (f"; close: {', '.join(close)}" if close else ""))
    if unknown:
        raise PlanError("excluding parameters by pattern", "; ".join(unknown), "see model.named_parameters()")
    return excluded
