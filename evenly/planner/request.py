"""What the planner is asked, and what it finds: the form in which the search is called. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from evenly.hardware.cluster import Cluster
from evenly.hardware.devices import Device
from evenly.job import Precision
from evenly.model.parts import ModelCosts
from evenly.plan import Plan, PlanSpec
from evenly.planner.prediction import MemoryByCause, Prediction
from evenly.planner.speeds import Library, Speeds, own_library, speeds_of
from evenly.planner.training_config import TrainingConfig

IN_PIECES = 0.04  # of a device's memory
RESERVE = 0.08  # of what a rank may take


class CostSource(Protocol):
    """A model to plan for: a known shape, or a job that was read. Plans are complete, configs theirs."""

    @property
    def name(self) -> str: ...

    @property
    def blocks(self) -> int: ...

    @property
    def sequence(self) -> int | None:
        """Tokens of a sample; None where samples are no sequences."""
        ...

    @property
    def precision(self) -> Precision: ...

    @property
    def microbatch(self) -> int | None:
        """Samples that every plan has to run at a time, which plans then do not state; None where they are free."""
        ...

    def on(self, device: Device) -> CostSource: ...

    def loads(self, replicas: int, *, filled: bool) -> tuple[tuple[float, ...], ...]:
        """Of several steps what each microbatch costs, on the replica that has most; none where all are alike.

        filled: whether all replicas run equally many.
        """
        ...

    @property
    def is_run(self) -> bool: ...

    def tensor_sizes(self, most: int) -> Sequence[int]:
        """Sizes of the tensor axis that it can be split by, ascending from 1, up to `most`."""
        ...

    def refusal(self, plan: Plan) -> str | None:
        """Why it cannot run so, whatever is recomputed; None where it can."""
        ...

    def layers(self, plan: Plan, device: Device) -> Sequence[int] | None:
        """Blocks of every stage of `plan` where a run of it decides them; None leaves them to the cost model."""
        ...

    def parts(self, plan: Plan, config: TrainingConfig) -> ModelCosts: ...

    def least_parts(self, plan: Plan, config: TrainingConfig) -> ModelCosts | None:
        """Parts that those of `plan` are no less than, where it takes time to find these; None where it does not."""
        ...

    def memory(
        self, plan: Plan, config: TrainingConfig, layers: Sequence[int], library: Library, ranks: Sequence[int] = ()
    ) -> list[MemoryByCause]:
        """The memory of every rank of the pipeline, or of some `ranks`, where stage i has `layers[i]` blocks.

        Raises `PlanError` where it cannot be recomputed as `plan` says.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What plans are sought for.

    batch:        global batch, samples. only: what every plan has to state; what it leaves open is searched.
    memory_bytes: of a device; None for what its kind has. max_devices: how many may be used; None for all.
    takes_all:    whether plans use all of these, though some may have no microbatch to run.
    reserve:      share of `limit_bytes` that plans are to leave free, as predictions are off by some percent and data
                  differ. It is of the memory of the device that a rank computes on, which is main memory on a CPU.
                  Fuller plans come after all that leave it.
    step_s:       a step may take so long: the fewest devices that manage are sought. None: the fastest plan of all.
    top:          how many plans the result has.
    watch:        called now and then with words that say how far the search is.
    """

    source: CostSource
    cluster: Cluster
    batch: int
    only: PlanSpec = field(default_factory=PlanSpec)
    memory_bytes: float | None = None
    max_devices: int | None = None
    takes_all: bool = False
    step_s: float | None = None
    top: int = 5
    reserve: float = RESERVE
    watch: Callable[[str], object] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", self.source.on(self.cluster.device))

    @property
    def limit_bytes(self) -> float:
        """What a rank may take: what was stated, or what a device has, less what its allocator cannot use in pieces."""
        return self.memory_bytes or (1 - IN_PIECES) * self.cluster.device.memory_bytes

    @property
    def reserve_bytes(self) -> float:
        """What plans are to leave free of `limit_bytes`."""
        return self.reserve * self.limit_bytes

    @cached_property
    def speeds(self) -> Speeds:
        return speeds_of(self.cluster)

    def config(self, plan: Plan) -> TrainingConfig:
        microbatch = plan.microbatch or self.source.microbatch
        assert microbatch is not None  # a source that states none leaves it to its plans
        axes = plan.axes
        return TrainingConfig(
            data=axes["data"],
            tensor=axes.get("tensor", 1),
            pipeline=axes.get("pipeline", 1),
            split_sequence=bool(plan.tensor.sequence_parallel),
            schedule=plan.pipeline.schedule,
            stages_per_rank=plan.pipeline.stages_per_rank if plan.pipeline.active else 1,
            zero=plan.data.zero_stage,
            shard=plan.data.shard,
            microbatch=microbatch,
            batch=self.batch,
            sequence=self.source.sequence or 1,
            loads=self.source.loads(axes["data"], filled=plan.data.zero_stage == 3),
            recompute=plan.recompute or "none",
            dtype=plan.precision.removeprefix("pure-"),
            offload=plan.offload,
        )

    def library(self, plan: Plan) -> Library:
        on_cpu, on_one = self.cluster.device.kind == "cpu", plan.devices <= self.cluster.devices
        tensor = plan.tensor.size if on_cpu and on_one else 1
        return own_library(plan.precision, bitwise=plan.exact == "bitwise", on_cpu=on_cpu, tensor=tensor)


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """What was found.

    plans:  that leave the reserve, fastest first; where none does, those that fit.
    fuller: that fit and are faster than all of `plans`, but do not leave the reserve; fastest first.
    nearest: where none fits, the one that is least over; None where one fits.
    change: the smallest change with which it would, in words.
    tried:  how many plans were looked at. judged: of how many time was predicted in full.
    """

    plans: Sequence[Prediction]
    fuller: Sequence[Prediction] = ()
    nearest: Prediction | None = None
    change: str = ""
    tried: int = 0
    judged: int = 0
