"""One training step of a run: forward and backward, the update, and what is recorded of it.

Order: buffers are kept before the forward where a batch may be left out; the loss and the gradient are looked at before
anything is changed; buffers follow before parameters; the schedule advances last.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from evenly.comm.collectives import gather_values
from evenly.data.generators import seed_past_torch
from evenly.data.stream import stream_key
from evenly.engine.executor import Batch
from evenly.engine.step_totals import StepTotals
from evenly.errors import note_step
from evenly.hardware.health import processor_in_words
from evenly.launch.allocator import free_memory_bytes
from evenly.parallel.core.memory import HOST, Category, MemoryCounter, local, state_tensors
from evenly.train.look import check_again
from evenly.train.nonfinite import BuffersBefore, is_bad, traced_error
from evenly.train.reports import StepReport

if TYPE_CHECKING:
    from evenly.train.run import Run


def train_step(run: Run, batch: Batch) -> StepReport:
    """Trains one step of `run` on `batch`."""
    step = run.steps_done + 1
    if run.weight_average is not None:
        run.weight_average.require_weights("a training step")
    run.updater.begin_step(step)
    if run.looked_at and step > 1 and step & (step - 1) == 0:
        check_again(run.executor, run.looked_at, run.averages, run.world)
    counted = run.steps_done == run.recorder.counted and run.executor.counter is None
    # Ranks that share a step know what changes buffers; one device lets a forward change them as it likes.
    buffers = BuffersBefore(run.model) if run.may_leave_out and run.plan.devices == 1 else None
    spans: list[Any] | None = [] if run.steps_done in run.recorder.spanned else None
    stop = partial(run.interrupt.asked_at, saving=step % (run.job.save_every or 1) == 0)
    try:
        with counting_memory(run) if counted else nullcontext() as counter:
            totals = run.executor.step(batch, scale=run.loss_scale.factor, stop=stop, spans=spans)
            totals.check(step)
            grad_norm = math.nan
            if not totals.not_finite:
                grad_norm = run.updater.mean_gradient(totals, run.executor.counter)
            skipped = _update(run, batch, totals, grad_norm, buffers)
    except Exception as problem:
        note_step(problem, step)  # for the launcher
        raise
    lr = float(run.updater.learning_rate)
    _end_step(run, totals)
    if run.composed.pipeline is not None:
        run.recorder.spans(step, run.composed.pipeline.group.position, spans or ())
    memory = None if counter is None else [*_memory_of_all(run, counter)]
    now = time.perf_counter()
    step_s, run.clock = now - run.clock, now
    report = StepReport(
        step=step,
        loss=totals.loss,
        weight=totals.weight,
        grad_norm=grad_norm,
        lr=lr,
        samples=batch.share.samples,
        step_s=step_s,
        memory_bytes=totals.memory_bytes,
        memory=memory,
        skipped=skipped,
        left_out=run.left_out,
        metrics=totals.values,
    )
    run.recorder.step(report)
    run.slow_ranks = _find_slow(run, totals, step)
    return report


def _update(
    run: Run, batch: Batch, totals: StepTotals, grad_norm: float, buffers: BuffersBefore | None
) -> Literal["overflow", "not finite"] | None:
    """Updates parameters and buffers; returns why not, if not."""
    if is_bad(totals, grad_norm) and (totals.not_finite or not run.updater.overflows(grad_norm)):
        run.composed.drop_statistics()
        if buffers is not None:
            buffers.put_back()
        if run.left_out == run.may_leave_out:
            read_again = Batch(batch.share, run.loader().read(iter([batch.share])))
            raise traced_error(run.executor, read_again, totals, grad_norm, run.loss_scale.factor, run.world)
        run.left_out += 1
        return "not finite"
    run.state_is_whole = False
    run.composed.sync_statistics(totals.calls)  # raises where a buffer did not follow its rule
    applied = run.updater.apply(grad_norm, batch.share.step + 1, run.executor.counter)
    return None if applied else "overflow"


def _end_step(run: Run, totals: StepTotals) -> None:
    run.steps_done += 1
    if run.weight_average is not None:  # of a step that was skipped too, as GradScaler's users do it
        run.weight_average.update(run.steps_done)
    run.updater.end_step(run.steps_done)
    # What was read has left them elsewhere on each rank: an own loop draws the same on all.
    seed_past_torch(stream_key(run.job.seed, "after step", run.steps_done))
    run.stopped = totals.stop
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
        counter.track(chain(state_tensors(run.optimizer), averages), "optimizer", run.updater.device_number)
        run.executor.counter = counter
        try:
            yield counter
        finally:
            run.executor.counter = None


def _memory_of_all(run: Run, counter: MemoryCounter) -> Iterator[dict[Category, int]]:
    mine = [counter.peaks.get(replica.number, {}) for replica in run.composed.replicas]
    # Not over the group "files": a checkpoint may be on its way there, in a thread of its own.
    return chain.from_iterable(gather_values(mine, run.world.group("world")))
