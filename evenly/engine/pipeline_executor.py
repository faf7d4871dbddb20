"""The executor of a pipeline: the stages of this rank run the microbatches in the order of the schedule."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from evenly.comm.collectives import all_reduce
from evenly.comm.host_numbers import on_device
from evenly.comm.world import World
from evenly.data.generators import drawn_past_torch
from evenly.data.loader import Microbatch, Share
from evenly.data.nest import tensors_by_path
from evenly.data.stream import stream_key
from evenly.engine.compose import Composed
from evenly.engine.executor import Batch, Executor, LossFunction, See
from evenly.engine.step_totals import StepTotalsBuilder
from evenly.errors import EvenlyError, RunError
from evenly.job import Job
from evenly.parallel.pipeline.pipeline import Pipeline
from evenly.parallel.pipeline.schedule_runner import ScheduleRunner
from evenly.plan import Plan
from evenly.plan.schedule import runnable

# Microbatches per stage that an evaluation runs at a time: bounds how many a rank holds.
EVALUATED_PER_STAGE = 8


class PipelineExecutor(Executor):
    """Runs the batches of `job` through the stages of this rank."""

    def __init__(
        self, job: Job, plan: Plan, composed: Composed, world: World, *, pipeline: Pipeline, runner: ScheduleRunner
    ) -> None:
        super().__init__(job, plan, composed, world)
        self._pipeline, self._runner = pipeline, runner

    def rounds(self, share: Share) -> int:
        """One per stage of this rank and microbatch, including those that fill up the schedule."""
        return self._runnable(share.rounds) * self.plan.pipeline.stages_per_rank

    @property
    def paths_differ(self) -> bool:
        """Whether what the code draws between blocks may decide which it calls; all stages draw the same then."""
        return bool(self._pipeline.model.stage_plan.paths_differ)

    @contextmanager
    def computing(self, phase: str, loss: LossFunction | None = None) -> Generator[None]:
        before = self.phase
        self._pipeline.begin(phase)
        try:
            with super().computing(phase, loss):
                yield
        finally:
            self._pipeline.begin(before)

    def _runnable(self, microbatches: int) -> int:
        axis = self.plan.pipeline
        return runnable(axis.schedule, axis.size, axis.stages_per_rank, microbatches) if microbatches else 0

    def run_batch(self, batch: Batch, builder: StepTotalsBuilder, *, scale: float, spans: list[Any] | None) -> None:
        """Runs forward and backward of all microbatches through the stages of this rank."""
        microbatches = self._filled([*chain.from_iterable(batch.rounds(1))])
        work = _Training(self, microbatches, builder, batch.share.step, scale)
        self._runner.step(len(microbatches), work, spans)

    def evaluate_batch(self, batch: Batch, builder: StepTotalsBuilder) -> None:
        """Runs the forward of all microbatches, some at a time."""
        for few in batch.rounds(EVALUATED_PER_STAGE * self.plan.pipeline.stages):
            microbatches = self._filled(few)
            self._runner.evaluate(len(microbatches), _Evaluating(self, microbatches, builder))

    def look_at(self, microbatches: Sequence[Microbatch], see: See, replica: int) -> tuple[list[float], list[int]]:
        """The order of blocks is that of the stages."""
        losses: dict[int, float] = {}
        filled = self._filled(microbatches)
        builder = StepTotalsBuilder(self.world, microbatches=0)
        self._runner.look(len(filled), _Looking(self, filled, builder, losses, see))
        return [losses[number] for number in sorted(losses)][: len(microbatches)], []

    def _filled(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        filler = [replace(microbatches[-1], counts=False)] if microbatches else []
        return [*microbatches, *filler * (self._runnable(len(microbatches)) - len(microbatches))]

    def combine(self, numbers: list[float] | torch.Tensor) -> list[float] | torch.Tensor:
        """Also sums over the pipeline, and marks tied parameters as used that any of its ranks has used."""
        ties, gradients = self._pipeline.ties, self.composed.gradients
        flags = ties.flags(gradients.used())
        vector = on_device(super().combine(numbers), self.world.device)
        if flags:
            vector = torch.cat([vector, on_device(flags, self.world.device)])
        vector = all_reduce(vector, self._pipeline.group, label="losses and weights")
        if flags:
            gradients.mark_used(ties.used(vector[len(vector) - len(flags) :].tolist()))
        return vector[: len(vector) - len(flags)]


@dataclass(frozen=True)
class _Evaluating:
    """The `MicrobatchWork` of an evaluation."""

    executor: PipelineExecutor
    microbatches: Sequence[Microbatch]
    builder: StepTotalsBuilder

    def shape_key(self, microbatch: int) -> Hashable:
        """The shapes and dtypes of its tensors."""
        found = self.microbatches[microbatch]
        tensors = tensors_by_path(found.batch)
        return (found.samples, *((path, tuple(tensor.shape), tensor.dtype) for path, tensor in tensors))

    def forward(self, microbatch: int) -> torch.Tensor | None:
        """Runs the forward of a stage, which may end by `StageEnd`; returns the loss to differentiate, if any.

        Each stage of a rank runs the code from its beginning, on a batch of its own: code may change that in place.
        """
        found = self.microbatches[microbatch]
        if self.executor.plan.pipeline.stages_per_rank > 1 or not self.microbatches[-1].counts:
            found = found.copied()  # another stage of this rank, or a filler, runs the code on it too
        try:
            return self._compute(found)
        finally:
            if not self.executor.paths_differ and drawn_past_torch():
                raise RunError(
                    "running the model in stages",
                    "its forward draws from Python's or numpy's generator, and stages would draw other numbers",
                    "draw from torch, or use a plan without pipeline",
                )
            self._computed(found)

    def run_code(self, microbatch: int) -> Any:
        """Runs the job's loss of the microbatch, and records nothing."""
        found = self.microbatches[microbatch]
        return self.executor.run_code(self.executor.composed.replicas[0], found.copied(), self.key_of(found))

    def key_of(self, microbatch: Microbatch) -> int:
        return stream_key(self.executor.job.seed, "evaluation", microbatch.number)

    def stop(self, microbatch: int, problem: EvenlyError) -> bool:
        """Parameters that ranks gather together bind them to one path."""
        self.builder.stop(self.microbatches[microbatch].number, problem)
        return self.executor.plan.data.zero_stage < 3

    def _compute(self, microbatch: Microbatch) -> torch.Tensor | None:
        self.executor.evaluation_loss(self.executor.composed.replicas[0], microbatch, self.builder)
        return None

    def _computed(self, microbatch: Microbatch) -> None:
        """Called after the forward of a stage, also if it raised."""

    def after_forward(self, outputs: Sequence[torch.Tensor | None]) -> None: ...

    def before_backward(self, *, last: bool) -> None: ...

    def after_backward(self) -> None: ...


