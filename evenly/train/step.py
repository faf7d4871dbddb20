"""One training step of a run: forward and backward, the update, and what is recorded of it.

A step has one pass over a batch, or several in a loop of the job's own. The microbatches of all its passes are numbered
through; its loss is the sum of their totals over the sum of their weights, and its gradient that of this loss.

Order: buffers are kept before the forward where a batch may be left out; the loss and the gradient are looked at before
anything is changed; buffers follow before parameters; the schedule advances last.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from evenly.comm.collectives import gather_values
from evenly.data.generators import seed_past_torch
from evenly.data.stream import stream_key
from evenly.engine.executor import Batch, LossFunction
from evenly.engine.step_totals import StepTotals, joined_totals
from evenly.engine.updater import Updater
from evenly.errors import RunError, note_step
from evenly.hardware.health import processor_in_words
from evenly.launcher.allocator import free_memory_bytes
from evenly.parallel.core.memory import HOST, Category, MemoryCounter, local, state_tensors
from evenly.train.look import check_again
from evenly.train.look_loss import first_loss, warn_of_loss
from evenly.train.nonfinite import BuffersBefore, is_bad, traced_error
from evenly.train.record_spans import record_spans
from evenly.train.reports import PassReport, StepReport

if TYPE_CHECKING:
    from evenly.train.run import Run


class OpenStep:
    """A step of `run` from before its first forward to its update, or that of one of its phases.

    updater: of the phase; by default of the job.
    passes:  the batches that it was given, each with its totals. number: of the step, from 1.
    buffers: as it began, where one device may have to put them back.
    spans:   of the passes of this rank, where they are recorded.
    waited_s: for how long this rank had waited for others when the step began.
    """

    def __init__(self, run: Run, updater: Updater | None = None) -> None:
        self.updater = updater or run.updaters.first
        self.updater.begin_step(run.steps_done + 1)
        if updater is None and run.looked_at and run.steps_done and (run.steps_done + 1) & run.steps_done == 0:
            check_again(run.executor, run.looked_at, run.averages, run.world)
        self.number = run.steps_done + 1
        self.passes: list[tuple[Batch, StepTotals]] = []
        # Ranks that share a step know what changes buffers; one device lets a forward change them as it likes.
        kept = run.plan.devices == 1 and (run.may_leave_out > 0 or run.out is not None)
        self.buffers = BuffersBefore(run.model) if kept else None
        self.spans: list[Any] | None = [] if run.steps_done in run.recorder.spanned else None
        if self.spans is not None and run.world.recorder is not None:
            run.world.recorder.time_operations()
        self.waited_s = run.world.waited_s
        self._earlier: dict[str, torch.Tensor] = {}

    def run_pass(self, run: Run, batch: Batch, loss: LossFunction | None) -> StepTotals:
        """Forward and backward of `batch`; `loss` in place of the job's."""
        if self.passes:
            self._keep_gradients(run)
        looked = None if self.passes or loss is not None else first_loss(run, batch)
        batch.used, batch.loss = True, looked or loss
        batch.first = sum(len(before.share.microbatches) for before, _ in self.passes)
        stop = partial(run.interrupt.asked_at, saving=self.number % (run.job.save_every or 1) == 0)
        totals = run.executor.step(
            batch, scale=self.updater.loss_scale.factor, stop=stop, spans=self.spans, ended=run.asked_to_end
        )
        totals.check(self.number)
        self.passes.append((batch, totals))
        warn_of_loss(run.job, looked, batch.share.samples)
        return totals

    def update(self, run: Run) -> UpdatedStep:
        """The update by the gradients of all passes."""
        totals = joined_totals([one for _, one in self.passes])
        grad_norm = math.nan
        if not totals.not_finite:
            if self._earlier:
                run.composed.gradients.add(self._earlier)
            grad_norm = self.updater.mean_gradient(totals, run.executor.counter)
        lr = float(self.updater.learning_rate)
        return UpdatedStep(totals, grad_norm, lr, self._apply(run, totals, grad_norm))

    def _apply(self, run: Run, totals: StepTotals, grad_norm: float) -> Literal["overflow", "not finite"] | None:
        """Updates parameters and buffers; returns why not, if not."""
        if is_bad(totals, grad_norm) and (totals.not_finite or not self.updater.overflows(grad_norm)):
            run.composed.drop_statistics()
            if self.buffers is not None:
                self.buffers.put_back()
            if run.left_out == run.may_leave_out:
                raise traced_error(run.executor, self.passes, grad_norm, self.updater.loss_scale.factor, run.world)
            run.left_out += 1
            return "not finite"
        run.state_is_whole = False
        run.composed.sync_statistics(totals.calls)  # raises where a buffer did not follow its rule
        return None if self.updater.apply(grad_norm, self.number, run.executor.counter) else "overflow"

    @torch.no_grad()
    def _keep_gradients(self, run: Run) -> None:
        """Adds the gradients of the last pass, which the next one drops, to those of the passes before it."""
        for name, gradient in run.composed.gradients.named_gradients():
            if gradient is not None and name in self._earlier:
                self._earlier[name].add_(gradient)
            elif gradient is not None:
                self._earlier[name] = gradient.detach().clone()


