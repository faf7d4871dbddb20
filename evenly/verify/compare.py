"""Compares two computations: how large the difference is, whether rounding explains it, and what differs first.

A difference is the largest |a - b| of a tensor over the larger of 1 and its largest |b|: relative for large values,
absolute for small ones, where rounding of a gradient that is truly zero can be as large as the parameter itself.

What rounding explains is measured, not assumed (`Rounding`): the reference runs a second time with rounding added, and
how far it strays is what rounding does to this job. In float64 a tensor is equal within 1e-9, or within `TIMES` what
rounding does to it. In narrower types single elements jump (Adam turns the rounding of a gradient near zero into a full
step), and which ones is chance: there the median element decides, which a lost, doubled or flipped gradient moves and
chance does not; and after the first step, which starts from equal parameters, the largest difference of the optimizer's
state, which is linear in the gradient, or nearly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from evenly.verify.disturb import Disturbance

CONTRACT = 1e-9  # largest difference that is equal in float64, whatever the job
TIMES = 16.0  # how many times the measured rounding is still rounding
MOST_MOVED = 1e-3  # by rounding alone: more would hide a fault
FIRST, LAST = 0, 1 << 30  # in the order of a step's values
FEW = 16  # elements: the median of fewer says little about what rounding does to a tensor

# Unit in the last place of weights and sums, and of what the forward computes in.
WEIGHT_EPS = dict.fromkeys(("float32", "bfloat16", "float16"), 2.0**-23) | {
    "float64": 2.0**-52, "pure-bfloat16": 2.0**-7, "pure-float16": 2.0**-10,
}  # fmt: skip
FORWARD_EPS = WEIGHT_EPS | {"bfloat16": 2.0**-7, "float16": 2.0**-10}

# By tensor, the largest and the median |a - b|.
Spreads = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Rounding:
    """How far the reference strays when rounding is added; lists by step, of which entry 0 is before the first.

    scalars: largest difference of losses and gradient norms up to the step. tensors, states: of the model and of the
    optimizer's state. kind: what was disturbed, see `disturb`. cast_eps: the unit in the last place of the narrowest
    type that the model itself casts to, where casts were disturbed: a loss computed in it has no finer one.
    figures: largest difference of metrics up to the step, by step: those that count jump where a near tie tips over.
    """

    scalars: list[float] = field(default_factory=list[float])
    tensors: list[Spreads] = field(default_factory=list[Spreads])
    states: list[Spreads] = field(default_factory=list[Spreads])
    kind: Disturbance = "sums"
    cast_eps: float = 0.0
    figures: list[float] = field(default_factory=list[float])

    def figure(self, step: int) -> float:
        return self.figures[step] if step < len(self.figures) else 0.0

    def scalar(self, step: int) -> float:
        return self.scalars[step] if step < len(self.scalars) else 0.0

    def of_tensors(self, step: int) -> Spreads:
        """Of the model after `step`."""
        return self.tensors[step] if step < len(self.tensors) else {}

    def of_state(self, step: int) -> Spreads:
        """Of the optimizer's state after `step`."""
        return self.states[step] if step < len(self.states) else {}

    def joined(self, other: Rounding) -> Rounding:
        """The larger of both, number by number; `other` may have none."""
        steps = range(len(self.scalars))
        return Rounding(
            [max(self.scalars[step], other.scalar(step)) for step in steps],
            [_larger(self.tensors[step], other.of_tensors(step)) for step in steps],
            [_larger(self.states[step], other.of_state(step)) for step in steps],
            self.kind,
            max(self.cast_eps, other.cast_eps),
            [max(value, other.figure(step)) for step, value in enumerate(self.figures)],
        )


def _larger(one: Spreads, other: Spreads) -> Spreads:
    return {
        name: (max(a, other[name][0]), max(b, other[name][1])) if name in other else (a, b)
        for name, (a, b) in one.items()
    }


def difference(found: torch.Tensor | float, expected: torch.Tensor | float) -> float:
    """How far `found` is from `expected` (same shape); infinite where one is not finite and the other is."""
    a, b = _float64(found), _float64(expected)
    if a.shape != b.shape:
        return math.inf
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    worst = float((a - b).abs().max() / b.abs().max().clamp(min=1.0))
    return math.inf if math.isnan(worst) else worst


