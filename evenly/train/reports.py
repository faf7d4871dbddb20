"""The results of a step and of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from evenly.parallel.core.memory import Category


@dataclass(frozen=True)
class StepReport:
    """The results of one step; the same on every rank except for `step_s` and `waited_s`.

    step:          number of steps done, this one included.
    loss, weight:  of the whole batch.
    grad_norm:     of the batch's gradient, before clipping.
    lr:            learning rate of this step, of the first parameter group; nan if that has none.
    samples:       of the whole batch.
    step_s:        seconds since the step before ended (loading included).
    memory_bytes:  peak of each device so far, rank by rank (virtual devices of one CPU process count as one).
    memory:        for the one step in which a run with a folder counts tensors: bytes by category at the peak of
                   each device, rank by rank; else None.
    skipped:       why there was no update: "overflow" (of a gradient in float16), or "not finite", where the batch was
                   left out as `skip_nonfinite` allows; None where there was one.
    left_out:      batches that were left out so far, in the whole run.
    metrics:       those of the loss by name, of the whole batch, but those whose count is 0.
    busy_s:        of each rank, seconds in its own forwards and backwards, without waiting for others; empty where they
                   are not known (on GPUs, whose work goes on behind their hosts).
    waited_s:      seconds of the step in which this rank waited for others; None where `busy_s` is not known.
    communication: in the steps of which a run with a folder records a timeline, by axis (data, tensor, pipeline), in
                   the mean of all ranks: `under_way_s`, seconds in which something was under way between ranks;
                   `waited_s`, those of them in which the rank waited for it; `hidden`, the share in which it did not.
                   Else empty, and on one rank, on GPUs, and where evenly has not started the ranks.
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
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    busy_s: list[float] = field(default_factory=list[float])
    waited_s: float | None = None
    communication: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])

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
    """The loss over a whole evaluation set, every sample exactly once; the same on every rank.

    metrics: of the loss, and the figures of the job's `evaluate`, by name.
    sets:    where the job has several evaluation sets, all of them by name; the rest is that of the first.
    averaged: whether it is of the averaged weights (`Job.average`).
    """

    loss: float
    weight: float
    samples: int
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    sets: dict[str, Evaluation] = field(default_factory=dict[str, "Evaluation"])
    averaged: bool = False

    @property
    def by_name(self) -> dict[str, Evaluation]:
        """All sets; that of a job with one, which has no name, under ''."""
        return self.sets or {"": self}
