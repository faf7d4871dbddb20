"""All decisions of a plan on which time and memory depend, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from evenly.model.parts import Recompute
from evenly.plan import Offload


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a model is trained.

    data, tensor, pipeline: ranks of each axis. Neighbours on the tensor axis are nearest, then those on the data axis.
    split_sequence: whether the tensor axis shares tokens where it does not share weights.
    schedule, stages_per_rank: of the pipeline.
    zero, shard:  what the data axis cuts over how many of its ranks (None: all).
    microbatch, batch: samples. sequence: tokens of a sample.
    loads:        of several steps what each microbatch costs, on the replica that has most to do; none where all cost
                  the same.
    recompute:    which activations are computed again. dtype: what is multiplied.
    offload:      what is in the host's memory, as of `Plan`.
    layers:       blocks of each stage, in order; None cuts them evenly.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    split_sequence: bool = False
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    zero: int = 0
    shard: int | None = None
    microbatch: int = 1
    batch: int = 1
    sequence: int = 1
    loads: tuple[tuple[float, ...], ...] = ()
    recompute: Recompute = "none"
    dtype: str = "bfloat16"
    offload: Offload = "none"
    layers: tuple[int, ...] | None = None

    @property
    def ranks(self) -> int:
        return self.replicas * self.tensor * self.pipeline

    @property
    def microbatches(self) -> int:
        """The microbatches of a step, on the rank that has most; of steps with unlike ones the mean."""
        if self.loads:
            return round(fmean(map(len, self.loads)))
        return -(-self.batch // (self.data * self.microbatch))

    @property
    def replicas(self) -> int:
        """Ranks that reduce a gradient among them."""
        return self.data

    @property
    def shards(self) -> int:
        """Ranks over which zero cuts."""
        return (self.shard or self.replicas) if self.zero else 1
