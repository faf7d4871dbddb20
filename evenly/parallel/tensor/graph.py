"""The dims of all tensors of a trace as factors, after the rule of every call was applied.

A call without a rule, or in a form that its rule does not know (`NoRule`), forbids all that it touches. Some calls
compute
with a split dim that their output no longer has: a contraction and a lookup, whose outputs are summed over ranks, and a
cross entropy of split classes. They are noted as `PartialSum`s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from evenly.parallel.tensor.dim_factors import Dim, DimFactors
from evenly.parallel.tensor.trace import CallTrace, Ref, TracedCall

Dims = list[Dim]
Rule = Callable[["Graph", TracedCall], None]
# Functions whose results are random numbers, also those that write them into a tensor (`normal_`).
DRAWS = frozenset(
    [
        *("rand", "randn", "randint", "normal", "rand_like", "randn_like", "randint_like", "uniform", "exponential"),
        *("log_normal", "cauchy", "geometric", "random", "bernoulli", "poisson", "multinomial"),
    ]
)


class NoRule(Exception):
    """A call that no rule describes."""


@dataclass(frozen=True)
class PartialSum:
    """A call in which `dim` ends: `sum` where its output is summed over ranks, `classes` in a cross entropy."""

    dim: Dim
    kind: Literal["sum", "classes"]


@dataclass(eq=False)
class Graph:
    """The dims of all values of a trace.

    dims:       value -> its dims; known once the value was made.
    partial_sums: call -> what ends in it.
    multiplied: call -> how many products make one element of its output, for contractions.
    """

    trace: CallTrace
    rules: Mapping[str, Rule]
    factors: DimFactors = field(default_factory=DimFactors)
    dims: dict[int, Dims] = field(default_factory=dict[int, Dims])
    partial_sums: dict[int, list[PartialSum]] = field(default_factory=dict[int, list[PartialSum]])
    multiplied: dict[int, int] = field(default_factory=dict[int, int])
    _from_batch: set[int] = field(default_factory=set[int])
    _from_parameters: set[int] = field(default_factory=set[int])
    _taken: set[int] = field(default_factory=set[int])
    _at: int = 0  # the call whose rule runs

    def __post_init__(self) -> None:
        for index, value in enumerate(self.trace.values):
            if value.source != "call":
                self.dims[index] = [self.factors.new(size) for size in value.shape]
            if value.source == "batch":
                self._from_batch.add(index)
            if value.source == "parameter":
                self._from_parameters.add(index)
        self._taken.update(index for call in self.trace.calls for index in call.inputs)
        for at, call in enumerate(self.trace.calls):
            self._at = at
            self._apply(call)

    # ------------------------------------------------------------------------------------ what rules ask and say
    def shape(self, ref: Ref) -> tuple[int, ...]:
        return self.trace.values[ref.index].shape

    def of(self, ref: Ref) -> Dims:
        return self.dims[ref.index]

    def output_shape(self, call: TracedCall, which: int = 0) -> tuple[int, ...]:
        return self.trace.values[call.outputs[which]].shape

    def new(self, size: int) -> Dim:
        return self.factors.new(size)

    def forbidden(self, size: int, call: TracedCall) -> Dim:
        return self.factors.new(size, call.place)

    def forbid(self, dim: Iterable[int], call: TracedCall) -> None:
        self.factors.forbid(dim, call.place)

    def unite(self, first: Dim, second: Dim, call: TracedCall) -> None:
        self.factors.unite(first, second, call.place)

    def give(self, call: TracedCall, dims: Sequence[Dim], which: int = 0) -> None:
        """The output's dims; a value changed in place keeps its own and has them united."""
        if [self.factors.length(dim) for dim in dims] != [max(size, 1) for size in self.output_shape(call, which)]:
            raise NoRule
        for first, second in zip(self.dims.setdefault(call.outputs[which], [*dims]), dims, strict=True):
            self.unite(first, second, call)

    def ends_in_sum(self, dim: Dim, kind: Literal["sum", "classes"]) -> None:
        self.partial_sums.setdefault(self._at, []).append(PartialSum(dim, kind))

    def multiplies(self, times: int) -> None:
        self.multiplied[self._at] = self.multiplied.get(self._at, 1) * times

    def is_consumed(self, index: int) -> bool:
        return index in self._taken

    def is_weight(self, ref: Ref) -> bool:
        return ref.index in self._from_parameters and ref.index not in self._from_batch

    # ---------------------------------------------------------------------------------------------------- applying
    def _apply(self, call: TracedCall) -> None:
        # Rows of a weight are weights, whoever chose them.
        inputs = {*(call.inputs[:1] if call.function in ("__getitem__", "index_select") else call.inputs)}
        if call.function.rstrip("_") in DRAWS and not inputs & self._from_parameters:
            self._from_batch.update(one for one in call.outputs if not self._is_shaped_as_weight(one))
        for source in (self._from_batch, self._from_parameters):
            if inputs & source:
                source.update(call.outputs)
        rule = self.rules.get(call.function)
        try:
            if rule is None or "out" in call.keywords or self._is_hidden(call):
                raise NoRule
            rule(self, call)
        except NoRule:
            self._forbid_all(call)

    def _is_shaped_as_weight(self, index: int) -> bool:
        """Whether random numbers are of the shape of a parameter, to be added to it, and not in the place of a batch.

        A wrong guess costs communication, no number.
        """
        shapes = {self.trace.values[one].shape for one in self.trace.parameters.values()}
        return self.trace.values[index].shape in shapes

    def _is_hidden(self, call: TracedCall) -> bool:
        """Whether it takes part in gradients that are computed by other means: in a `torch.autograd.Function`."""
        cut_off = not call.hidden or call.function in ("detach", "data")
        return not cut_off and any(self.trace.values[index].requires_grad for index in call.inputs)

    def _forbid_all(self, call: TracedCall) -> None:
        for index in (*call.inputs, *call.outputs):
            if index not in self.dims:
                self.dims[index] = [self.forbidden(size, call) for size in self.trace.values[index].shape]
            for dim in self.dims[index]:
                self.forbid(dim, call)


# ---------------------------------------------------------------------------------------------------- reading arguments


def tensor(call: TracedCall, position: int, *names: str) -> Ref:
    value = argument(call, position, *names)
    if not isinstance(value, Ref):
        raise NoRule
    return value


def argument(call: TracedCall, position: int, *names: str, default: Any = None) -> Any:
    if position < len(call.arguments):
        return call.arguments[position]
    return next((call.keywords[name] for name in names if name in call.keywords), default)


def input_of(call: TracedCall) -> Ref:
    return tensor(call, 0, "input", "self")


def dim_of(graph: Graph, call: TracedCall, position: int, default: Any = None) -> int:
    """The argument `dim` as the number of one of the first tensor's dims, from 0 on."""
    (dim,) = dims_of(graph, call, position, default)
    return dim


def dims_of(graph: Graph, call: TracedCall, position: int, default: Any = None) -> list[int]:
    """The argument `dim`, one or several, from 0 on; all dims where none is given."""
    given = argument(call, position, "dim", "axis", default=default)
    rank = len(graph.shape(input_of(call)))
    if given is None:
        return [*range(rank)]
    return [counted(dim, rank) for dim in (given if isinstance(given, tuple) else (given,))]


def counted(dim: Any, rank: int) -> int:
    if not isinstance(dim, int) or isinstance(dim, bool) or not -rank <= dim < max(rank, 1):
        raise NoRule
    return dim % max(rank, 1)
