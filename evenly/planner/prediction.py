"""What is predicted of a plan: the form in which predictions are handed on. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from evenly.plan import Plan


@dataclass(frozen=True, kw_only=True)
class MemoryByCause:
    """Bytes of one rank at its peak, by what takes them.

    activations: kept for the backward pass, of all microbatches in flight. gathered: whole parameters that a rank has
    for a while under zero=3. buffers: of reductions and messages. temporaries: what one pass needs besides all that,
    logits and the loss among it. context: what the device's driver and its communicators take.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    gathered: float = 0.0
    buffers: float = 0.0
    temporaries: float = 0.0
    context: float = 0.0

    @property
    def peak(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, kw_only=True)
class TimeByCause:
    """Seconds of a step, by what takes them, of the slowest rank; what overlaps with computing counts where it shows.

    matmul, attention, memory: computing, by kind of operation. recompute: what is computed again, of all kinds.
    tensor, data, pipeline: communication of that axis that nothing hides. bubble: waiting for other stages.
    optimizer: the update. host: what the host takes to start operations, where the device waits for it.
    """

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    data: float = 0.0
    pipeline: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    host: float = 0.0

    @property
    def step_s(self) -> float:
        """The seconds of a step."""
        return sum(getattr(self, field.name) for field in fields(self))


CAUSES_OF_MEMORY = tuple(one.name for one in fields(MemoryByCause))
CAUSES_OF_TIME = tuple(one.name for one in fields(TimeByCause))


def worst(ranks: Sequence[MemoryByCause]) -> int:
    return max(range(len(ranks)), key=lambda rank: ranks[rank].peak)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A plan with what is predicted of it.

    plan:        complete: all axes, microbatch, precision and recomputation set.
    memory:      of every rank of the pipeline axis, from the first. limit_bytes: what a device has.
    reserve_bytes: what a plan is to leave free of it.
    time:        of a step. tokens: of a step, None where samples are no sequences. samples: the global batch.
    flops:       of a step, of the model alone (without recomputation), on all devices.
    peak_flops:  of all devices together, per second.
    comm_bytes:  what a rank sends in a step.
    bubble:      idle share of a step, 0 to 1, mean over the ranks of the pipeline.
    why:         in words, what binds it.
    """

    plan: Plan
    memory: Sequence[MemoryByCause]
    limit_bytes: float
    time: TimeByCause
    samples: int
    tokens: int | None
    flops: float
    peak_flops: float
    comm_bytes: float
    bubble: float
    why: str = ""
    reserve_bytes: float = 0.0

    @property
    def worst(self) -> int:
        """The rank of the pipeline axis that needs most memory."""
        return worst(self.memory)

    @property
    def peak_bytes(self) -> float:
        return self.memory[self.worst].peak

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes

    @property
    def leaves_reserve(self) -> bool:
        return self.peak_bytes <= self.limit_bytes - self.reserve_bytes

    @property
    def step_s(self) -> float:
        """The seconds of a step."""
        return self.time.step_s

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.step_s

    @property
    def mfu(self) -> float:
        """Share of the devices' peak that the model's own operations reach."""
        return self.flops / (self.step_s * self.peak_flops)
