"""What is predicted of one plan of evenly's own: memory and time. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import floor

from evenly.model.parts import BlockCost, ModelCosts
from evenly.plan import Plan
from evenly.plan.cut import cut
from evenly.planner.prediction import CAUSES_OF_TIME, MemoryByCause, Prediction, TimeByCause
from evenly.planner.request import PlanRequest
from evenly.planner.time import Machine, part_seconds, step_time
from evenly.planner.training_config import TrainingConfig


@dataclass(frozen=True)
class CostedPlan:
    """A plan with what it takes to judge it.

    layers: blocks of every stage where a run of it decides them; None leaves them to `layers_of`.
    is_least: whether the parts are those that the plan's own are no less than.
    """

    plan: Plan
    config: TrainingConfig
    parts: ModelCosts
    machine: Machine
    layers: Sequence[int] | None
    is_least: bool = False


def costed_plan_of(request: PlanRequest, plan: Plan, least: ModelCosts | None = None) -> CostedPlan:
    """Costs a complete and resolved plan. least: parts to take in the place of the plan's own."""
    config = request.config(plan)
    machine = Machine(request.cluster, request.speeds, request.library(plan))
    if least is not None:
        return CostedPlan(plan, config, least, machine, None, is_least=True)
    layers = request.source.layers(plan, request.cluster.device)
    with_cut = plan.with_stages(layers) if layers is not None and plan.pipeline.active else plan
    return CostedPlan(with_cut, config, request.source.parts(plan, config), machine, layers)


def layers_of(one: CostedPlan, seconds: Sequence[float] | None = None) -> tuple[int, ...]:
    """Blocks of every stage: the cut whose slowest stage is fastest.

    seconds: of the parts in the model's order, before and after the blocks included, where they are known.
    """
    parts, stages = one.parts, one.config.pipeline * one.config.stages_per_rank
    if stages == 1:
        return (len(parts.blocks),)
    if one.layers is not None:
        return tuple(one.layers)
    if one.plan.pipeline.split_points:
        starts = [0, *one.plan.pipeline.split_points, len(parts.blocks)]
        return tuple(end - begin for begin, end in pairwise(starts))
    before, *blocks, after = seconds or seconds_of_parts(one)
    if min(blocks) == max(blocks):
        return equal_blocks(len(blocks), stages, blocks[0], before, after)
    return cut(blocks, stages, before=before, after=after)


def seconds_of_parts(one: CostedPlan) -> list[float]:
    """Both passes of every part on one microbatch, in the model's order; equal parts are computed once."""
    found: dict[int, float] = {}
    order = (one.parts.before, *one.parts.blocks, one.parts.after)
    for part in order:
        if id(part) not in found:
            found[id(part)] = part_seconds(part, one.config, one.machine)
    return [found[id(part)] for part in order]


@lru_cache(maxsize=4096)  # choices that differ in zero alone have the same parts
def equal_blocks(blocks: int, stages: int, each: float, before: float, after: float) -> tuple[int, ...]:
    """The best cut of blocks that cost `each`, by bisection over what the slowest stage may take.

    before, after: what the first and the last stage have besides. At least one block per stage; as `plan.cut.cut`.
    """

    def room(most: float) -> tuple[int, int, int]:
        first, middle, last = (
            max(1, floor(min(blocks, seconds / each + 1e-9))) for seconds in (most - before, most, most - after)
        )
        return first, middle, last

    low, high = max(blocks * each / stages, before, after), blocks * each + before + after
    for _ in range(40):
        most = (low + high) / 2
        first, middle, last = room(most)
        low, high = (low, most) if first + (stages - 2) * middle + last >= blocks else (most, high)
    first, middle, last = room(high)
    counts = [first, *[middle] * (stages - 2), last]
    while sum(counts) > blocks:
        counts[max(range(stages), key=counts.__getitem__)] -= 1
    return tuple(counts)


def time_of(one: CostedPlan, layers: tuple[int, ...]) -> tuple[TimeByCause, float]:
    return step_time(one.parts, replace(one.config, layers=layers), one.machine)


def predicted(
    request: PlanRequest, one: CostedPlan, memory: Sequence[MemoryByCause], time: TimeByCause, bubble: float
) -> Prediction:
    config, sequence = one.config, request.source.sequence
    return Prediction(
        plan=one.plan,
        memory=memory,
        limit_bytes=request.limit_bytes,
        time=time,
        samples=request.batch,
        tokens=request.batch * sequence if sequence else None,
        flops=model_flops(one.parts, config),
        peak_flops=config.ranks * request.cluster.device.peak(config.dtype),
        comm_bytes=sent_bytes(one),
        bubble=bubble,
        why=binding(time),
        reserve_bytes=request.reserve_bytes,
    )


def model_flops(parts: ModelCosts, config: TrainingConfig) -> float:
    """The operations of a step on all devices: three times the forward pass, without recomputation."""
    every = (parts.before, *parts.blocks, parts.after)
    forward = sum(work.flops * work.times for part in every for work in part.forward)
    return 3 * forward * config.tensor * config.batch / config.microbatch


def sent_bytes(one: CostedPlan) -> float:
    config, parts, library = one.config, one.parts, one.machine.library
    share = 1 / config.pipeline
    reduced = sum(map(_summed_bytes, parts.blocks)) * share
    tensor = 2 * 2 * (config.tensor - 1) / config.tensor * reduced * config.microbatches
    parameters = sum(part.parameters for part in parts.blocks) * share + parts.before.parameters
    ring = (config.replicas - 1) / config.replicas
    gathers = 2 * config.microbatches if config.zero == 3 else 1 if config.zero else 0
    reduces = config.microbatches if config.zero >= 2 else 1 if config.zero else 2
    data = ring * parameters * (gathers * library.weight_bytes + reduces * library.gradient_bytes)
    messages = 2 * config.microbatches * config.stages_per_rank * parts.after.input_bytes * (config.pipeline > 1)
    return tensor + data + messages


def _summed_bytes(part: BlockCost) -> float:
    """Of all-reduces in its forward pass; to gather or to scatter sends half of what adding up does."""
    return sum(one.bytes * (1.0 if one.operation == "all_reduce" else 0.5) for one in part.collectives)


def binding(time: TimeByCause) -> str:
    """What a step's time goes to, largest first, as far as it is worth a word."""
    shares = sorted(((getattr(time, cause) / time.step_s, cause) for cause in CAUSES_OF_TIME), reverse=True)
    return ", ".join(f"{cause} {share:.0%}" for share, cause in shares if share >= 0.03)
