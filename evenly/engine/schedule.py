"""The job's learning-rate schedule: one that counts steps, or one that follows the evaluation (ReduceLROnPlateau).

The latter is stepped with the loss of every evaluation after a multiple of `eval_every` steps, once each, so that the
learning rate is a function of the job, whoever asks for the evaluations and whatever other ones there are.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from evenly.data.generators import seeded
from evenly.data.stream import stream_key
from evenly.engine.build import call_job, expect_kind
from evenly.errors import RunError, UserError
from evenly.job import Job


def build_schedule(job: Job, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """The job's learning-rate schedule, if it has one; its state must be plain values, so that it can be saved."""
    if job.schedule is None:
        return None
    with seeded(stream_key(job.seed, "schedule", 0)):
        schedule = call_job("schedule", lambda: job.schedule and job.schedule(optimizer))
    expect_kind("schedule", schedule, LRScheduler)
    assert schedule is not None
    if isinstance(schedule, ReduceLROnPlateau) and (job.eval_data is None or job.eval_every is None):
        missing = [field for field in ("eval_data", "eval_every") if getattr(job, field) is None]
        raise UserError(
            f"schedule {type(schedule).__name__}",
            f"it follows the loss of the evaluations, and the job has no {' and no '.join(missing)}",
            "give the Job eval_data and eval_every, or a schedule that counts steps",
        )
    if isinstance(schedule, ReduceLROnPlateau) and job.schedule_metric in (None, "loss") and schedule.mode == "max":
        raise UserError(
            f"schedule {type(schedule).__name__} with mode='max'",
            "it follows the loss of the evaluations, which is to fall",
            "leave out the mode, or name the metric that it follows: schedule_metric='accuracy'",
        )
    return schedule


class Advance:
    """Advances `schedule`, of `job`: after steps, or after evaluations.

    followed: the newest step after which it was given an evaluation.
    """

    def __init__(self, job: Job, schedule: LRScheduler | None) -> None:
        self._seed, self._schedule = job.seed, schedule
        self._metric = job.schedule_metric or "loss"
        self._every = job.eval_every if isinstance(schedule, ReduceLROnPlateau) else None
        self.followed = 0

    def waits(self, step: int) -> bool:
        """Whether it has yet to be given an evaluation after `step`."""
        return self._every is not None and step > self.followed and step % self._every == 0

    def end_step(self, step: int) -> None:
        """Called after every step; what the schedule draws follows from `step`."""
        if self._schedule is not None and self._every is None:
            with seeded(stream_key(self._seed, "schedule", step)), warnings.catch_warnings():
                # The schedule counts steps, those that float16 skipped included.
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                self._schedule.step()

    @property
    def follows_evaluations(self) -> bool:
        return self._every is not None

    def evaluated(self, step: int, figures: Mapping[str, float]) -> None:
        """Give it an evaluation, whoever asked for that; `figures` are its metrics and its loss, by name.

        Raises `RunError` where what it follows is not there or no number, with which every comparison would be false.
        """
        if not self.waits(step):
            return
        if self._metric not in figures:
            found = f"the learning rate follows {self._metric!r}, and it has {', '.join(sorted(figures))}"
            raise RunError(f"the evaluation after step {step}", found, "name one of these: schedule_metric=NAME")
        if math.isnan(figures[self._metric]):
            raise RunError(
                f"the evaluation after step {step}",
                f"its {self._metric} is nan, which the learning rate is to follow",
                "look for its cause in eval_data or in the model",
            )
        assert isinstance(self._schedule, ReduceLROnPlateau)
        with seeded(stream_key(self._seed, "schedule", step)):
            self._schedule.step(figures[self._metric])
        self.followed = step
