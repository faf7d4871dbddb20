"""The axes of a complete plan: their sizes, and their keys in a plan's text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from evenly.plan.schedule import Schedule, stages_per_rank

ZeroStage = Literal[0, 1, 2, 3]
Words = Iterator[tuple[str, Any]]


@dataclass(frozen=True)
class DataAxis:
    """Ranks that share each batch.

    zero_stage: what is sharded over them: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too
                (arXiv 1910.02054).
    shard:      size of the groups it is sharded over, a divisor of `size`; groups hold the same (hybrid sharding).
    speeds:     of the ranks, relative to each other: microbatches are shared by them; () where they are equal.
                "measured" is decided as a run starts.
    """

    size: int
    zero_stage: ZeroStage
    shard: int
    speeds: tuple[float, ...] | Literal["measured"] = ()

    def words(self) -> Words:
        """Keys and values of a plan's text, defaults left out."""
        yield "data", self.size
        if self.zero_stage:
            yield "zero", self.zero_stage
        if self.zero_stage and self.shard != self.size:
            yield "shard", self.shard
        if self.speeds:
            yield "speeds", self.speeds


@dataclass(frozen=True)
class TensorAxis:
    """Ranks that share each microbatch, every one with its part of the parameters.

    exclude:           patterns, as of file names, of parameters that are not split.
    sequence_parallel: whether the ranks also share the sequence where they do not share parameters, as in norms and
                       dropout between layers, so that each stores a part of those activations (arXiv 2205.05198).
    """

    size: int
    exclude: tuple[str, ...]
    sequence_parallel: bool

    @property
    def active(self) -> bool:
        """Whether there is more than one rank on it."""
        return self.size > 1

    def words(self) -> Words:
        """Keys and values of a plan's text, defaults left out."""
        if self.active:
            yield "tensor", self.size
        if self.exclude:
            yield "tensor_exclude", self.exclude
        if self.sequence_parallel:
            yield "sequence_parallel", True


@dataclass(frozen=True)
class PipelineAxis:
    """Ranks that each hold some stages of the model; every microbatch passes through all stages.

    schedule:        the order in which each rank runs its stages on the microbatches.
    stages_per_rank: number of stages that each rank holds.
    split_points:    numbers of the blocks, counted from 0 in the order in which they run, at which a stage begins,
                     ascending; empty until the model was cut into stages, or with one stage.
    """

    size: int
    schedule: Schedule
    stages_per_rank: int
    split_points: tuple[int, ...]

    @property
    def active(self) -> bool:
        """Whether there is more than one rank on it."""
        return self.size > 1

    @property
    def stages(self) -> int:
        """Number of stages over all ranks."""
        return self.size * self.stages_per_rank

    def words(self) -> Words:
        """Keys and values of a plan's text, defaults left out."""
        if not self.active:
            return
        yield "pipeline", self.size
        if self.schedule != "1f1b":
            yield "schedule", self.schedule
        if self.stages_per_rank != stages_per_rank(self.schedule, None):
            yield "stages_per_rank", self.stages_per_rank
        if self.split_points:
            yield "split_points", self.split_points


@dataclass(frozen=True)
class DeviceReplicas:
    """Devices of one process, each with a replica of the model (DataParallel).

    output_device: number of the replica, from 0, whose device gathers the outputs of all and computes their losses;
                   None leaves each its own (balanced DataParallel).
    """

    count: int
    output_device: int | None

    def words(self) -> Words:
        """Keys and values of a plan's text, defaults left out."""
        if self.count > 1:
            yield "replicas", self.count
        if self.output_device is not None:
            yield "output_device", self.output_device
