"""What is predicted of one plan of evenly's own: its setup, the library that it is, memory and time. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import floor

from evenly.job import Precision
from evenly.model.parts import BlockCost, ModelCosts
from evenly.plan import Plan
from evenly.plan.cut import cut
from evenly.planner.prediction import CAUSES_OF_TIME, MemoryByCause, Prediction, TimeByCause
from evenly.planner.request import PlanRequest
from evenly.planner.speeds import Library, library_named, speeds_of
from evenly.planner.time import Machine, part_seconds, step_time
from evenly.planner.training_config import TrainingConfig

# Bytes of a weight, of its gradient, of what that is added up in where bits are to agree, and of what AdamW keeps.
BYTES = {
    "float32": (4, 4, 8, 8),
    "bfloat16": (4, 4, 8, 8),
    "float16": (4, 4, 8, 8),
    "float64": (8, 8, 8, 16),
    "pure-bfloat16": (2, 2, 4, 4),
    "pure-float16": (2, 2, 4, 4),
}
DTYPES = {"pure-bfloat16": "bfloat16", "pure-float16": "float16"}
CASTING = ("bfloat16", "float16")  # from float32 weights


@cache
def library_of(precision: Precision, *, bitwise: bool, name: str = "evenly", on_cpu: bool = False) -> Library:
    """The library called `name`; evenly as it is under a precision, and where bits are to agree."""
    found = library_named(name)
    if name == "evenly":
        weight, gradient, wide, state = BYTES[precision]
        reduced = wide if bitwise else gradient
        holdings = replace(
            found.holdings,
            weights=weight,
            gradients=gradient + (wide if bitwise else 0),
            optimizer=state,
            gathered=weight,
            reduced=reduced,
            casts=2.0 if precision in CASTING else 0.0,
        )
        found = replace(found, weight_bytes=weight, gradient_bytes=reduced, holdings=holdings)
    if on_cpu:  # no driver keeps anything of a process's memory, and nothing is started ahead of what computes
        found = replace(found, host_s=0.0, holdings=replace(found.holdings, rest=0.0))
    return found


def training_config_of(question: PlanRequest, plan: Plan) -> TrainingConfig:
    """The setup of a complete plan."""
    microbatch = plan.microbatch or question.subject.microbatch
    assert microbatch is not None  # a source that states none leaves it to its plans
    axes = plan.axes
    tensor = axes.get("tensor", 1)
    return TrainingConfig(
        data=axes["data"],
        tensor=tensor,
        pipeline=axes.get("pipeline", 1),
        split_sequence=plan.tensor.sequence_parallel
        or (tensor > 1 and library_named(question.library).splits_sequence),
        schedule=plan.pipeline.schedule,
        stages_per_rank=plan.pipeline.stages_per_rank if plan.pipeline.active else 1,
        zero=plan.data.zero_stage,
        shard=plan.data.shard,
        microbatch=microbatch,
        batch=question.batch,
        sequence=question.subject.sequence or 1,
        recompute=plan.recompute or "none",
        dtype=question.dtype or DTYPES.get(plan.precision, plan.precision),
    )


@dataclass(frozen=True)
class CostedPlan:
    """A plan with what it takes to judge it.

    layers: blocks of every stage where a run of it decides them; None leaves them to `layers_of`.
    """

    plan: Plan
    setup: TrainingConfig
    parts: ModelCosts
    machine: Machine
    layers: Sequence[int] | None


def costed_plan_of(question: PlanRequest, plan: Plan) -> CostedPlan:
    """Costs a complete and resolved plan."""
    setup = training_config_of(question, plan)
    cpu = question.cluster.device.name == "cpu"
    bitwise = plan.exact == "bitwise"
    library = library_of(plan.precision, bitwise=bitwise, name=question.library, on_cpu=cpu)
    machine = Machine(question.cluster, speeds_of(question.cluster), library)
    layers = question.subject.layers(plan, question.cluster.device)
    shown = plan.with_stages(layers) if layers is not None and plan.pipeline.active else plan
    return CostedPlan(shown, setup, question.subject.parts(plan, setup), machine, layers)


def layers_of(one: CostedPlan, seconds: Sequence[float] | None = None) -> tuple[int, ...]:
    """Blocks of every stage: the cut whose slowest stage is fastest.

    seconds: of the parts in the model's order, before and after the blocks included, where they are known.
    """
    parts, stages = one.parts, one.setup.pipeline * one.setup.stages_per_rank
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
            found[id(part)] = part_seconds(part, one.setup, one.machine)
    return [found[id(part)] for part in order]


def equal_blocks(blocks: int, stages: int, each: float, before: float, after: float) -> tuple[int, ...]:
    """The best cut of blocks that cost `each`, by bisection over what the slowest stage may take.

    before, after: what the first and the last stage have besides. At least one block per stage; as `plan.cut.cut`.
    """

    def room(most: float) -> tuple[int, int, int]:
        first, middle, last = (max(1, floor((most - more) / each + 1e-9)) for more in (before, 0.0, after))
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


def memory_of(question: PlanRequest, one: CostedPlan, layers: Sequence[int]) -> list[MemoryByCause]:
    """The memory of every rank of the pipeline."""
    return question.subject.memory(one.plan, one.setup, layers, one.machine.library)


def time_of(one: CostedPlan, layers: tuple[int, ...]) -> tuple[TimeByCause, float]:
    """The time of a step, and its bubble."""
    return step_time(one.parts, replace(one.setup, layers=layers), one.machine)


def predicted(
    question: PlanRequest, one: CostedPlan, memory: Sequence[MemoryByCause], time: TimeByCause, bubble: float
) -> Prediction:
    """All that is predicted of a candidate."""
    setup, sequence = one.setup, question.subject.sequence
    return Prediction(
        plan=one.plan,
        memory=memory,
        limit_bytes=question.limit_bytes,
        time=time,
        samples=question.batch,
        tokens=question.batch * sequence if sequence else None,
        flops=model_flops(one.parts, setup),
        peak_flops=setup.ranks * question.cluster.device.peak(setup.dtype),
        comm_bytes=sent_bytes(one),
        bubble=bubble,
        why=binding(time),
    )


def model_flops(parts: ModelCosts, setup: TrainingConfig) -> float:
    """The operations of a step on all devices: three times the forward pass, without recomputation."""
    forward = sum(_flops(part) for part in (parts.before, *parts.blocks, parts.after))
    return 3 * forward * setup.tensor * setup.context * setup.batch / setup.microbatch


def _flops(part: BlockCost) -> float:
    return sum(work.flops * work.times for work in part.forward)


def sent_bytes(one: CostedPlan) -> float:
    """What a rank sends in a step, by rings."""
    setup, parts, library = one.setup, one.parts, one.machine.library
    share = 1 / setup.pipeline
    reduced = sum(sum(part.tensor_bytes) for part in parts.blocks) * share
    tensor = 2 * 2 * (setup.tensor - 1) / setup.tensor * reduced * setup.microbatches
    held = sum(part.parameters for part in parts.blocks) * share + parts.before.parameters
    ring = (setup.replicas - 1) / setup.replicas
    gathers = 2 * setup.microbatches if setup.zero == 3 else 1 if setup.zero else 0
    reduces = setup.microbatches if setup.zero >= 2 else 1 if setup.zero else 2
    data = ring * held * (gathers * library.weight_bytes + reduces * library.gradient_bytes)
    messages = 2 * setup.microbatches * setup.stages_per_rank * parts.after.input_bytes * (setup.pipeline > 1)
    return tensor + data + messages


def binding(time: TimeByCause) -> str:
    """What a step's time goes to, largest first, as far as it is worth a word."""
    shares = sorted(((getattr(time, cause) / time.step_s, cause) for cause in CAUSES_OF_TIME), reverse=True)
    return ", ".join(f"{cause} {share:.0%}" for share, cause in shares if share >= 0.03)
