"""The results of a step and of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evenly.parallel.core.memory import Category


@dataclass(frozen=True)
class StepReport:
    """The results of one step; the same on every rank except for `step_s`.

    step:          number of steps done, this one included.
    loss, weight:  of the whole batch.
    grad_norm:     of the batch's gradient, before clipping.
    lr:            learning rate of this step, of the first parameter group.
    samples:       of the whole batch.
    step_s:        seconds since the step before ended (loading included).
    memory_bytes:  peak of each device so far, rank by rank (virtual devices of one CPU process count as one).
    memory:        for the one step in which a run with a folder counts tensors: bytes by category at the peak of
                   each device, rank by rank; else None.
    skipped:       why there was no update: "overflow" (of a gradient in float16), or "not finite", where the batch was
                   left out as `skip_nonfinite` allows; None where there was one.
    left_out:      batches that were left out so far, in the whole run.
    """

    step: int
    loss: float
    weight: float
    grad_norm: float
    lr: float
    samples: int
    step_s: float
    memory_bytes: list[int]
    memory: list[dict[Category, int]] | None = None
    skipped: Literal["overflow", "not finite"] | None = None
    left_out: int = 0

    @property
    def samples_per_s(self) -> float:
        """Samples of the whole batch per second."""
        return self.samples / self.step_s

    @property
    def tokens_per_s(self) -> float:
        """Weight of the whole batch (tokens of a language model) per second."""
        return self.weight / self.step_s


@dataclass(frozen=True)
class PassReport:
    """The results of one forward and backward over a batch, whose update comes later; the same on every rank."""

    loss: float
    weight: float
    samples: int


@dataclass(frozen=True)
class Evaluation:
    """The loss over the whole evaluation set, every sample exactly once; the same on every rank.

    averaged: whether it is that of the averaged weights (`Job.average`).
    """

    loss: float
    weight: float
    samples: int
    averaged: bool = False
