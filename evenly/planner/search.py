"""Which plans fit, and which of them is fastest: all sensible ones are looked at, most of them not for long. No torch.

Every *choice* has a time that it cannot beat: what its operations take, dealt evenly over the ranks of its pipeline,
with the least that filling the pipeline, the last reduction and the update add. Choices are taken in the order of these
bounds; those that do not fit are dropped, the others predicted in full. Once the next bound is longer than what the
best ones take, no further choice can be among them: pruning discards nothing that would be a result. The best ones are
those that leave the reserve of memory; fuller ones are only looked for as far as they are faster.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from evenly.errors import PlanError, UserError
from evenly.plan import Plan, PlanSpec
from evenly.plan.schedule import splits_backward
from evenly.plan.spec import largest_shard
from evenly.planner.costed_plan import CostedPlan, costed_plan_of, layers_of, predicted, seconds_of_parts, time_of
from evenly.planner.prediction import Prediction
from evenly.planner.request import PlanRequest, PlanResult
from evenly.planner.search_watch import SearchWatch
from evenly.planner.time import message_seconds, tail_seconds

SOUGHT = ("1f1b", "interleaved", "zero-bubble", "zbv")  # schedules
CHUNKS = (2, 3, 4, 5, 6, 8)  # stages per rank of interleaved, as far as there are blocks for them
MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
UNEVEN = 1.1  # places of stages for each block
# Of what the prediction knows nothing, with what it takes for granted.
UNKNOWN: Mapping[str, Sequence[Any]] = {"replicas": (None,), "output_device": (None,), "compile": ("off",)}
SLACK = 1 - 1e-9  # of bounds, for rounding
GIB = 2**30


class PlanChoice(NamedTuple):
    """What is chosen of a plan; names as in `Plan`."""

    data: int
    tensor: int
    pipeline: int
    zero: int
    shard: int | None
    recompute: str
    sequence_parallel: bool | None
    microbatch: int
    schedule: str | None
    stages_per_rank: int | None

    @property
    def family(self) -> tuple[int, ...]:
        """Plans of one family differ in what few would call another plan."""
        return (self.data, self.tensor, self.pipeline, self.zero)


def search(request: PlanRequest) -> PlanResult:
    """The best plans for a request. Raises `UserError` where no plan can split the batch or the model at all."""
    _refuse_unknown(request)
    if request.step_s is not None:
        return _fewest(request, request.step_s)
    return _on(request, _most_devices(request))


def _most_devices(request: PlanRequest) -> int:
    return min(request.cluster.size, request.max_devices or request.cluster.size)


def _refuse_unknown(request: PlanRequest) -> None:
    """Raises `UserError` where it states what the prediction knows nothing of."""
    offload = ("none", "optimizer") if request.cluster.device.host_bytes_per_s else ("none",)
    known = {**UNKNOWN, "offload": offload}
    if stated := [
        f"{key}={value}" for key, value in request.only.explicit.items() if key in known and value not in known[key]
    ]:
        raise UserError(
            f"find a plan that is {request.only}",
            f"what {', '.join(stated)} does to memory and time is not predicted",
            "leave it out of what is sought; evenly run takes it in a plan that is named",
        )


def _on(request: PlanRequest, devices: int) -> PlanResult:
    """The best plans on so many devices. Where none fits, the optimizer's state may be in the host's memory."""
    found = _searched(request, devices)
    if not found.plans and request.only.offload is None and request.cluster.device.host_bytes_per_s:
        with suppress(UserError):  # of a job whose optimizer cannot be stepped there
            offloaded = _searched(replace(request, only=replace(request.only, offload="optimizer")), devices)
            found = replace(offloaded, tried=found.tried + offloaded.tried, judged=found.judged + offloaded.judged)
    return found if found.nearest is None else replace(found, change=_change(request, found.nearest))


def _searched(request: PlanRequest, devices: int) -> PlanResult:
    devices = request.only.ranks or devices
    choices = [*choices_of(request, devices)]
    if not choices:
        raise UserError(
            f"plan {request.source.name} with a batch of {request.batch} on {devices} devices",
            "no plan splits this batch and model over them"
            + (f" and is {request.only}" if request.only.explicit else ""),
            "give a batch of at least as many samples as there are devices, or leave more of the plan open with --only",
        )
    judge = _Judge(request)
    best, judged = _best(judge, choices)
    if best.fits:
        return PlanResult(plans=best.plans, fuller=best.faster_but_fuller, tried=len(choices), judged=judged)
    if (least := best.least) is None:
        raise UserError(
            f"plan {request.source.name} on {devices} devices",
            judge.refused or "no plan can run so",
            "leave more of the plan open with --only",
        )
    return PlanResult(plans=(), nearest=least, tried=len(choices), judged=judged)


def _best(judge: _Judge, choices: Sequence[PlanChoice]) -> tuple[_Best, int]:
    """The fastest of the best families; how many choices were predicted in full."""
    watch = SearchWatch(judge.request, len(choices))
    waiting = [(watch.bounded(judge.bound(choice, least=True)), number) for number, choice in enumerate(choices)]
    heapq.heapify(waiting)
    best, judged = _Best(judge.request), 0
    while waiting and waiting[0][0] <= best.worst_s:
        bound_s, number = heapq.heappop(waiting)
        watch.looked_at(judged)
        choice = choices[number]
        if best.beats(choice.family, bound_s):
            continue
        if (longer_s := judge.closer_bound(choice)) > bound_s:
            heapq.heappush(waiting, (longer_s, number))
            continue
        peak = judge.peak_bytes(choice)
        if peak > judge.request.limit_bytes and (best.fits or choice.recompute != "full"):
            continue
        if best.beats(choice.family, bound_s, peak):
            continue
        judged += 1
        found = judge.predicted(choice, best.worst_s)
        if found is not None:
            best.add(choice.family, found)
    return best, judged


@dataclass
class _Best:
    """Of every family the fastest plan that leaves the reserve, and the fastest that is fuller.

    least: the plan with the lowest peak of those that do not fit.
    """

    request: PlanRequest
    least: Prediction | None = None
    worst_s: float = float("inf")  # of those that would be shown, once they are so many
    _fastest_s: float = float("inf")  # of those that leave the reserve
    _roomy: dict[tuple[int, ...], Prediction] = field(default_factory=dict[tuple[int, ...], Prediction])
    _fuller: dict[tuple[int, ...], Prediction] = field(default_factory=dict[tuple[int, ...], Prediction])

    @property
    def fits(self) -> bool:
        return bool(self._roomy or self._fuller)

    @property
    def plans(self) -> list[Prediction]:
        """Those that leave the reserve, fastest first; where none does, those that fit."""
        return self._ordered(self._roomy or self._fuller)

    @property
    def faster_but_fuller(self) -> list[Prediction]:
        if not self._roomy:
            return []
        return [one for one in self._ordered(self._fuller) if one.step_s < self.plans[0].step_s]

    def beats(self, family: tuple[int, ...], bound_s: float, peak: float = 0.0) -> bool:
        """Whether no plan of the family that takes at least `bound_s` and `peak` bytes would be shown.

        A fuller one is, only if it is faster than all that leave the reserve.
        """
        roomy = self._roomy.get(family)
        if roomy is not None and bound_s > roomy.step_s:
            return True
        if peak <= self.request.limit_bytes - self.request.reserve_bytes:
            return False
        fuller = self._fuller.get(family)
        return bound_s > min(self._fastest_s, fuller.step_s if fuller else float("inf"))

    def add(self, family: tuple[int, ...], found: Prediction) -> None:
        """Takes up a plan, if it is better than what is known."""
        if not found.fits:
            if self.least is None or found.peak_bytes < self.least.peak_bytes:
                self.least = found
            return
        of_its_kind = self._roomy if found.leaves_reserve else self._fuller
        known = of_its_kind.get(family)
        if known is not None and _rank(known) <= _rank(found):
            return
        of_its_kind[family] = found
        if found.leaves_reserve:
            self._fastest_s = min(self._fastest_s, found.step_s)
        if found.leaves_reserve and len(self._roomy) >= self.request.top:
            self.worst_s = sorted(one.step_s for one in self._roomy.values())[self.request.top - 1]

    def _ordered(self, plans: Mapping[tuple[int, ...], Prediction]) -> list[Prediction]:
        return sorted(plans.values(), key=_rank)[: self.request.top]


def _rank(one: Prediction) -> tuple[float, float]:
    return one.step_s, one.peak_bytes


@dataclass
class _Judge:
    """Predicts what a choice takes; what several choices have in common is computed once."""

    request: PlanRequest
    refused: str = ""
    _candidates: dict[PlanChoice, CostedPlan | None] = field(default_factory=dict[PlanChoice, CostedPlan | None])
    _bounds: dict[tuple[PlanChoice, bool], tuple[float, float, float]] = field(
        default_factory=dict[tuple[PlanChoice, bool], tuple[float, float, float]]
    )
    _seconds: dict[tuple[Any, ...], list[float]] = field(default_factory=dict[tuple[Any, ...], list[float]])

    @cached_property
    def precision(self) -> Any:
        return self.request.only.precision or self.request.source.precision

    def candidate(self, choice: PlanChoice) -> CostedPlan | None:
        """None where such a plan cannot run."""
        if choice not in self._candidates:
            plan = self._plan(choice)
            why = "" if plan is None else self.request.source.refusal(plan)
            self.refused = why or self.refused
            self._candidates[choice] = None if plan is None or why else costed_plan_of(self.request, plan)
        return self._candidates[choice]

    def _least(self, choice: PlanChoice) -> CostedPlan | None:
        if (plan := self._plan(choice)) is None:
            return None
        try:
            parts = self.request.source.least_parts(plan, self.request.config(plan))
        except PlanError as problem:
            self.refused = problem.found
            return None
        return self.candidate(choice) if parts is None else costed_plan_of(self.request, plan, parts)

    def _plan(self, choice: PlanChoice) -> Plan | None:
        """None, and why, where there is no such plan."""
        try:
            return plan_of(choice, self.request, self.precision)
        except PlanError as problem:
            self.refused = str(problem)
            return None

    def bound(self, choice: PlanChoice, *, least: bool = False) -> float:
        """Seconds that no step of it beats; for a choice that cannot run, for ever. least: by `_least`, if shorter."""
        alike = choice._replace(schedule="1f1b" if choice.pipeline > 1 else None, stages_per_rank=None)
        least = least and self.request.source.is_run  # else its own parts are there at once
        if (alike, least) not in self._bounds:
            self._bounds[alike, least] = self._bound(alike, self._least(alike) if least else self.candidate(alike))
        step, tail, block = self._bounds[alike, least]
        if choice.pipeline > 1:
            step += self._fill(choice, block)
        return (step + tail) * SLACK

    def closer_bound(self, choice: PlanChoice) -> float:
        """As `bound`; the time itself where it takes longer to know what the choice holds."""
        bound_s = self.bound(choice)
        if not self.request.source.is_run or bound_s == float("inf") or (one := self.candidate(choice)) is None:
            return bound_s
        return time_of(one, layers_of(one, self.seconds(choice, one)))[0].step_s * SLACK

    def _bound(self, choice: PlanChoice, one: CostedPlan | None) -> tuple[float, float, float]:
        if one is None:
            return float("inf"), 0.0, 0.0
        seconds = self.seconds(choice, one)
        microbatches = one.config.microbatches
        step = microbatches * sum(seconds) / choice.pipeline
        if choice.pipeline > 1:
            messages = message_seconds(one.parts, one.config, one.machine)
            step += microbatches * 2 * sum(messages) / choice.pipeline
        return step, tail_seconds(one.parts, one.config, one.machine), min(seconds[1:-1], default=0.0)

    def seconds(self, choice: PlanChoice, one: CostedPlan) -> list[float]:
        """Every part on one microbatch; computed once for choices that differ in nothing that counts here."""
        key = (choice.tensor, choice.microbatch, choice.recompute, choice.sequence_parallel, choice.zero == 3)
        key = (*key, choice.data, choice.shard) if choice.zero == 3 else key
        key = (*key, choice.data) if self.request.source.is_run else key  # whose replicas run other microbatches
        key = (*key, choice.pipeline > 1, one.is_least)
        if key not in self._seconds:
            self._seconds[key] = seconds_of_parts(one)
        return self._seconds[key]

    def _fill(self, choice: PlanChoice, block: float) -> float:
        """The least that the last rank waits for its first input and the first for its last gradients; 0 if unknown.

        block: seconds of the quickest block. Schedules that split the backward pass fill some of it.
        """
        blocks, stages = self.request.source.blocks, choice.pipeline * (choice.stages_per_rank or 1)
        if choice.schedule not in ("1f1b", "interleaved") or blocks % stages:
            return 0.0
        return (choice.pipeline - 1) * (blocks // stages - 1) * block

    def peak_bytes(self, choice: PlanChoice) -> float:
        """What the ranks take that mostly need most: no plan of it takes less. Infinity if it cannot run or fit."""
        one = self.candidate(choice)
        if one is None or _least_bytes(one) > self.request.limit_bytes:
            return float("inf")
        layers = layers_of(one, self.seconds(choice, one))
        ranks = sorted({0, min(1, choice.pipeline - 1), choice.pipeline - 1})
        try:
            found = self.request.source.memory(one.plan, one.config, layers, one.machine.library, ranks)
        except PlanError as problem:
            self.refused, self._candidates[choice] = problem.found, None
            return float("inf")
        return max(memory.peak for memory in found)

    def has_room(self, choice: PlanChoice) -> bool:
        return self.peak_bytes(choice) <= self.request.limit_bytes

    def predicted(self, choice: PlanChoice, most_s: float) -> Prediction | None:
        """All that is predicted of it; None where it cannot run or its step takes longer than `most_s`."""
        one = self.candidate(choice)
        if one is None:
            return None
        layers = layers_of(one, self.seconds(choice, one))
        time, bubble = time_of(one, layers)
        if time.step_s > most_s:
            return None
        memory = self.request.source.memory(one.plan, one.config, layers, one.machine.library)
        return predicted(self.request, one, memory, time, bubble)


def _least_bytes(one: CostedPlan) -> float:
    config, holdings = one.config, one.machine.library.holdings
    each = holdings.weights / (config.shards if config.zero >= 3 else 1)
    each += holdings.gradients / (config.shards if config.zero >= 2 else 1)
    each += holdings.optimizer / config.shards if config.offload == "none" else 0.0
    return each * sum(part.parameters for part in one.parts.blocks) / config.pipeline


def plan_of(choice: PlanChoice, request: PlanRequest, precision: Any) -> Plan:
    """The complete plan of a choice. Raises `PlanError` where there is none."""
    chosen = choice._asdict()
    if request.source.microbatch is not None:
        chosen["microbatch"] = request.only.microbatch
    for axis in ("tensor", "pipeline"):
        chosen[axis] = chosen[axis] if chosen[axis] > 1 else None
    return replace(request.only, **chosen).complete(precision)


def _fewest(request: PlanRequest, step_s: float) -> PlanResult:
    """The best plans on the fewest devices with which a step takes at most `step_s`; on all where none does."""
    most = _most_devices(request)
    node = request.cluster.devices
    counts = [count for count in range(1, node + 1) if node % count == 0 and count <= most]
    counts += range(2 * node, most + 1, node)
    results: dict[int, PlanResult | None] = {}

    def quick(count: int) -> bool:
        try:
            results[count] = _on(request, count)
        except UserError:
            results[count] = None
        best = next(iter(found.plans), None) if (found := results[count]) else None
        return best is not None and best.leaves_reserve and best.step_s <= step_s

    low, high = 0, len(counts) - 1
    while low < high and quick(counts[high]):  # more devices are hardly ever slower
        middle = (low + high) // 2
        low, high = (low, middle) if quick(counts[middle]) else (middle + 1, high)
    return results.get(counts[high]) or _on(request, counts[high])


# ------------------------------------------------------------------------------------------------------- which plans


def choices_of(request: PlanRequest, devices: int) -> Iterator[PlanChoice]:
    """Yield every sensible choice on `devices` that says what `request.only` states, without ranks that are idle."""
    only, source = request.only, request.source
    fixed = source.microbatch or only.microbatch
    seen = set[tuple[int, int, int]]()
    busy = devices if request.takes_all or not fixed else -(-request.batch // fixed)
    for tensor in _stated(only.tensor, source.tensor_sizes(min(devices, 2 * request.cluster.domain))):
        rest = devices // tensor
        for pipeline in _stated(only.pipeline, [size for size in _divisors(rest) if size <= max(1, source.blocks)]):
            data = rest // pipeline
            if data * pipeline * tensor != devices or data not in _stated(only.data, range(1, devices + 1)):
                continue
            data = data if only.data == data else min(data, busy)
            if data > request.batch or (data, tensor, pipeline) in seen:
                continue
            seen.add((data, tensor, pipeline))
            for (zero, shard), recompute, sequence, microbatch, (schedule, chunks) in product(
                [*_zeros(request, data)],
                _stated(only.recompute, ("none", "selective", "full")),
                _sequences(only, tensor, pipeline),
                [*_microbatches(request, data)],
                [*_orders(request, pipeline)],
            ):
                # What is computed again comes with a whole backward pass: nothing is left to split.
                splits = schedule is not None and splits_backward(schedule)
                if recompute == "none" or not splits or only.schedule is not None:
                    yield PlanChoice(
                        data, tensor, pipeline, zero, shard, recompute, sequence, microbatch, schedule, chunks
                    )


def _stated(value: Any, open_choices: Sequence[Any]) -> Sequence[Any]:
    """What was stated, alone; else all choices. An axis of any size ("auto") is one of more than one rank."""
    if value == "auto":
        return [size for size in open_choices if size > 1]
    return open_choices if value is None else [value]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _zeros(request: PlanRequest, data: int) -> Iterator[tuple[int, Any]]:
    node = request.cluster.devices
    for zero in _stated(request.only.zero, (0, 1, 2, 3) if data > 1 else (0,)):
        if request.only.shard is not None:
            shard = largest_shard(data) if request.only.shard == "auto" else request.only.shard
            yield zero, shard if zero else None
            continue
        yield zero, None
        if zero == 3 and data > node and data % node == 0:
            yield zero, node


def _sequences(only: PlanSpec, tensor: int, pipeline: int) -> Sequence[bool | None]:
    if tensor == 1 or pipeline > 1:
        return [only.sequence_parallel]
    return _stated(only.sequence_parallel, (False, True))


def _orders(request: PlanRequest, pipeline: int) -> Iterator[tuple[str | None, int | None]]:
    """Schedules with their stages per rank, as far as there is a block for every stage."""
    blocks = request.source.blocks
    if pipeline == 1:
        yield None, None
        return
    for schedule in _stated(request.only.schedule, SOUGHT):
        if schedule != "interleaved":
            if pipeline * (2 if schedule in ("zbv", "dualpipev") else 1) <= blocks:
                yield schedule, request.only.stages_per_rank
            continue
        for chunks in _stated(
            request.only.stages_per_rank, [size for size in CHUNKS if _even(blocks, pipeline * size)]
        ):
            if pipeline * chunks <= blocks:
                yield schedule, chunks


def _even(blocks: int, stages: int) -> bool:
    return -(-blocks // stages) * stages <= blocks * UNEVEN + 2


def _microbatches(request: PlanRequest, data: int) -> Iterator[int]:
    """Samples of a microbatch with which the batch comes out even over the data axis; one where none does."""
    fixed = request.source.microbatch or request.only.microbatch
    if fixed is not None:
        yield fixed
        return
    share = request.batch // data
    even = [size for size in MICROBATCHES if size <= share and request.batch % (data * size) == 0]
    yield from even or [1]


# --------------------------------------------------------------------------------------------------- nothing that fits


def _change(request: PlanRequest, least: Prediction) -> str:
    """The smallest change with which a plan would fit: of memory, or of devices."""
    need, limit = least.peak_bytes, request.limit_bytes
    words = f"devices with {need / GIB:.1f} GiB ({need / limit - 1:.0%} more) would do for {least.plan}"
    for factor in (2, 4, 8, 16, 32, 64):
        larger = replace(request.cluster, nodes=request.cluster.nodes * factor)
        more = replace(
            request, cluster=larger, batch=max(request.batch, larger.size), max_devices=None, only=PlanSpec()
        )
        judge = _Judge(more)
        fitting = next((choice for choice in choices_of(more, larger.size) if judge.has_room(choice)), None)
        if fitting is not None:
            plan = plan_of(fitting, more, judge.precision)
            return f"{words}; or {larger.size} devices ({larger}), with {plan}"
    return words
