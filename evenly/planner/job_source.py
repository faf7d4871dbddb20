"""A job as a cost source of the planner: its model is profiled as each plan runs it, and nothing is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from evenly.errors import EvenlyError, PlanError
from evenly.hardware.devices import Device
from evenly.job import Job, Precision
from evenly.model.parts import BlockCost, ModelCosts, OpCost
from evenly.plan import Plan, PlanSpec, with_microbatch
from evenly.plan.axes import TensorAxis
from evenly.planner.job_memory import memory_of_ranks
from evenly.planner.job_profile import STEPS, JobProfiler
from evenly.planner.prediction import MemoryByCause
from evenly.planner.profile import Profile, parts_of
from evenly.planner.search import MICROBATCHES
from evenly.planner.speeds import Library
from evenly.planner.training_config import TrainingConfig

TENSOR_SIZES = (2, 4, 8, 16)


@dataclass(frozen=True)
class JobSource:
    """Implements `CostSource`. A job that states no microbatch leaves it to its plans.

    step: of which the microbatches are taken, from 0. steps: from there on, over which ranks with unlike microbatches
    are looked at. watch: called with a plan before the model is run as that has it. device: type of the devices, on
    which the types of results depend under autocast. note: who chooses the microbatch, in words.
    """

    job: Job
    step: int = 0
    steps: int = STEPS
    watch: Callable[[Plan], object] | None = None
    device: str = "cpu"
    note: str = ""
    _on: dict[str, JobSource] = field(default_factory=dict[Any, Any])
    _profilers: dict[int, JobProfiler] = field(default_factory=dict[int, JobProfiler])
    _memory: dict[Plan, list[MemoryByCause]] = field(default_factory=dict[Plan, list[MemoryByCause]])
    # By the profile, which lives as long, and the type that is multiplied; and of these by the size of the tensor axis.
    _parts: dict[tuple[int, str], tuple[Profile, ModelCosts]] = field(default_factory=dict[Any, Any])
    _least: dict[tuple[int, int], ModelCosts] = field(default_factory=dict[tuple[int, int], ModelCosts])

    @cached_property
    def profiler(self) -> JobProfiler:
        return JobProfiler(self.job, self.step, self.steps, self.watch, self.device)

    def on(self, device: Device) -> JobSource:
        """The same on such devices; of one type there is one."""
        kind = "cpu" if device.kind == "cpu" else "cuda"
        if kind == self.device:
            return self
        return self._on.setdefault(kind, JobSource(self.job, self.step, self.steps, self.watch, kind, self.note))

    @property
    def name(self) -> str:
        return self.job.name or "the job"

    @property
    def precision(self) -> Precision:
        return self.job.precision

    @cached_property
    def whole(self) -> Profile:
        return self.profiler.profile(PlanSpec(data=1).complete(self.job.precision), held=False)

    @property
    def blocks(self) -> int:
        """Calls of blocks in a forward pass."""
        return len(self.whole.calls)

    @property
    def sequence(self) -> int | None:
        """Nobody says what of a job's samples are tokens."""
        return None

    @property
    def microbatch(self) -> int | None:
        """The job's own; where it is cut by cost, what comes to as many microbatches; None where it states neither."""
        if self.job.microbatch_cost is None:
            return None if self.job.microbatch == "auto" else self.job.microbatch
        return math.ceil(self.job.global_batch / max(1, len(self.profiler.microbatches)))

    def loads(self, replicas: int, *, filled: bool) -> tuple[tuple[float, ...], ...]:
        return () if self.job.microbatch_cost is None else self.profiler.loads(replicas, filled=filled)

    @property
    def is_run(self) -> bool:
        return True

    def tensor_sizes(self, most: int) -> Sequence[int]:
        return [1, *(size for size in TENSOR_SIZES if size <= most and self._splits(size))]

    def _splits(self, size: int) -> bool:
        try:
            return bool(self.profiler.layouts(PlanSpec(data=1, tensor=size).complete(self.job.precision)))
        except EvenlyError:
            return False

    def refusal(self, plan: Plan) -> str | None:
        """What profiling the model so refuses; what its recomputation does, `memory` finds out."""
        cuts = plan.data.zero_stage or plan.tensor.active
        if plan.offload != "none" and cuts and not self.profiler.optimizer_costs(plan).elementwise:
            return "its optimizer may need whole parameters, of which each rank has a part on its host"
        try:
            self._as_run(plan).profile(replace(plan, recompute="none"), held=False)
            if plan.pipeline.active:
                self._cut_as(plan).stages(plan, None)
        except PlanError as problem:
            return problem.found
        return None

    def layers(self, plan: Plan, device: Device) -> Sequence[int]:
        if not plan.pipeline.active:
            return [self.blocks]
        return self._cut_as(plan).stages(plan, device).counts

    def parts(self, plan: Plan, config: TrainingConfig) -> ModelCosts:
        """As it was read; what a plan computes again is not in the parts. Parts that are alike are one."""
        plan = replace(plan, recompute="none")
        profile = self._as_run(plan).typical(plan, config)
        key = id(profile), config.dtype
        if key not in self._parts:
            self._parts[key] = profile, _parts_in(parts_of(profile), config)
        return self._parts[key][1]

    def least_parts(self, plan: Plan, config: TrainingConfig) -> ModelCosts:
        """The parts of the whole model, dealt evenly over the tensor axis, whose messages are left out."""
        whole = self.parts(replace(plan, tensor=TensorAxis(1, (), False)), replace(config, tensor=1))
        if config.tensor == 1:
            return whole
        key = id(whole), config.tensor
        if key not in self._least:
            self._least[key] = _least_of(whole, config.tensor)
        return self._least[key]

    def _as_run(self, plan: Plan) -> JobProfiler:
        """A profiler of the job with the plan's microbatch.

        Of the whole model, which is looked at with every microbatch, it has profiled the largest and the smallest: what
        lies between these may follow from them.
        """
        whole = not plan.tensor.active and plan.recompute == "none"
        for size in self._ends if whole and plan.microbatch is not None else ():
            self._cut_as(replace(plan, microbatch=size)).profile(plan)
        return self._cut_as(plan)

    def _cut_as(self, plan: Plan) -> JobProfiler:
        """A profiler of the job with the plan's microbatch; all profile the same model."""
        if plan.microbatch is None:
            return self.profiler
        if plan.microbatch not in self._profilers:
            self._profilers[plan.microbatch] = replace(self.profiler, job=with_microbatch(self.job, plan))
        return self._profilers[plan.microbatch]

    @cached_property
    def _ends(self) -> Sequence[int]:
        sizes = [size for size in MICROBATCHES if self.job.global_batch % size == 0]
        return sizes[-1], sizes[0]

    def memory(
        self, plan: Plan, config: TrainingConfig, layers: Sequence[int], library: Library, ranks: Sequence[int] = ()
    ) -> list[MemoryByCause]:
        rest = library.holdings.rest
        found = [replace(one, context=one.context + rest) for one in self._memory_of(plan.with_stages(layers))]
        return [found[rank] for rank in ranks] if ranks else found

    def _memory_of(self, plan: Plan) -> list[MemoryByCause]:
        if plan not in self._memory:
            meters = memory_of_ranks(self._as_run(plan), plan)
            each = len(meters) // (plan.pipeline.size if plan.pipeline.active else 1)
            devices = [meters[begin : begin + each] for begin in range(0, len(meters), each)]
            self._memory[plan] = [max(of_rank, key=lambda meter: meter.peak).by_cause for of_rank in devices]
        return self._memory[plan]