class UpdatedStep(NamedTuple):
    """What a step, or a phase of it, has come to; skipped: why there was no update, if there was none."""

    totals: StepTotals
    grad_norm: float
    lr: float
    skipped: Literal["overflow", "not finite"] | None


def check_without_phases(run: Run, asked: str) -> None:
    """Raises `RunError` for what a step of several phases cannot be made of."""
    if run.job.phases:
        raise RunError(asked, "the job has phases, each with its own loss and update", "call run.step(batch)")


def check_whole(run: Run, asked: str) -> None:
    """Raises `RunError` where a step has failed after an update: the state is that of no step."""
    if not run.state_is_whole:
        found = f"step {run.steps_done + 1} has failed after parameters were updated (by one of its phases, say)"
        raise RunError(asked, found, "let the error end the run, and go on from its newest checkpoint")


def prepare_for(run: Run, batch: Batch) -> None:
    """Evaluates where the next step depends on it. Raises `RunError` for a batch that it cannot be trained on."""
    check_whole(run, "training on after an error")
    if batch.share.step != run.steps_done or batch.used:
        found = f"a batch of step {batch.share.step + 1}" + " that was trained on before" * batch.used
        do = "use each batch once, and make it after the step before it (run.batches(), or run.batch(samples))"
        raise RunError(f"training after {run.steps_done} steps", found, do)
    if run.open_step is None and run.updaters.waits(run.steps_done):
        run.evaluate()  # no one has asked for it, or it was saved before


def check_no_open_step(run: Run, asked: str) -> None:
    """Raises `RunError` between a forward and its update, where the state is that of no step."""
    check_whole(run, asked)
    if run.open_step is not None:
        raise RunError(
            asked, f"step {run.open_step.number} has gradients that no update has used", "call run.update() before"
        )


@contextmanager
def step_under_way(run: Run) -> Generator[None]:
    """Within, the next step of `run` is begun; where that fails, its passes no longer count."""
    if run.weight_average is not None:
        run.weight_average.require_weights("a training step")
    run.open_step = run.open_step or OpenStep(run)
    try:
        yield
    except BaseException:
        run.open_step = None
        raise


def run_pass(run: Run, batch: Batch, loss: LossFunction | None) -> PassReport:
    """One pass of a step of `run`, whose update comes later."""
    step = run.open_step
    assert step is not None
    with noting_step(step.number):
        totals = step.run_pass(run, batch, loss)
    # What was read has left them elsewhere on each rank: an own loop draws the same on all.
    seed_past_torch(stream_key(run.job.seed, "after pass", run.steps_done, len(step.passes)))
    return PassReport(totals.loss, totals.weight, batch.share.samples)


def train_step(run: Run, batch: Batch | None, loss: LossFunction | None) -> StepReport:
    """Trains one step of `run`: a pass on `batch`, if any is given, and the update by all its passes."""
    step = run.open_step
    assert step is not None
    alone = batch is not None and not step.passes
    counted = alone and run.steps_done == run.recorder.counted and run.executor.counter is None
    with noting_step(step.number), counting_memory(run) if counted else nullcontext() as counter:
        if batch is not None and run.job.phases:
            phases = run_phases(run, batch)
        else:
            if batch is not None:
                step.run_pass(run, batch, loss)
            phases = {"": step.update(run)}
    totals = joined_totals([one.totals for one in phases.values()])
    _end_step(run, totals)
    waited_s = run.world.waited_s - step.waited_s
    communication: dict[str, dict[str, float]] = {}
    if step.spans is not None:
        communication = record_spans(run, step.number, step.spans, began_s=run.clock)
    memory = None if counter is None else [*_memory_of_all(run, counter)]
    now = time.perf_counter()
    step_s, run.clock = now - run.clock, now
    timed = any(totals.busy_s)
    report = StepReport(
        step=step.number,
        samples=batch.share.samples if run.job.phases and batch else sum(b.share.samples for b, _ in step.passes),
        step_s=step_s,
        memory_bytes=totals.memory_bytes,
        memory=memory,
        left_out=run.left_out,
        busy_s=totals.busy_s if timed else [],
        waited_s=waited_s if timed else None,
        communication=communication,
        **figures_of(phases),
    )
    run.recorder.step(report)
    run.slow_ranks = _find_slow(run, totals, step.number)
    return report


