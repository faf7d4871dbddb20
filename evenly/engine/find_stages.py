"""How the pipeline axis cuts a job's model into stages, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from evenly.comm.collectives import decided_by_first
from evenly.comm.world import World
from evenly.data.alone import looking
from evenly.data.generators import undisturbed
from evenly.data.loader import Loader, share_of_evaluation, share_of_step
from evenly.data.nest import copied
from evenly.engine.build import build_model
from evenly.engine.precision import autocast_as_on, place_batch
from evenly.errors import PlanError, SampleError
from evenly.job import Job, is_stream
from evenly.model.modes import evaluating
from evenly.parallel.core.recompute import CachesOff
from evenly.parallel.pipeline.model import StagedModel
from evenly.parallel.pipeline.remote_tensor import cache_key
from evenly.parallel.pipeline.stage_discovery import Code, find_calls, find_stage_plan
from evenly.parallel.pipeline.stages import CallCost, FoundCalls, StagePlan, joined_owners
from evenly.plan import Plan, PlanSpec, with_microbatch
from evenly.plan.cut import Memory, cut
from evenly.plan.orders import in_flight_of
from evenly.plan.schedule import rank_of_stage, runnable

FIRST_BATCHES, MANY, FEW = 4, 16, 4  # microbatches of the first, and of each other: their paths are looked at
# Floating-point operations that a device does in the time it moves a byte: memory traffic is counted as operations.
FLOPS_PER_BYTE = {"cpu": 5.0, "cuda": 100.0}


def find_stages(job: Job, model: nn.Module, plan: Plan, world: World) -> tuple[StagedModel, dict[str, StagePlan]]:
    """The staged model and its stages, of each phase of the job, as `stage_plans_of`. A collective: rank 0 finds them.

    Raises `PlanError`, on all ranks, where a stage cannot run by itself.
    """
    staged = StagedModel(model, "cpu")
    device = torch.device(world.device).type
    with undisturbed(world.device):  # what rank 0 draws, the others do not
        found = decided_by_first(lambda: stage_plans_of(job, staged, plan, device=device)[0], world.group("world"))
    for stage_plan in found.values():
        staged.needs.written |= stage_plan.written
        staged.needs.early |= stage_plan.early
    return staged, found


def stage_plan_of(job: Job, model: StagedModel, plan: Plan, *, device: str) -> tuple[StagePlan, list[CallCost]]:
    stage_plans, call_costs = stage_plans_of(job, model, plan, device=device)
    return next(iter(stage_plans.values())), call_costs


def stage_plans_of(
    job: Job, model: StagedModel, plan: Plan, *, device: str
) -> tuple[dict[str, StagePlan], list[CallCost]]:
    """The stages of `model` under `plan` on devices of type `device`, found on the job's first microbatches.

    By phase of the job; of a job without phases under '', which is also where a job with phases has its evaluation. A
    stage holds what it uses in any of them. The costs are of the calls of the first.
    """
    if job.phases and plan.pipeline.split_points:
        raise PlanError(
            f"plan {plan}",
            "each phase of the job calls blocks in an order of its own, and split_points= counts those of one",
            "leave split_points out",
        )
    jobs = job.by_phase | ({"": job} if job.eval_data is not None else {})
    caches = CachesOff(model.model)
    try:
        phases = {phase: _cut_phase(one, model, plan, device) for phase, one in jobs.items()}
        owners = joined_owners([*model.stage_tensors], [(one.calls, one.counts) for one in phases.values()])
        found: dict[str, StagePlan] = {}
        for phase, one in phases.items():
            evaluations = _evaluations(job, model.model, plan.precision) if phase == "" else ()
            found[phase] = find_stage_plan(
                model, one.calls, one.counts, one.codes, evaluations, owners=owners, phase=phase
            )
        return found, next(iter(phases.values())).calls.costs
    finally:
        caches.close()


@dataclass(frozen=True)
class _CutPhase:
    """Phase of a job: loss on the first microbatches, their block calls, and the number of calls of each stage."""

    codes: Sequence[Code]
    calls: FoundCalls
    counts: tuple[int, ...]


def _cut_phase(job: Job, model: StagedModel, plan: Plan, device: str) -> _CutPhase:
    found = find_calls(model, _codes(job, model.model, plan.precision, device))
    _check_paths(found, plan)
    microbatches = len(share_of_step(job, 0, rank=0, ranks=plan.axes["data"]).own)
    # No limit on the CPU, whose memory all ranks share.
    limit = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else None
    counts = counts_of(found.costs, plan, device=device, microbatches=microbatches, limit_bytes=limit)
    # What stages send has the names of functions that the code calls, to which the types of other devices add some.
    return _CutPhase(_codes(job, model.model, plan.precision), found, counts)


def _evaluations(job: Job, model: nn.Module, precision: str) -> Sequence[Code]:
    def evaluated(run: Callable[[], Any]) -> Any:
        with evaluating(model):
            return run()

    jobs = [job.with_eval_data(data) for data in job.eval_sets.values()] if job.eval_data is not None else []
    codes = [code for one in jobs for code in _codes(one, model, precision, evaluation=True)]
    return [replace(code, run=partial(evaluated, code.run)) for code in codes]


def _check_paths(found: FoundCalls, plan: Plan) -> None:
    """Raises `PlanError` where ranks that gather parameters together would call other blocks than each other."""
    if found.differ and plan.data.zero_stage == 3:
        raise PlanError(
            f"plan {plan}",
            "microbatches call other blocks than each other, by a draw between them (layerdrop) or by what is in them, "
            "and zero=3 gathers the parameters of each",
            "use zero=2, or a plan without pipeline",
        )


def calls_of_job(job: Job, model: StagedModel, plan: Plan, device: str) -> FoundCalls:
    """Find the block calls of the job's first microbatches on a device of this type, on fake tensors."""
    caches = CachesOff(model.model)
    try:
        return find_calls(model, _codes(job, model.model, plan.precision, device))
    finally:
        caches.close()


