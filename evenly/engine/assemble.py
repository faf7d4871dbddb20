"""Builds the job's model and composes it with the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import nn

from evenly.comm.world import World
from evenly.engine.build import build_model, check_same_start, refuse_gradient_hooks, refuse_layouts
from evenly.engine.compose import Composed, compose, devices_of
from evenly.engine.find_splits import find_splits
from evenly.job import Job
from evenly.launcher.allocator import hand_back_freed_memory, keep_freed_memory, return_freed_memory
from evenly.parallel.core.places import all_restored
from evenly.parallel.core.sharded_init import ShardedInit
from evenly.parallel.core.stale import mark_stale, memory_of
from evenly.plan import Plan

if TYPE_CHECKING:
    from evenly.parallel.pipeline.model import StagedModel
    from evenly.parallel.pipeline.stages import StagePlan


Load = Callable[[nn.Module, ShardedInit | None], None]


def build_and_compose(job: Job, plan: Plan, world: World, load: Load | None = None) -> Composed:
    """The job's model, composed with the plan; a rank never holds more than its shards and one full tensor at a time.

    load: gives a model that was just built, on this rank in slices, other values than its constructor's.
    A collective. Raises `PlanError`, on all ranks alike, where the model cannot be split so.
    """
    sharded = plan.data.zero_stage == 3 or plan.tensor.active or plan.pipeline.active
    if sharded:
        hand_back_freed_memory()
    with ExitStack() as stack:
        init = stack.enter_context(ShardedInit(world.group("world"))) if sharded else None
        # What is offloaded stays on the CPU; splitting takes each part to the rank's device.
        devices = ["cpu"] if sharded else devices_of(plan, world)
        modules = [build_model(job, precision=plan.precision, device=device) for device in devices]
        if init is not None:
            init.freeze()
            if not init.has_large:
                stack.close()  # the operations of all that follows need not be watched
            refuse_gradient_hooks(modules[0], plan)
            return_freed_memory()  # small blocks, which its constructor has left
        if plan.devices > 1:
            refuse_layouts(modules[0], plan)
        if load is not None:
            for module in modules:
                load(module, init)
        check_same_start(modules[0], world, init)
        before = memory_of(modules[0])
        roots = roots_of(job, modules) if plan.tensor.active or plan.pipeline.active else []
        with all_restored(roots):  # what runs on fake tensors here is no part of the training
            splits = find_splits(job, modules[0], plan, world)
            stages = _find_stages(job, modules[0], plan, world)
        composed = compose(modules, plan, world, splits, stages)
    if composed.pipeline is not None:
        refuse_gradient_hooks(modules[0], plan, composed.pipeline.ties.names)
    if sharded:
        mark_stale(before, modules)
    if sharded and world.device == "cpu":
        keep_freed_memory()
    return composed


def roots_of(job: Job, modules: Sequence[nn.Module] = ()) -> list[tuple[str, Any]]:
    models = [(f"replica {number}" * bool(number), module) for number, module in enumerate(modules)]
    return [*models, *((phase or "loss", one.loss) for phase, one in job.by_phase.items())]


def _find_stages(
    job: Job, model: nn.Module, plan: Plan, world: World
) -> tuple[StagedModel, dict[str, StagePlan]] | None:
    if not plan.pipeline.active:
        return None
    from evenly.engine.find_stages import find_stages  # torch's parts behind it take a while to import

    return find_stages(job, model, plan, world)