def _parts_in(found: ModelCosts, config: TrainingConfig) -> ModelCosts:
    """The parts in the type that the config multiplies; those that are alike are one."""
    made: dict[object, BlockCost] = {}
    return ModelCosts(
        before=_computed(found.before, config, made),
        blocks=[_computed(replace(block, name="block"), config, made) for block in found.blocks],
        after=_computed(found.after, config, made),
    )


def _least_of(whole: ModelCosts, ranks: int) -> ModelCosts:
    made: dict[int, BlockCost] = {}

    def least(part: BlockCost) -> BlockCost:
        if id(part) not in made:
            made[id(part)] = _dealt(part, ranks)
        return made[id(part)]

    return ModelCosts(before=least(whole.before), blocks=[*map(least, whole.blocks)], after=least(whole.after))


def _computed(part: BlockCost, config: TrainingConfig, made: dict[object, BlockCost]) -> BlockCost:
    """`part` in the type that the config multiplies, or the one in `made` that is alike."""
    forward, backward = _works(part.forward, config), _works(part.backward, config)
    key = (part.name, part.parameters, forward, backward, part.collectives, part.collectives_backward, part.input_bytes)
    return made.setdefault(key, replace(part, forward=forward, backward=backward))


def _dealt(part: BlockCost, ranks: int) -> BlockCost:
    def works(given: Sequence[OpCost]) -> tuple[OpCost, ...]:
        return tuple(replace(one, flops=one.flops / ranks, moved_bytes=one.moved_bytes / ranks) for one in given)

    return replace(
        part, parameters=part.parameters // ranks, forward=works(part.forward), backward=works(part.backward)
    )


def _works(works: Sequence[OpCost], config: TrainingConfig) -> tuple[OpCost, ...]:
    """Selective recomputation repeats what multiplies nothing."""
    return tuple(replace(work, dtype=config.dtype, recomputed=work.kind == "memory") for work in works)