@dataclass(frozen=True)
class _Looking(_Evaluating):
    losses: dict[int, float]
    see: See

    def stop(self, microbatch: int, problem: EvenlyError) -> bool:
        """Before the first step there is nothing to save."""
        return False

    def key_of(self, microbatch: Microbatch) -> int:
        return self.executor.stream_of(0, microbatch.number)

    def forward(self, microbatch: int) -> torch.Tensor | None:
        total = self.executor.loss_of(self.microbatches[microbatch]).total
        self.losses[microbatch] = float(total.detach())
        return total if total.requires_grad else None

    def after_forward(self, outputs: Sequence[torch.Tensor | None]) -> None:
        """Shows what requires a gradient."""
        with self.executor.composed.backward_context:
            self.see([one for one in outputs if one is not None and one.requires_grad])
        self.executor.composed.gradients.forget_forward()


@dataclass(frozen=True)
class _Training(_Evaluating):
    step: int
    scale: float

    def key_of(self, microbatch: Microbatch) -> int:
        return self.executor.stream_of(self.step, microbatch.number)

    def _compute(self, microbatch: Microbatch) -> torch.Tensor | None:
        executor = self.executor
        executor.allocating("activations")
        loss = executor.training_loss(executor.composed.replicas[0], microbatch, self.step, self.builder)
        return executor.backward_root(loss, self.scale)

    def _computed(self, microbatch: Microbatch) -> None:
        if microbatch.counts:
            self.executor.record_result(
                self.builder, microbatch, None, self.executor.composed.statistics[0].calls(microbatch.number)
            )

    def before_backward(self, *, last: bool) -> None:
        self.executor.allocating("temporaries")
        if last:
            self.executor.composed.gradients.expect_last()

    def after_backward(self) -> None:
        self.executor.composed.gradients.finish_backward()
        self.executor.track_gradients()
        self.executor.allocating("activations")  # what is received until the next pass