def _codes(
    job: Job, model: nn.Module, precision: str, device: str = "cpu", *, evaluation: bool = False
) -> Sequence[Code]:
    """Return the job's loss on each of the first microbatches, with the types that autocast gives on `device`."""
    if evaluation:
        shares = [share_of_evaluation(job, rank=0, ranks=1)]
    else:  # of a stream no more is known than the first batch
        steps = range(1 if is_stream(job.data) else min(FIRST_BATCHES, job.steps))
        shares = [share_of_step(job, step, rank=0, ranks=1) for step in steps]
    shares = [replace(one, own=[*range(len(one.microbatches))[: FEW if one.step else MANY]]) for one in shares]
    batches: list[Any] = []
    try:
        for microbatch in Loader(job, evaluation=evaluation).read(iter(shares)):
            batches.append(place_batch(microbatch.batch, precision, "cpu"))
    except SampleError:  # of a later one the training tells in its turn
        if not batches:
            raise

    def run(batch: Any) -> Any:
        with autocast_as_on(device, precision), looking():
            return job.loss(model, copied(batch))  # it may change its batch in place, and runs again

    return [Code(partial(run, batch), cache_key(batch, sizes=False)) for batch in batches]


def counts_of(
    call_costs: Sequence[CallCost], plan: Plan, *, device: str, microbatches: int, limit_bytes: int | None
) -> tuple[int, ...]:
    """The number of block calls in each stage of `plan` (fitted).

    device: type of the ranks' devices. microbatches: of a rank's share of a step. limit_bytes: memory of a device, or
    None for no limit. Raises `PlanError` where there are fewer calls than stages, or nothing fits.
    """
    stages = plan.pipeline.stages
    if len(call_costs) < stages:
        raise PlanError(
            f"plan {plan}",
            f"it has {stages} stages, and the model calls {len(call_costs)} blocks",
            f"use at most {len(call_costs)} stages (pipeline x stages_per_rank)",
        )
    if not plan.pipeline.split_points:
        costs = [_cost(call_cost, device) for call_cost in call_costs]
        return cut(costs, stages, memory=_memory(call_costs, plan, microbatches, limit_bytes))
    begins = [0, *plan.pipeline.split_points, len(call_costs)]
    if begins[-2] >= len(call_costs):
        raise PlanError(
            f"plan {plan}",
            f"a stage is to begin at block {begins[-2]}, and the model calls {len(call_costs)}",
            f"name blocks from 1 to {len(call_costs) - 1}",
        )
    return tuple(end - begin for begin, end in pairwise(begins))