def run_phases(run: Run, batch: Batch) -> dict[str, UpdatedStep]:
    """Runs the phases of this step on `batch`, one after the other; what each has come to, by name."""
    updaters, found = run.updaters.of_step(run.steps_done + 1), dict[str, UpdatedStep]()
    first = step = run.open_step
    assert first is not None and step is not None
    for phase, one in zip(updaters, batch.for_phases([*updaters]), strict=True):
        if step.passes or step.updater is not updaters[phase]:
            step = run.open_step = OpenStep(run, updaters[phase])  # has the buffers as this phase begins
            step.spans = first.spans
        step.run_pass(run, one, None)
        found[phase] = step.update(run)
    return found


def figures_of(phases: Mapping[str, UpdatedStep]) -> dict[str, Any]:
    """The figures of a `StepReport` that follow from its phases; of a job without phases from the one under ''."""
    first = next(iter(phases.values()))
    norm, skipped = first.grad_norm, [one.skipped for one in phases.values() if one.skipped is not None]
    if "" not in phases:
        norm = math.hypot(*(one.grad_norm for one in phases.values()))
    metrics: dict[str, float] = {}
    for phase, one in phases.items():
        own = {"loss": one.totals.loss, "grad_norm": one.grad_norm, "lr": one.lr} if phase else {}
        metrics |= {f"{phase}/{name}" if phase else name: x for name, x in {**own, **one.totals.values}.items()}
    return {
        "loss": sum(one.totals.loss for one in phases.values()),
        "weight": first.totals.weight,
        "grad_norm": norm,
        "lr": first.lr,
        "skipped": skipped[0] if skipped else None,
        "metrics": metrics,
    }


@contextmanager
def noting_step(step: int) -> Generator[None]:
    """Within, an exception notes the number of its step, for the launcher."""
    try:
        yield
    except Exception as problem:
        note_step(problem, step)
        raise


def _end_step(run: Run, totals: StepTotals) -> None:
    run.open_step, run.wholes_made = None, 0
    run.steps_done += 1
    if run.weight_average is not None:  # of a step that was skipped too, as GradScaler's users do it
        with run.updaters.evaluating():
            run.weight_average.update(run.steps_done)
    for updater in run.updaters.of_step(run.steps_done).values():
        updater.end_step(run.steps_done)
    # What was read has left them elsewhere on each rank: an own loop draws the same on all.
    seed_past_torch(stream_key(run.job.seed, "after step", run.steps_done))
    run.stopped, run.ended_early = totals.stop, totals.ended
    run.interrupt.note_stop(early=run.stopped and run.steps_done < run.steps)
    if run.freed_memory is not None:
        run.freed_memory.after_step(max(totals.memory_bytes), free_memory_bytes)
    run.state_is_whole = True


def _find_slow(run: Run, totals: StepTotals, step: int) -> list[str]:
    """Ranks that turn out to be slow with this step, in words; the same on all ranks."""
    if not (found := run.slow.add(totals.own_s, totals.clock_s)):
        return []
    processors = gather_values(processor_in_words(), run.world.group("world"))
    for slow in found:
        run.recorder.slow(step, slow, processors[slow.rank])
    return [f"{slow} ({processors[slow.rank]})" for slow in found]


@contextmanager
def counting_memory(run: Run) -> Generator[MemoryCounter]:
    """Within, counts the bytes of tensors by device of this rank and category; steps are slower."""
    with MemoryCounter() as counter, run.inside():
        for replica in run.composed.replicas:
            tensors = chain(replica.module.parameters(), replica.module.buffers())
            number = HOST if run.plan.offload == "parameters" else replica.number
            counter.track(map(local, tensors), "parameters", number)
        run.composed.gradients.track(counter)
        averages = () if run.weight_average is None else run.weight_average.tensors
        counter.track(chain(state_tensors(run.optimizer), averages), "optimizer", run.updaters.first.device_number)
        run.executor.counter = counter
        try:
            yield counter
        finally:
            run.executor.counter = None


def _memory_of_all(run: Run, counter: MemoryCounter) -> Iterator[dict[Category, int]]:
    mine = [counter.peaks.get(replica.number, {}) for replica in run.composed.replicas]
    # Not over the group "files": a checkpoint may be on its way there, in a thread of its own.
    return chain.from_iterable(gather_values(mine, run.world.group("world")))
