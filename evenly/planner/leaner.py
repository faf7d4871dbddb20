"""The plan under which a run goes on that had no room: of those that need less memory, the one predicted fastest.

Microbatches stay, since numbers follow them, and so do the devices. What changes is how they are run: what is computed
again, what the data axis shards, whether the tensor axis splits the sequence, where the optimizer's state is, and into
how many stages the model is cut.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from typing import Any, get_args

from evenly.errors import PlanError
from evenly.hardware.cluster import Cluster
from evenly.job import Job
from evenly.plan import Offload, PlanSpec
from evenly.plan.axes import ZeroStage
from evenly.plan.schedule import Schedule
from evenly.planner.costed_plan import costed_plan_of, layers_of, predicted, time_of
from evenly.planner.job_source import JobSource
from evenly.planner.prediction import Prediction
from evenly.planner.request import PlanRequest

RECOMPUTE = ("none", "selective", "full")
OFFLOAD: tuple[Offload, ...] = ("none", "optimizer", "parameters")
CLEARLY_LESS = 0.9  # of the memory of a plan that had no room: predictions may be off by some percent
MIB = 2**20


def leaner_plan(
    job: Job, failed: Sequence[PlanSpec], refused: Sequence[PlanSpec], cluster: Cluster, *, step: int
) -> tuple[PlanSpec, Prediction | None]:
    """The plan that `job` is run under next, with what is predicted of it; None where the model cannot be read.

    failed: plans with all sizes that had no room, the first of which says what stays. refused: those that cannot run
    this job. step: that had no room, from 0: others may have shorter samples. Raises `PlanError` where no plan is left.
    """
    base = failed[0]
    if job.microbatch_cost is None:
        job = replace(job, microbatch=base.microbatch or job.samples_per_microbatch)
    source = JobSource(job, step)
    request = PlanRequest(source=source, cluster=cluster, batch=job.global_batch)
    tried = {text_of(spec) for spec in (*failed, *refused)}
    specs = [spec for spec in leaner_specs(base, on_gpu=cluster.device.kind != "cpu") if text_of(spec) not in tried]
    saving = [spec for spec in specs if all(saves_more(spec, than) for than in failed)]
    try:
        known = [predict(request, spec) for spec in failed]
    except Exception:  # the model cannot be read without running it; whatever it is, it is not to end the run
        if not saving:
            raise _no_plan(job, failed, refused, "give it more devices, or a smaller microbatch") from None
        return saving[0], None
    predictions = [(one, spec) for spec in specs if (one := _predicted_or_none(request, spec)) is not None]
    best = fastest_leaner([one for one, _ in predictions], known)
    if best is None:  # what saves elsewhere than at the predicted peak may do all the same
        least = min(one.peak_bytes for one in known)
        best = next((one for one, spec in predictions if spec in saving and one.peak_bytes <= least), None)
    if best is None:
        leanest, spec = min([*zip(known, failed, strict=True), *predictions], key=lambda one: one[0].peak_bytes)
        raise _no_plan(job, failed, refused, _smaller_microbatch(request, source, spec, leanest))
    return next(spec for one, spec in predictions if one is best), best


def fastest_leaner(predictions: Sequence[Prediction], failed: Sequence[Prediction]) -> Prediction | None:
    """Of plans with less memory than all that have `failed`, the fastest; None where none is.

    No GPU has measured what offloading takes: what offloads less comes first. Plans that save next to nothing are taken
    where no other is left.
    """
    least = min(one.peak_bytes for one in failed)
    leaner = [one for one in predictions if one.peak_bytes < least]
    clearly = [one for one in leaner if one.peak_bytes <= CLEARLY_LESS * least]
    return min(
        clearly or leaner, key=lambda one: (OFFLOAD.index(one.plan.offload), one.step_s, one.peak_bytes), default=None
    )


def leaner_specs(base: PlanSpec, *, on_gpu: bool) -> list[PlanSpec]:
    """What may need less memory than `base`, whose sizes are all set, on the same devices; what changes least first."""
    specs = {text_of(spec): spec for spec in _specs(base, OFFLOAD if on_gpu else OFFLOAD[:1])}
    specs.pop(text_of(base), None)
    return [*specs.values()]


def text_of(spec: PlanSpec) -> str:
    """The text of the complete plan, by which plans are the same; the plan of a run states its precision."""
    return str(spec.complete(spec.precision or "float32"))


def _specs(base: PlanSpec, offloads: Sequence[Offload]) -> Iterator[PlanSpec]:
    for changes in _changes(base, offloads):
        try:
            spec = replace(base, **changes)
            text_of(spec)
        except PlanError:  # it does not go with what stays
            continue
        yield spec


def _changes(base: PlanSpec, offloads: Sequence[Offload]) -> Iterator[dict[str, Any]]:
    data, stages = base.data if isinstance(base.data, int) else 1, _stages(base)
    levels = RECOMPUTE[RECOMPUTE.index(base.recompute or "none") :]
    for more in [number for number in range(1, data + 1) if data % number == 0]:
        for offload in offloads if base.offload in (None, "none") else (base.offload,):
            for (zero, shard), schedule, sequence in product(
                _zeros(base, data // more, offload), _schedules(base, stages * more), _sequences(base, stages * more)
            ):
                changes: dict[str, Any] = {"offload": offload, "zero": zero, "shard": shard}
                changes["sequence_parallel"] = sequence
                if more > 1:
                    changes |= {"data": data // more, "pipeline": stages * more}
                    changes["speeds"] = None
                if more > 1 or schedule != base.schedule:
                    changes |= {"schedule": schedule, "stages_per_rank": None, "split_points": None}
                if zero == 3:
                    changes["speeds"] = None
                yield from ({**changes, "recompute": level} for level in levels)


def _zeros(base: PlanSpec, data: int, offload: Offload) -> Iterator[tuple[ZeroStage | None, int | None]]:
    """What zero shards, and over how many of `data` ranks; None: all of them."""
    if offload == "parameters":
        yield 3, None
    elif base.replicas is not None or data == 1:
        yield None, None
    else:
        for zero in get_args(ZeroStage)[base.zero or 0 :]:
            if zero and isinstance(base.shard, int) and data % base.shard == 0:
                yield zero, base.shard
            yield zero or None, None


def _schedules(base: PlanSpec, stages: int) -> Sequence[Schedule | None]:
    return (None,) if stages == 1 else tuple(dict.fromkeys((base.schedule or "1f1b", "1f1b")))


def _sequences(base: PlanSpec, stages: int) -> Sequence[bool | None]:
    """Whether ranks of the tensor axis share the sequence too; not within a pipeline."""
    if stages > 1 or not base.splits_tensors:
        return (None,)
    return (True,) if base.sequence_parallel else (None, True)


def _stages(spec: PlanSpec) -> int:
    return spec.pipeline if isinstance(spec.pipeline, int) else 1


def saves_more(spec: PlanSpec, than: PlanSpec) -> bool:
    """Whether it saves memory in every way in which another plan does, and in one of them more."""
    mine, others = _savings(spec), _savings(than)
    return mine != others and all(own >= other for own, other in zip(mine, others, strict=True))


def _savings(spec: PlanSpec) -> tuple[int, ...]:
    recompute, offload = RECOMPUTE.index(spec.recompute or "none"), OFFLOAD.index(spec.offload or "none")
    return _stages(spec), spec.zero or 0, recompute, offload


def predict(request: PlanRequest, spec: PlanSpec) -> Prediction:
    """What is predicted of a plan with all sizes. Raises `PlanError` where the model cannot run so."""
    plan = replace(spec, microbatch=None).complete(request.source.precision)
    if (why := request.source.refusal(plan)) is not None:
        raise PlanError(f"plan {plan}", why, "leave that axis to others")
    one = costed_plan_of(request, plan)
    layers = layers_of(one)
    memory = request.source.memory(one.plan, one.config, layers, one.machine.library)
    return predicted(request, one, memory, *time_of(one, layers))


def _predicted_or_none(request: PlanRequest, spec: PlanSpec) -> Prediction | None:
    try:
        return predict(request, spec)
    except Exception:  # as of a model that cannot be read
        return None


# --------------------------------------------------------------------------------------------------- nothing that fits


def _no_plan(job: Job, failed: Sequence[PlanSpec], refused: Sequence[PlanSpec], do: str) -> PlanError:
    tried = [f"{text_of(spec)} had no room" for spec in failed]
    tried += [f"{text_of(spec)} cannot run this job" for spec in refused]
    return PlanError(f"find a plan under which {job.name or 'the job'} has room", "; ".join(tried), do)


def _smaller_microbatch(request: PlanRequest, source: JobSource, spec: PlanSpec, leanest: Prediction) -> str:
    job, limit = source.job, request.limit_bytes
    name = "microbatch" if job.microbatch_cost is None else "microbatch_cost"
    room = f"{limit / MIB:,.0f} MiB of a device"
    if leanest.peak_bytes <= limit:  # something else takes memory, or limits it
        limit, room = (
            CLEARLY_LESS * leanest.peak_bytes,
            f"less than the {leanest.peak_bytes / MIB:,.0f} MiB that it was",
        )

    def peak(size: int) -> float:
        smaller = replace(request, source=JobSource(replace(job, **{name: size}), source.step))
        found = _predicted_or_none(smaller, spec)
        return inf if found is None else found.peak_bytes

    size = int(job.microbatch or job.microbatch_cost or 1)
    fits = bisect_left(range(1, size), True, key=lambda number: peak(number) > limit)
    if fits == 0:
        return f"no {name} is predicted to fit under {text_of(spec)}: give it more devices"
    return (
        f"{name}={fits} is the largest that is predicted to fit under {text_of(spec)} ({peak(fits) / MIB:,.0f} MiB, "
        f"{room}); its numbers are others, since random streams follow microbatches; or give it more devices"
    )
