"""What a plan does in a job's first step, by the functions that decide it: nothing here decides anything itself.

Who runs which samples, which gradients travel together and when they are complete, who sends what around the ring,
which part of each parameter a rank keeps, and what ranks hold under each stage of ZeRO. The model runs on fake tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from evenly.comm.ring import Step, steps_of
from evenly.comm.transport import even_sizes
from evenly.data.loader import cut_batch
from evenly.errors import EvenlyError, PlanError
from evenly.job import Job
from evenly.parallel.data.grouping import unit_members
from evenly.parallel.data.row_layout import RowLayout
from evenly.plan import Plan, PlanSpec, with_microbatch
from evenly.planner.job_memory import memory_of_ranks
from evenly.planner.job_profile import JobProfiler
from evenly.planner.memory import in_buckets
from evenly.planner.profile import MODEL, Parameter, Profile

STAGES = (0, 1, 2, 3)  # of ZeRO
MOST_DRAWN = 64  # ranks of the data axis


@dataclass(frozen=True, kw_only=True)
class BackwardPart:
    """What the backward computes of a call of a block, or before the first or after the last: shares of its work."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class BucketFilled:
    """Gradients that are summed together; where in the backward, 0 to 1, the first and the last of them is there."""

    parameters: tuple[str, ...]
    bytes: int
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Mechanisms:
    """What a plan does in the first step; empty where it does not do that.

    ranks:    of the data axis. apart: the difference between the numbers of two neighbours there.
    microbatches: their samples. costs: of each, where the job has costs.
    dealt:    of each rank, the microbatches that it runs.
    backward: of a microbatch, in the order of time. buckets: in the order in which they are sent, of the first rank of
              a pipeline. are_units: whether they are what ZeRO 3 gathers and reduces together.
    ring:     of each rank, its steps with the first bucket. chunk_bytes: of each chunk.
    shapes:   of all parameters by name, whole.
    pieces:   of each rank, of every parameter by name the elements from which to which it keeps under ZeRO.
    held:     by the stage of ZeRO, of each rank the bytes at its peak by cause. refused: by the stage, why not.
    """

    plan: str
    ranks: int
    apart: int
    microbatches: Sequence[Sequence[int]]
    costs: Sequence[float]
    dealt: Sequence[Sequence[int]]
    backward: Sequence[BackwardPart]
    buckets: Sequence[BucketFilled]
    are_units: bool
    ring: Sequence[Sequence[Step]]
    chunk_bytes: Sequence[int]
    shapes: Mapping[str, tuple[int, ...]]
    pieces: Sequence[Mapping[str, tuple[int, int]]]
    held: Mapping[int, Sequence[Mapping[str, float]]]
    refused: Mapping[int, str]


def mechanisms_of(job: Job, spec: PlanSpec) -> Mechanisms:
    """Those of `spec`, whose axes have sizes, for the job; runs in this process alone.

    Raises `PlanError` where a size is open or there are too many ranks to draw, `UserError` where the model cannot run.
    """
    cuts = spec.splits_tensors or spec.splits_blocks
    ranks = spec.data if isinstance(spec.data, int) else 1 if cuts else None
    if ranks is None or "auto" in (spec.tensor, spec.pipeline):
        found = "an axis takes all devices that a run is given, and here none are"
        raise PlanError(f"draw plan {spec}", found, "give its size: --only data=4")
    if ranks > MOST_DRAWN:
        raise PlanError(f"draw plan {spec}", f"its data axis has {ranks} ranks", f"give at most {MOST_DRAWN}")
    plan = replace(spec, data=ranks).complete(job.precision)
    profiler = JobProfiler(with_microbatch(job, plan))
    profile = profiler.profile(plan)
    shares = cut_batch(profiler.job, 0).shares(ranks)
    parameters = [*profile.parameters.values()]
    backward, ready = _backward_of(profile)
    groups = _together(profiler, plan, profile) if ranks > 1 else []
    held, refused = _held_by_stage(profiler, replace(spec, data=ranks), plan) if ranks > 1 else ({}, {})
    shard = plan.data.shard if plan.data.zero_stage else 1
    return Mechanisms(
        plan=str(spec),
        apart=plan.tensor.size,
        ranks=ranks,
        microbatches=shares[0].microbatches,
        costs=shares[0].costs,
        dealt=[share.own for share in shares],
        backward=backward,
        buckets=[_filled(group, ready) for group in groups],
        are_units=plan.data.zero_stage == 3,
        ring=[steps_of(rank, ranks) for rank in range(ranks)] if ranks > 1 else [],
        chunk_bytes=_chunks(groups, ranks),
        shapes={name: tuple(one.shape) for name, one in profiler.model(plan.precision).named_parameters()},
        pieces=[_pieces(parameters, shard, position) for position in range(shard)] if shard > 1 else [],
        held=held,
        refused=refused,
    )