def _memory(call_costs: Sequence[CallCost], plan: Plan, microbatches: int, limit_bytes: int | None) -> Memory | None:
    """Memory limits of the cut: parameters, gradients and two moments of Adam, and saved activations.

    ZeRO shards those that its stage covers over the data axis, as in arXiv 1910.02054.
    """
    if limit_bytes is None:
        return None
    ranks, in_flight = plan.axes["data"], _most_in_flight(plan, microbatches)
    stored = 0 if plan.recompute == "full" else 1
    copies = sum(1 / ranks if plan.data.zero_stage >= stage else 1 for stage in (3, 2, 1, 1))
    return Memory(
        weight_bytes=[round(call_cost.weight_bytes * copies) for call_cost in call_costs],
        activation_bytes=[call_cost.saved_bytes * stored for call_cost in call_costs],
        in_flight=in_flight,
        limit_bytes=[limit_bytes // plan.pipeline.stages_per_rank] * len(in_flight),
    )


def _most_in_flight(plan: Plan, microbatches: int) -> list[int]:
    """Per stage, the most microbatches whose activations it holds at once."""
    per_rank = plan.pipeline.stages_per_rank
    runs = runnable(plan.pipeline.schedule, plan.pipeline.size, per_rank, max(1, microbatches))
    of_ranks = [
        iter(in_flight) for in_flight in in_flight_of(plan.pipeline.schedule, plan.pipeline.size, per_rank, runs)
    ]
    return [next(of_ranks[rank]) for rank in rank_of_stage(plan.pipeline.schedule, plan.pipeline.size, per_rank)]


def _cost(call_cost: CallCost, device: str) -> float:
    return call_cost.flops + call_cost.moved_bytes * FLOPS_PER_BYTE[device]


@dataclass(frozen=True)
class ExplainedStage:
    """One stage.

    rank:      on the pipeline axis. ranks: of the world, that hold it. blocks: names of those that it calls, in order.
    cost:      its fraction of the cost of a forward.
    elements, weight_bytes: of its parameters. saved_bytes: what a microbatch saves for the backward.
    in_flight: the most microbatches that it holds at once.
    receives:  the tensors that it receives for each microbatch.
    """

    stage: int
    rank: int
    ranks: tuple[int, ...]
    blocks: tuple[str, ...]
    cost: float
    elements: int
    weight_bytes: int
    saved_bytes: int
    in_flight: int
    receives: tuple[str, ...]


@dataclass(frozen=True)
class StagesExplained:
    """Where a plan cuts a job's model; shared: name of a parameter that several stages hold -> the stages."""

    plan: str
    schedule: str
    microbatches: int
    cut: str
    stages: tuple[ExplainedStage, ...]
    shared: dict[str, tuple[int, ...]]


def explain_stages(job: Job, spec: PlanSpec) -> StagesExplained:
    """Where `spec` cuts the job's model; runs in this process alone, on fake tensors.

    Raises `PlanError` where the size of the pipeline is open, the plan has another microbatch than the job, or a stage
    cannot run by itself.
    """
    if not isinstance(spec.pipeline, int):
        raise PlanError(
            f"explain plan {spec}",
            "the pipeline takes all devices that a run is given, and here none are",
            "give its size: --only pipeline=4",
        )
    plan = replace(spec, data=spec.data if isinstance(spec.data, int) else 1).complete(job.precision)
    job = with_microbatch(job, plan)
    model = StagedModel(build_model(job, precision=plan.precision, device=None), "cpu")
    stage_plan, call_costs = stage_plan_of(job, model, plan, device="cpu")
    microbatches = len(share_of_step(job, 0, rank=0, ranks=plan.axes["data"]).own)
    in_flight = _most_in_flight(plan, microbatches)
    costs = [_cost(call_cost, "cpu") for call_cost in call_costs]
    ranks = rank_of_stage(plan.pipeline.schedule, plan.pipeline.size, plan.pipeline.stages_per_rank)
    stages, each = list[ExplainedStage](), plan.ranks // plan.pipeline.size
    for stage, rank in enumerate(ranks):
        own = [n for n, call_cost in enumerate(call_costs) if stage_plan.stage_of[call_cost.call] == stage]
        fakes = [model.stage_tensors[name].fake for name, owners in stage_plan.owners.items() if stage in owners]
        stages.append(
            ExplainedStage(
                stage=stage,
                rank=rank,
                ranks=tuple(range(rank * each, (rank + 1) * each)),
                blocks=tuple(call_costs[n].call[0] for n in own),
                cost=sum(costs[n] for n in own) / sum(costs),
                elements=sum(fake.numel() for fake in fakes),
                weight_bytes=sum(fake.nbytes for fake in fakes),
                saved_bytes=sum(call_costs[n].saved_bytes for n in own),
                in_flight=in_flight[stage],
                receives=tuple(map(str, stage_plan.stage_inputs[True][stage])),
            )
        )
    return StagesExplained(
        str(spec), plan.pipeline.schedule, microbatches, stage_plan.cut, tuple(stages), stage_plan.shared
    )