def figure_difference(found: float | None, expected: float) -> float:
    """How far a metric is from what is expected: infinite where there is none; two that are no number are equal."""
    if found is None:
        return math.inf
    return 0.0 if math.isnan(found) and math.isnan(expected) else difference(found, expected)


def spread(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """The largest and the median |a - b|; infinite for other shapes and numbers that are not finite."""
    a, b = _float64(found), _float64(expected)
    if a.shape != b.shape:
        return math.inf, math.inf
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0, 0.0
    apart = (a - b).abs().flatten()
    largest = float(apart.max())
    return (math.inf, math.inf) if math.isnan(largest) else (largest, float(apart.median()))


def spread_of(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> Spreads:
    return {name: spread(found[name], tensor) for name, tensor in expected.items() if name in found}


def _float64(value: torch.Tensor | float) -> torch.Tensor:
    """In float64, on the CPU; a Python number would become float32 otherwise."""
    return torch.as_tensor(value, dtype=torch.float64).detach().cpu()


def differing_elements(found: torch.Tensor, expected: torch.Tensor) -> int:
    """Number of elements whose bits differ."""
    a, b = found.detach().cpu().contiguous(), expected.contiguous()
    if a.shape != b.shape or a.dtype != b.dtype:
        return max(a.numel(), b.numel())
    size = a.element_size()
    as_bytes = (a.flatten().view(torch.uint8) != b.flatten().view(torch.uint8)).view(-1, size)
    return int(as_bytes.any(dim=1).sum())


@dataclass
class RankComparison:
    """The comparison on one rank; differences are the largest over all steps so far.

    expected, seen: names of all that is to be compared, and of what this rank has compared.
    """

    dtype: str
    rank: int
    rounding: Rounding = field(default_factory=Rounding)
    loss_diff: float = 0.0
    grad_norm_diff: float = 0.0
    param_diff: float = 0.0
    param_rounding: float = 0.0
    moved: float = 0.0  # by rounding alone: losses and norms, and in float64 any parameter, else their mean element
    worst_param: str = ""
    bits_differ: int | None = None
    sharded: float = 0.0
    first: tuple[int, int, str, float] | None = None  # (step, order within the step, what, difference)
    expected: set[str] = field(default_factory=set[str])
    seen: set[str] = field(default_factory=set[str])
    compared: int = 0  # values

    def add_loss(self, step: int, found: float, expected: float) -> None:
        """Compares the loss of a batch."""
        self._add_loss(step, FIRST, "loss", difference(found, expected))

    def add_evaluation(self, step: int, found: float, expected: float) -> None:
        """Compares the loss of an evaluation after `step`."""
        self._add_loss(step, LAST, "evaluation loss", difference(found, expected))

    def add_figures(self, step: int, found: Mapping[str, float], expected: Mapping[str, float]) -> None:
        """Compares the metrics of a step and of the evaluation after it, which have the same names."""
        for name in [*expected, *(found.keys() - expected.keys())]:
            diff = figure_difference(found.get(name), expected[name]) if name in expected else math.inf
            tolerance = max(self._scalar_tolerance(step), TIMES * self.rounding.figure(step))
            self._judge(step, LAST, name, diff, equal=diff <= tolerance)

    def _add_loss(self, step: int, order: int, what: str, diff: float) -> None:
        self.loss_diff = max(self.loss_diff, diff)
        self._judge(step, order, what, diff, equal=diff <= self._scalar_tolerance(step))

    def add_grad_norm(self, step: int, found: float, expected: float) -> None:
        """Compares the norm of the batch's gradient."""
        both_overflow = not math.isfinite(found) and not math.isfinite(expected)  # a step that float16 skips
        diff = 0.0 if both_overflow else difference(found, expected)
        self.grad_norm_diff = max(self.grad_norm_diff, diff)
        self._judge(step, 1, "grad_norm", diff, equal=diff <= self._scalar_tolerance(step))

    def add_rates(self, step: int, found: Sequence[float], expected: Sequence[float]) -> None:
        """Compares the learning rate of each parameter group after `step`."""
        for group, rate in enumerate(expected):
            diff = abs(found[group] - rate) / max(abs(rate), 1e-300) if group < len(found) else math.inf
            self._judge(step, 2, f"learning rate of group {group}", diff, equal=diff <= CONTRACT)

    def add_groups(self, step: int, found: list[list[list[str]]], expected: list[list[list[str]]]) -> None:
        """Compares the names of the parameters of each group, as of `reference.named_groups`."""
        self._judge(step, 2, "number of groups of the optimizer", len(found), equal=len(found) == len(expected))
        for group, pair in enumerate(zip(found, expected, strict=False)):
            count = sum(len({*a} ^ {*b}) for a, b in zip(*pair, strict=True))
            self._judge(step, 2, f"names of the parameters of group {group}", count, equal=pair[0] == pair[1])

    def add_tensors(self, step: int, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
        """Compares the parameters and buffers that this rank has; a name that is not expected is infinitely far."""
        self.expected |= expected.keys()
        spreads = self.rounding.of_tensors(step)
        noise = _noise(spreads, expected)
        for order, name in enumerate(sorted(found)):
            diff = difference(found[name], expected[name]) if name in expected else math.inf
            if diff > self.param_diff or not self.worst_param:
                self.param_diff, self.worst_param = max(diff, self.param_diff), name
            if name in spreads and name in expected:
                size = max(1.0, float(_float64(expected[name]).abs().max())) if expected[name].numel() else 1.0
                self.param_rounding = max(self.param_rounding, spreads[name][0] / size)
            equal = diff < math.inf and self._is_rounding(found[name], expected[name], spreads.get(name), noise)
            self._judge(step, 3 + order, name, diff, equal=diff <= 0 or equal)
        parameters = self.param_rounding if self.dtype == "float64" else _mean_moved(spreads, expected)
        self.moved = max(self.moved, self.rounding.scalar(step), parameters)

    def add_state(self, step: int, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
        """Compares the optimizer's state that this rank has, as `add_tensors` does; its differences are not listed."""
        self.expected |= expected.keys()
        spreads = self.rounding.of_state(step)
        noise, kinds = _noise(spreads, expected), _largest_by_kind(expected)
        for name in sorted(found):
            a, b = found[name], expected.get(name)
            diff = math.inf if b is None else difference(a, b)
            few = b is not None and b.numel() < FEW and b.dtype is torch.float32  # a 16-bit unit would hide a fault
            kind = kinds.get(_kind_of(name), 0.0) if few else 0.0
            equal = b is not None and diff < math.inf and self._is_rounding(a, b, spreads.get(name), noise, kind)
            if equal and b is not None and self.dtype != "float64" and step == 1:
                largest = spreads.get(name, (0.0, 0.0))[0]
                floor = TIMES * _eps(b) * max(kind, float(_float64(b).abs().max()) if b.numel() else 0.0)
                equal = spread(a, b)[0] <= max(TIMES * largest, floor)
            self._judge(step, 3 + len(self.expected), name, diff, equal=diff <= 0 or equal)

    def add_bits(self, step: int, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
        """Counts the elements whose bits differ, of which there must be none."""
        for order, name in enumerate(sorted(expected)):
            count = differing_elements(found[name], expected[name])
            self.bits_differ = (self.bits_differ or 0) + count
            self._judge(step, 3 + order, f"elements of {name} with different bits", count, equal=count == 0)

    def _scalar_tolerance(self, step: int) -> float:
        if self.dtype == "float64":
            floor = max(CONTRACT, TIMES * self.rounding.cast_eps)
        else:
            floor = TIMES * WEIGHT_EPS[self.dtype]
            if self.rounding.kind == "forward":
                floor = max(floor, FORWARD_EPS[self.dtype])
        return max(floor, TIMES * self.rounding.scalar(step))

    def _is_rounding(
        self, a: torch.Tensor, b: torch.Tensor, rounding: tuple[float, float] | None, noise: float, kind: float = 0.0
    ) -> bool:
        """Whether rounding explains that `a` is not `b`.

        rounding: what it does to this tensor. noise: the most that it does to any, of its size. kind: for a tensor of
        few elements the largest of its kind, whose unit in the last place is that of the gradients that cancel in it.
        """
        largest, median = rounding or (0.0, 0.0)
        if self.dtype == "float64":
            return difference(a, b) <= CONTRACT or spread(a, b)[0] <= TIMES * largest
        floor = TIMES * _eps(b)
        if b.numel() < FEW:
            floor = max(floor, 2 * noise)
        return spread(a, b)[1] <= max(TIMES * median, floor * _size(b), TIMES * _eps(b) * kind)

    def _judge(self, step: int, order: int, what: str, diff: float, *, equal: bool) -> None:
        self.seen.add(what)
        self.compared += 1
        if self.first is None and not equal:
            self.first = (step, order, what, diff)


def _noise(spreads: Spreads, expected: Mapping[str, torch.Tensor]) -> float:
    named = ((spreads[name][1], tensor) for name, tensor in expected.items() if name in spreads)
    return max((median / _size(b) for median, b in named if b.numel() >= FEW and _size(b) > 0), default=0.0)


def _mean_moved(spreads: Spreads, expected: Mapping[str, torch.Tensor]) -> float:
    """Return the mean of the tensors' median spreads, as differences: where few elements jump, it stays small."""
    sizes = {n: (b.numel(), max(1.0, float(_float64(b).abs().max()))) for n, b in expected.items() if b.numel()}
    moved = (spreads[name][1] / size * count for name, (count, size) in sizes.items() if name in spreads)
    return sum(moved) / max(1, sum(count for count, _ in sizes.values()))


def _kind_of(name: str) -> str:
    return name.partition(" of ")[0]


def _largest_by_kind(expected: Mapping[str, torch.Tensor]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, tensor in expected.items():
        if tensor.numel() and tensor.is_floating_point():
            kind = _kind_of(name)
            found[kind] = max(found.get(kind, 0.0), float(_float64(tensor).abs().max()))
    return found


def _size(tensor: torch.Tensor) -> float:
    return float(_float64(tensor).square().mean().sqrt()) if tensor.numel() else 0.0


def _eps(tensor: torch.Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0


@dataclass(frozen=True)
class Row:
    """The verdict on one plan of `world` devices; status: equal, rounding, different, unsupported or error.

    param_rounding: the largest difference of parameters that rounding makes on one device.
    """

    plan: str
    world: int
    status: str
    loss_diff: float | None = None
    grad_norm_diff: float | None = None
    param_diff: float | None = None
    worst_param: str | None = None
    sharded: float | None = None
    bits_differ: int | None = None
    reason: str = ""
    param_rounding: float | None = None


def judge(plan: str, comparisons: list[RankComparison]) -> Row:
    """The row of `plan` from all ranks' comparisons; the reason names the first difference: step, rank and size.

    What no rank has compared is different.
    """
    worst = max(comparisons, key=lambda comparison: comparison.param_diff)
    faults = [(comparison.first, comparison.rank) for comparison in comparisons if comparison.first is not None]
    unseen = set[str]().union(*(c.expected for c in comparisons)).difference(*(c.seen for c in comparisons))
    reason = ""
    if faults:
        (step, _, what, diff), rank = min(faults)
        reason = f"first difference: {what} at step {step} on rank {rank}, {diff:.3g}"
    elif unseen:
        reason = f"no rank has {min(unseen)}" + (f" and {len(unseen) - 1} more" if len(unseen) > 1 else "")
    largest = max(max(one.loss_diff, one.grad_norm_diff, one.param_diff) for one in comparisons)
    moved = max(comparison.moved for comparison in comparisons)
    hidden = not reason and moved > MOST_MOVED and largest > CONTRACT
    if hidden:
        hint = "nothing is shown; try --dtype float64 or a smaller rate"
        reason = f"rounding alone moves this job by {100 * moved:.2g} %: {hint}"
    bits = [comparison.bits_differ for comparison in comparisons if comparison.bits_differ is not None]
    return Row(
        plan=plan,
        world=1 + max((comparison.rank for comparison in comparisons), default=0),
        status="rounding" if hidden else "different" if reason else "equal",
        loss_diff=max(comparison.loss_diff for comparison in comparisons),
        grad_norm_diff=max(comparison.grad_norm_diff for comparison in comparisons),
        param_diff=worst.param_diff,
        worst_param=worst.worst_param,
        sharded=max(comparison.sharded for comparison in comparisons),
        bits_differ=max(bits) if bits else None,
        reason=reason,
        param_rounding=max(comparison.param_rounding for comparison in comparisons),
    )