def _backward_of(profile: Profile) -> tuple[list[BackwardPart], dict[str, float]]:
    """The parts of the backward by their shares of its operations, and where in it each gradient is there.

    Within a part its intervals are taken to be equally long.
    """
    order = _places(profile)
    work = {place: sum(one.flops * one.times for one in profile.works.get(("backward", place), ())) for place in order}
    count = {place: order.count(place) for place in work}
    whole = sum(work.values())
    now, parts, ready = 0.0, dict[int, tuple[float, float]](), dict[str, float]()
    for place, one in zip(order, profile.backward, strict=True):
        begin, now = now, now + (work[place] / whole if whole else count[place] / len(order)) / count[place]
        parts[place] = (parts.get(place, (begin, 0.0))[0], now)
        if one.event.what == "gradient":
            ready[one.event.parameter] = now
    named = [BackwardPart(name=_name_of(profile, place), begin=begin, end=end) for place, (begin, end) in parts.items()]
    return named, ready


def _places(profile: Profile) -> list[int]:
    found, at = list[int](), len(profile.calls)
    for one in profile.backward:
        event = one.event
        ends = event.what == "end" and event.call >= 0
        found.append(event.call if ends else at)
        if event.call >= 0 and event.what in ("begin", "end"):
            at = event.call - ends
    return found


def _name_of(profile: Profile, place: int) -> str:
    if place == MODEL:
        return "before the blocks"
    return profile.calls[place].block if place < len(profile.calls) else "after the blocks, and the loss"


def _together(profiler: JobProfiler, plan: Plan, profile: Profile) -> list[list[Parameter]]:
    """Whose gradients the data axis sums together, in the order in which the backward completes them."""
    found = [one for one in profile.parameters.values() if one.trained]
    if plan.pipeline.active:
        owners = profiler.stages(plan, None).owners
        found = [one for one in found if 0 in owners.get(one.names[0], (0,))]
    if plan.data.zero_stage < 3:
        return in_buckets(found)
    blocks = [block.name for block in profiler.blocks(plan)]
    units = [one.members for one in unit_members([(one.names, one.bytes) for one in found], blocks)]
    apart = {number for unit in units for number in unit}
    root = [number for number in range(len(found)) if number not in apart]
    return [[found[number] for number in unit] for unit in (*reversed(units), root) if unit]


def _filled(bucket: Sequence[Parameter], ready: Mapping[str, float]) -> BucketFilled:
    times = [ready.get(one.names[0], 1.0) for one in bucket]  # of a parameter without a gradient at the end
    names = tuple(one.names[0] for one in bucket)
    return BucketFilled(parameters=names, bytes=sum(one.bytes for one in bucket), begin=min(times), end=max(times))


def _chunks(groups: Sequence[Sequence[Parameter]], ranks: int) -> list[int]:
    if not groups:
        return []
    first = groups[0]
    return [size * first[0].dtype.itemsize for size in even_sizes(sum(one.elements for one in first), ranks)]


def _pieces(parameters: Sequence[Parameter], ranks: int, position: int) -> dict[str, tuple[int, int]]:
    found = dict[str, tuple[int, int]]()
    for one in parameters:
        if not one.shape or not one.elements:
            continue
        rows, width = RowLayout.of(one.shape, ranks).own(position), one.elements // one.shape[0]
        found[one.names[0]] = (rows.start * width, rows.stop * width)
    return found


def _held_by_stage(
    profiler: JobProfiler, spec: PlanSpec, plan: Plan
) -> tuple[dict[int, list[dict[str, float]]], dict[int, str]]:
    held, refused = dict[int, list[dict[str, float]]](), dict[int, str]()
    for stage in STAGES:
        own = stage == plan.data.zero_stage
        try:
            one = plan if own else replace(spec, zero=stage, shard=None).complete(profiler.job.precision)
            held[stage] = [asdict(meter.by_cause) for meter in memory_of_ranks(profiler, one)]
        except EvenlyError as problem:
            refused[stage] = problem.found
    return held, refused
