"""One run: a job under a plan on the world that this process belongs to.

`start` connects, builds and composes; `Run.step` is the training step; `close` lets go in the reverse order.
The same calls are made on every rank, in the same order.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from evenly.checkpoint.config import MODEL_CONFIG, write_model_config
from evenly.comm.connect import disconnect
from evenly.comm.groups import Group
from evenly.comm.operations import all_reduce, gather_values
from evenly.comm.world import World
from evenly.data.generators import undisturbed
from evenly.data.loader import (
    Loader,
    Microbatch,
    MicrobatchStream,
    Share,
    share_of_evaluation,
    share_of_step,
    worker_count,
)
from evenly.data.stream import stream_key
from evenly.engine.build import build_model, build_optimizer, build_schedule, check_same_start, refuse_gradient_hooks
from evenly.engine.compose import Composed, compose, devices_of
from evenly.engine.find_splits import find_splits
from evenly.engine.precision import LossScale, autocast, first_scale, place_batch
from evenly.engine.stage_work import StageWork, filled_up
from evenly.engine.step_totals import StepTotals, StepTotalsBuilder, as_loss
from evenly.errors import RunError, UserError, note_step
from evenly.job import Job, Loss
from evenly.launch.allocator import LargeBlocks, free_memory_bytes, hand_back_freed_memory, keep_freed_memory
from evenly.launch.environment import available_cores, chosen_threads, find_here
from evenly.observe.memory import peak_bytes
from evenly.observe.records import Records
from evenly.parallel.core.memory import HOST, Category, MemoryCounter, local, on, state_tensors
from evenly.parallel.core.sharded_init import ShardedInit
from evenly.parallel.data.replicas import Replica
from evenly.plan import Plan, PlanSpec, asked_plan
from evenly.plan.schedule import runnable
from evenly.train.interrupt import Interrupt
from evenly.train.options import RunOptions, merge_options
from evenly.train.resolve_run import ResolvedRun, connect_and_resolve

if TYPE_CHECKING:
    from evenly.parallel.data.optimizer import ShardedOptimizer
    from evenly.parallel.pipeline.model import StagedModel
    from evenly.parallel.pipeline.pipeline import Pipeline
    from evenly.parallel.pipeline.stages import StagePlan


STEPS_WITH_SPANS = 5  # of a run in stages, whose spans are written down
# Microbatches for each stage that an evaluation in stages sends through at once: more would be held at once, too.
EVALUATED_PER_STAGE = 8


@dataclass(frozen=True)
class StepReport:
    """What one step did; the same on every rank but for `step_s`.

    step:          number of steps done, this one included.
    loss, weight:  of the whole batch.
    grad_norm:     of the batch's gradient, before clipping.
    lr:            learning rate of this step, of the first parameter group.
    samples:       of the whole batch.
    step_s:        seconds since the step before ended (loading included).
    memory_bytes:  peak of each device so far, rank by rank (virtual devices of one CPU process count as one).
    memory:        of the one step in which a run with a folder counts tensors: bytes by category at the moment when
                   a device held most, for each device, rank by rank; None of other steps.
    skipped:       float16 only: whether the gradient overflowed and the update was left out.
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
    skipped: bool = False

    @property
    def samples_per_s(self) -> float:
        """Samples of the whole batch per second."""
        return self.samples / self.step_s

    @property
    def tokens_per_s(self) -> float:
        """What the loss counted (tokens of a language model) of the whole batch, per second."""
        return self.weight / self.step_s


@dataclass(frozen=True)
class Evaluation:
    """The loss over the whole evaluation set, every sample exactly once; the same on every rank."""

    loss: float
    weight: float
    samples: int


class Batch:
    """This rank's share of one batch, or of an evaluation; a training batch is given to `Run.step` once."""

    def __init__(self, share: Share, microbatches: MicrobatchStream) -> None:
        self.share, self.microbatches = share, microbatches
        self._left = share.runs

    def rounds(self, size: int) -> Iterator[list[Microbatch]]:
        """The microbatches in order, `size` at a time."""
        while self._left:
            now = min(size, self._left)
            self._left -= now
            with on(HOST):
                microbatches = [next(self.microbatches) for _ in range(now)]
            yield microbatches

    @property
    def left(self) -> int:
        """Microbatches that were not yet run."""
        return self._left


class Run:
    """A job in progress on this rank. Made by `start`; a context manager.

    Public attributes: `job` (with the microbatch that it has here), `plan` (fitted and resolved), `world`, `devices`
    (of this rank), `model`, `optimizer`, `steps_done`, `out` (folder).
    """

    def __init__(self, job: Job, decision: ResolvedRun, world: World, options: RunOptions) -> None:
        plan, job = decision.plan, decision.settled(job)
        self.job, self.plan, self.world, self.out = job, plan, world, options.out
        self.steps, self.steps_done = options.steps or job.steps, 0
        self._data: Group = world.group("data")
        self._tensor: Group | None = world.groups.get("tensor")
        self.precision = plan.precision
        self.composed: Composed = build_and_compose(job, plan, world)
        self.model = self.composed.model
        if self.composed.pipeline is not None:  # stages are found in the model
            self.plan = plan = plan.with_stages(self.composed.pipeline.model.staging.counts)
        self.devices = list(dict.fromkeys(replica.device for replica in self.composed.replicas))
        self.optimizer = build_optimizer(job, self.composed.parameters(), plan)
        self._cut_optimizer: ShardedOptimizer | None = None
        if self.composed.cuts:
            from evenly.parallel.data.optimizer import ShardedOptimizer  # takes seconds to import

            self._cut_optimizer = ShardedOptimizer(
                self.model, self.optimizer, self.composed.cuts, offload=plan.offload or "none"
            )
        self.schedule = build_schedule(job, self.optimizer)
        self.loss_scale: LossScale = first_scale(self.precision, job.global_batch)
        self.interrupt = Interrupt()
        self.saved_at: int | None = None  # step of the newest checkpoint
        self.stopped = False  # all ranks agreed to stop early
        self._clock = time.perf_counter()
        self._counter: MemoryCounter | None = None
        self._large_blocks = LargeBlocks(ranks=world.local_size) if world.device == "cpu" else None
        self._store = None
        if self.out is not None:
            self._open(resume=options.resume)
        elif options.resume:
            raise UserError("resuming", "the run has no folder", "give `out` to evenly.start, or --out to evenly run")
        main = self.out if world.is_main else None
        # The step in which tensors are counted: when the optimizer has its state, and somebody will read it.
        self._counted = min(self.steps_done + 1, self.steps - 1) if self.out is not None else None
        self._metrics = Records(main and main / "metrics.jsonl")
        # From the step after that on: counting takes its time.
        self._spans_of = range(min(self.steps_done + 2, self.steps - 1), self.steps_done + 2 + STEPS_WITH_SPANS)
        folder = self.out if plan.pipeline.active else None
        self._timeline = Records(folder and folder / "timeline" / f"rank{world.rank}.jsonl")
        self._events = Records(self.out and self.out / "events" / f"rank{world.rank}.jsonl")
        self._events.event("started", rank=world.rank, size=world.size, step=self.steps_done, pid=os.getpid())
        if main is not None:
            if self.steps_done < self.steps or not (main / "plan.json").exists():  # else what is done tells of its own
                write_plan(self, main / "plan.json", predicted=decision.predicted)
            pipeline = self.composed.pipeline
            write_model_config(self.model, main / MODEL_CONFIG, pipeline.tensors if pipeline is not None else ())

    # ------------------------------------------------------------------------------------------ training
    def batches(self) -> Iterator[Batch]:
        """The batches from the step after the last one done to the job's last, or until a stop is asked for."""
        share = lru_cache(maxsize=64)(self._share)  # asked for by the loader, which may be ahead, and here
        microbatches = self._loader().read(share(step) for step in range(self.steps_done, self.steps))
        self._clock = time.perf_counter()
        while self.steps_done < self.steps and not self.stopped:
            step = self.steps_done
            yield Batch(share(step), microbatches)
            if self.steps_done == step:
                raise RunError(
                    f"batch of step {step + 1}",
                    "it was not given to run.step",
                    "give every batch to run.step once",
                )

    def step(self, batch: Batch) -> StepReport:
        """Trains on `batch`: all of it on all ranks, one update. Raises `RunError` on a loss that is not finite."""
        if batch.share.step != self.steps_done:
            raise RunError(
                f"run.step after {self.steps_done} steps",
                f"a batch of step {batch.share.step + 1}",
                "use each batch once",
            )
        try:
            with self.counting_memory() if self._counts_now else nullcontext() as counter:
                with undisturbed(*self.devices):
                    account = self._forward_and_backward(batch)
                account.check(self.steps_done + 1)
                grad_norm, skipped = self._update(account)
        except Exception as problem:
            note_step(problem, self.steps_done + 1)  # for the launcher
            raise
        lr = float(self._learning_rate)
        self._end_step(account)
        if self._large_blocks is not None:
            self._large_blocks.after_step(max(account.memory_bytes), free_memory_bytes)
        memory = None if counter is None else self._memory_of_all(counter)
        return self._report(batch, account, grad_norm=grad_norm, lr=lr, skipped=skipped, memory=memory)

    def _forward_and_backward(self, batch: Batch) -> StepTotals:
        gradients, replicas = self.composed.gradients, self.composed.replicas
        ledger = StepTotalsBuilder(
            self.world,
            microbatches=len(batch.share.microbatches),
            layers=self.composed.layers,
            devices=len(self.devices),
        )
        self._allocating("sums")
        gradients.begin(numbers=ledger.size, rounds=self._rounds(batch.share))
        if self.composed.pipeline is not None:
            self._through_stages(self.composed.pipeline, batch, ledger)
        for microbatches in batch.rounds(len(replicas)):
            self._allocating("activations")
            losses = [
                self._forward(replica, microbatch, batch.share.step, ledger)
                for replica, microbatch in zip(replicas, microbatches, strict=False)
            ]
            if batch.left == 0:
                gradients.expect_last()
            self._allocating("temporaries")
            for microbatch, loss in zip(microbatches, losses, strict=False):
                gradients.counting = microbatch.counts
                self._backward(loss)
                gradients.finish_backward()
                if self._counter is not None:
                    gradients.track(self._counter)
        memory_bytes = [peak_bytes(device) for device in self.devices]
        gradients.start_reduce(self._of_one_share(ledger.numbers(memory_bytes=memory_bytes, stop=self.interrupt.asked)))
        with on(HOST):
            batch.microbatches.ahead()
        return ledger.read(gradients.finish_reduce())

    def _forward(self, replica: Replica, microbatch: Microbatch, step: int, ledger: StepTotalsBuilder) -> Loss:
        """The loss of `microbatch`, entered in `ledger`; of a filler, a loss without effect."""
        key = stream_key(self.job.seed, "microbatch", step, microbatch.number)
        if not microbatch.counts:
            return Loss(self._loss(replica, microbatch, key).total * 0, 0)
        statistics = self.composed.statistics[replica.number]
        with statistics.recording(microbatch.number):
            loss = self._loss(replica, microbatch, key)
        self._enter(ledger, microbatch, loss, statistics.calls(microbatch.number))
        return loss

    def _enter(self, ledger: StepTotalsBuilder, microbatch: Microbatch, loss: Loss, calls: list[int]) -> None:
        if self._tensor is None or self._tensor.position == 0:  # the others have the same numbers
            ledger.add(microbatch.number, loss, calls)

    def _of_one_share(self, numbers: list[float] | torch.Tensor) -> list[float] | torch.Tensor:
        """What the ranks that ran the same microbatches as this one know of the step."""
        pipeline = self.composed.pipeline
        if self._tensor is not None:
            vector = torch.as_tensor(numbers, dtype=torch.float64, device=self.world.device)
            numbers = all_reduce(vector, self._tensor, label="losses and weights")
        if pipeline is None:
            return numbers
        flags = pipeline.ties.flags(self.composed.gradients.used())
        vector = torch.as_tensor(numbers, dtype=torch.float64, device=self.world.device)
        vector = torch.cat([vector, vector.new_tensor(flags)])
        vector = all_reduce(vector, pipeline.group, label="losses and weights")
        used = pipeline.ties.used(vector[len(vector) - len(flags) :].tolist())
        self.composed.gradients.mark_used(used)
        return vector[: len(vector) - len(flags)]

    # ------------------------------------------------------------------------------------------- in stages
    def _rounds(self, share: Share) -> int:
        """The most backwards that any rank of the data axis runs in a step."""
        if self.composed.pipeline is None:
            return share.rounds
        return self._runnable(share.rounds) * self.plan.pipeline.stages_per_rank

    def _runnable(self, microbatches: int) -> int:
        """With as many as it takes for the schedule."""
        assert isinstance(self.plan.pipeline.size, int)
        per_rank = self.plan.pipeline.stages_per_rank
        return (
            runnable(self.plan.pipeline.schedule, self.plan.pipeline.size, per_rank, microbatches)
            if microbatches
            else 0
        )

    def _through_stages(self, pipeline: Pipeline, batch: Batch, ledger: StepTotalsBuilder) -> None:
        """Forward and backward of the batch's microbatches through the stages of this rank."""

        def compute(microbatch: Microbatch) -> torch.Tensor | None:
            self._allocating("activations")
            return self._differentiated(self._forward(self._only_replica, microbatch, batch.share.step, ledger))

        def left(microbatch: Microbatch) -> None:
            if microbatch.counts and (self._tensor is None or self._tensor.position == 0):
                ledger.add(microbatch.number, None, self.composed.statistics[0].calls(microbatch.number))

        def before_backward(last: bool) -> None:
            self._allocating("temporaries")
            if last:
                self.composed.gradients.expect_last()

        def after_backward() -> None:
            gradients = self.composed.gradients
            gradients.collect()
            gradients.finish_backward()
            if self._counter is not None:
                gradients.track(self._counter)
            self._allocating("activations")  # what is received until the next pass

        microbatches = [*chain.from_iterable(batch.rounds(1))]
        work = self._work(microbatches, compute, left, before_backward, after_backward)
        with self._recording_spans(pipeline):
            pipeline.engine.step(len(work.microbatches), work)

    def _evaluate_in_stages(self, pipeline: Pipeline, batch: Batch, ledger: StepTotalsBuilder) -> None:
        def compute(microbatch: Microbatch) -> None:
            key = stream_key(self.job.seed, "evaluation", microbatch.number)
            loss = self._loss(self._only_replica, microbatch, key)
            if microbatch.counts:
                self._enter(ledger, microbatch, loss, [])

        def nothing(*_: Any) -> None: ...

        stages = pipeline.model.staging.stages
        for microbatches in batch.rounds(EVALUATED_PER_STAGE * stages):
            work = self._work(microbatches, compute, nothing, nothing, nothing)
            pipeline.engine.evaluate(len(work.microbatches), work)

    def _work(self, microbatches: Sequence[Microbatch], *what: Any) -> StageWork:
        return StageWork(filled_up(microbatches, self._runnable(len(microbatches))), *what)

    @property
    def _only_replica(self) -> Replica:
        return self.composed.replicas[0]

    @contextmanager
    def _recording_spans(self, pipeline: Pipeline) -> Generator[None]:
        """Writes down what this rank does when, in some steps of a run that has a folder."""
        recorded = self.out is not None and self.steps_done in self._spans_of
        pipeline.engine.spans = [] if recorded else None
        yield
        rank, position = self.world.rank, pipeline.group.position
        for span in pipeline.engine.spans or ():
            self._timeline.add({"step": self.steps_done + 1, "rank": rank, "position": position, **span._asdict()})

    def _loss(self, replica: Replica, microbatch: Microbatch, key: int) -> Loss:
        """The job's loss, with random numbers from the stream `key`."""
        drawing = self.composed.calls[replica.number].drawing(key)
        with on(replica.loss_number), autocast(self.precision, replica.device), self.composed.computing, drawing:
            batch = place_batch(microbatch.batch, self.precision, replica.loss_device)
            return as_loss(self.job.loss(replica.called, batch), microbatch.samples)

    def _backward(self, loss: Loss) -> None:
        if (total := self._differentiated(loss)) is not None:
            with self.composed.computing:  # recomputation computes the model again
                total.backward()

    def _differentiated(self, loss: Loss) -> torch.Tensor | None:
        """What the backward begins with; None for a constant."""
        if not loss.total.requires_grad:
            # A constant has gradient zero, which is what a microbatch without anything that counts adds.
            if float(loss.weight) > 0 or self.composed.in_step:
                raise RunError(
                    "the loss must depend on the model's parameters",
                    "its total requires no gradient",
                    "do not detach it",
                )
            return None
        scale = self.loss_scale.factor
        return loss.total if scale == 1.0 else loss.total * scale

    def _update(self, account: StepTotals) -> tuple[float, bool]:
        """Applies the batch's gradient; returns its norm and whether the update was skipped."""
        gradients = self.composed.gradients
        if self._counter is not None:
            gradients.track(self._counter)
        if self.composed.pipeline is not None:
            self.composed.pipeline.ties.sum(gradients.named_gradients())
        divisor = account.weight * self.loss_scale.factor
        norm = gradients.norm() / divisor
        gradients.divide(divisor)
        # Added up by other ranks in another order it differs in the last bits of float64, and so would the clipping.
        grad_norm = float(norm.float() if self.plan.exact == "bitwise" else norm)
        finite = math.isfinite(grad_norm)
        if not finite and self.precision != "float16":
            raise RunError(
                f"step {self.steps_done + 1}: the gradient must be finite",
                f"its norm is {grad_norm}; first in {self._first_not_finite()}",
                "look for a square root or division at zero, or too high a learning rate",
            )
        self.loss_scale = self.loss_scale.after(finite=finite) if self.precision == "float16" else self.loss_scale
        if not finite:
            return grad_norm, True
        if self.job.clip_norm is not None and (factor := self.job.clip_norm / (grad_norm + 1e-6)) < 1:
            gradients.scale(factor)
        if self._cut_optimizer is None:
            self.optimizer.step()
        else:
            self._cut_optimizer.step(gradients.named_gradients())
            gradients.all_gather_parameters()
        if self._counter is not None:
            self._counter.track(state_tensors(self.optimizer), "optimizer", self._number_of_optimizer)
        return grad_norm, False

    def _end_step(self, account: StepTotals) -> None:
        self.composed.sync_statistics(account.calls)
        if self.schedule is not None:
            with warnings.catch_warnings():
                # The schedule counts steps, those that float16 skipped included.
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                self.schedule.step()
        self.steps_done += 1
        self.stopped = account.stop

    def _report(
        self,
        batch: Batch,
        account: StepTotals,
        *,
        grad_norm: float,
        lr: float,
        skipped: bool,
        memory: list[dict[Category, int]] | None,
    ) -> StepReport:
        now = time.perf_counter()
        step_s, self._clock = now - self._clock, now
        report = StepReport(
            step=self.steps_done,
            loss=account.loss,
            weight=account.weight,
            grad_norm=grad_norm,
            lr=lr,
            samples=batch.share.samples,
            step_s=step_s,
            memory_bytes=account.memory_bytes,
            memory=memory,
            skipped=skipped,
        )
        if self._metrics.kept:
            record = {**vars(report), "samples_per_s": report.samples_per_s, "tokens_per_s": report.tokens_per_s}
            self._metrics.add({name: value for name, value in record.items() if value is not None})
        return report

    # -------------------------------------------------------------------------------------------- memory
    @contextmanager
    def counting_memory(self) -> Generator[MemoryCounter]:
        """Within, the bytes that tensors hold are counted, by device of this rank and category; steps are slower."""
        with MemoryCounter() as counter:
            for replica in self.composed.replicas:
                tensors = chain(replica.module.parameters(), replica.module.buffers())
                number = HOST if self.plan.offload == "parameters" else replica.number
                counter.track(map(local, tensors), "parameters", number)
            self.composed.gradients.track(counter)
            counter.track(state_tensors(self.optimizer), "optimizer", self._number_of_optimizer)
            self._counter = counter
            try:
                yield counter
            finally:
                self._counter = None

    @property
    def _counts_now(self) -> bool:
        """Whether this is the step of a run with a folder that is counted for metrics and reports."""
        return self.steps_done == self._counted and self._counter is None

    def _memory_of_all(self, counter: MemoryCounter) -> list[dict[Category, int]]:
        mine = [counter.peaks.get(replica.number, {}) for replica in self.composed.replicas]
        # Not over the group "files": a checkpoint may be on its way there, in a thread of its own.
        return list(chain.from_iterable(gather_values(mine, self.world.group("world"))))

    def _allocating(self, category: Category) -> None:
        if self._counter is not None:
            self._counter.category = category

    # ---------------------------------------------------------------------------------------- evaluation
    def evaluate(self) -> Evaluation:
        """The loss over the job's `eval_data`, every sample exactly once; leaves training undisturbed."""
        if self.job.eval_data is None:
            raise UserError("run.evaluate()", "the job has no eval_data", "give the Job eval_data")
        share = self._fitted(share_of_evaluation(self.job, rank=self._data.position, ranks=self._data.size))
        ledger = StepTotalsBuilder(self.world, microbatches=len(share.microbatches))
        self.composed.train(False)
        try:
            with torch.no_grad(), undisturbed(*self.devices):
                batch, replicas = (
                    Batch(share, self._loader(evaluation=True).read(iter([share]))),
                    self.composed.replicas,
                )
                if self.composed.pipeline is not None:
                    self._evaluate_in_stages(self.composed.pipeline, batch, ledger)
                for microbatches in batch.rounds(len(replicas)):
                    for replica, microbatch in zip(replicas, microbatches, strict=False):
                        loss = self._loss(
                            replica, microbatch, stream_key(self.job.seed, "evaluation", microbatch.number)
                        )
                        if microbatch.counts:
                            self._enter(ledger, microbatch, loss, [])
        finally:
            self.composed.train(True)
        numbers = torch.as_tensor(ledger.numbers(), dtype=torch.float64, device=self.world.device)
        account = ledger.read(all_reduce(numbers, self.world.group("world"), label="evaluation").tolist())
        account.check(self.steps_done)
        evaluation = Evaluation(account.loss, account.weight, share.samples)
        self._events.event("evaluated", step=self.steps_done, **vars(evaluation))
        self._metrics.add({"step": self.steps_done, "eval_loss": evaluation.loss, "eval_weight": evaluation.weight})
        self._clock = time.perf_counter()
        return evaluation

    # ---------------------------------------------------------------------------------------- checkpoints
    def state_as_saved(self) -> AbstractContextManager[None]:
        """Within, what ranks hold parts of are DTensors, in the model and in the optimizer."""
        return nullcontext() if self._cut_optimizer is None else self._cut_optimizer.as_dtensors()

    def save(self, *, score: float | None = None) -> None:
        """Begins a checkpoint of the steps done so far; `score` (lower is better) decides which is kept as best."""
        if self._store is None:
            raise UserError("run.save()", "the run has no folder", "give `out` to evenly.start, or --out to evenly run")
        if self.saved_at != self.steps_done:
            from evenly.train.resume import snapshot

            self._store.save(snapshot(self), score=score)
            self.saved_at = self.steps_done
            self._events.event("saved", step=self.steps_done)
        self._clock = time.perf_counter()

    def _open(self, *, resume: bool) -> None:
        # torch's distributed checkpoint takes a second to import: only runs that save wait for it.
        from evenly.train.resume import open_store, restore

        self._store = open_store(self)
        if resume:
            restore(self, self._store)
            self.saved_at = self.steps_done

    # ------------------------------------------------------------------------------------------- leaving
    def close(self, *, failed: bool = False) -> None:
        """Finishes writing, takes the hooks off and leaves the process group; safe to call twice."""
        self.interrupt.close()
        try:
            if self._store is not None and not failed:
                self._store.close()
        finally:
            self._events.event("failed" if failed else "ended", step=self.steps_done)
            self._metrics.close()
            self._timeline.close()
            self._events.close()
            self.composed.close()
            if not failed:  # the others may be gone: a failed rank leaves by ending
                disconnect(self.world)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None and self.steps_done and self.saved_at != self.steps_done and self._store is not None:
            self.save()
        self.close(failed=kind is not None)

    # ------------------------------------------------------------------------------------- small helpers
    def _first_not_finite(self) -> str:
        """A parameter whose gradient is not finite, on the first rank that has one; all ranks ask."""
        named = self.composed.gradients.named_gradients()
        mine = (name for name, gradient in named if gradient is not None and not bool(torch.isfinite(gradient).all()))
        found = gather_values(next(mine, None), self.world.group("world"))
        return next(filter(None, found), "no single gradient (their sum overflows)")

    @property
    def _number_of_optimizer(self) -> int:
        """Of the device where its state lies."""
        return HOST if self.plan.offload in ("optimizer", "parameters") else 0

    @property
    def _learning_rate(self) -> Any:
        return self.optimizer.param_groups[0]["lr"]

    def _share(self, step: int) -> Share:
        return self._fitted(share_of_step(self.job, step, rank=self._data.position, ranks=self._data.size))

    def _fitted(self, share: Share) -> Share:
        return share.filled() if self.composed.in_step else share

    def _loader(self, *, evaluation: bool = False) -> Loader:
        world = self.world
        workers = worker_count(cores=available_cores(), local_ranks=world.local_size, device=world.device)
        return Loader(self.job, evaluation=evaluation, workers=workers, pin=world.device.startswith("cuda"))


def build_and_compose(job: Job, plan: Plan, world: World) -> Composed:
    """The job's model as the plan runs it; where ranks cut it, each holds its share and one large tensor at a time."""
    cut = plan.data.zero_stage == 3 or plan.tensor.active or plan.pipeline.active
    if cut:
        hand_back_freed_memory()
    with ShardedInit(world.group("world")) if cut else nullcontext() as parking:
        # What is parked stays on the CPU; splitting and cutting take each part to the rank's device.
        devices = ["cpu"] if cut else devices_of(plan, world)
        modules = [build_model(job, precision=plan.precision, device=device) for device in devices]
        if parking is not None:
            parking.freeze()
            refuse_gradient_hooks(modules[0], plan)
        check_same_start(modules[0], world, parking)
        splits = find_splits(job, modules[0], plan, world)
        stages = _find_stages(job, modules[0], plan, world)
        composed = compose(modules, plan, world, splits, stages)
    if cut and world.device == "cpu":
        keep_freed_memory()
    return composed


def _find_stages(job: Job, model: torch.nn.Module, plan: Plan, world: World) -> tuple[StagedModel, StagePlan] | None:
    if not plan.pipeline.active:
        return None
    from evenly.engine.find_stages import find_stages  # torch's parts behind it take a while to import

    return find_stages(job, model, plan, world)


def start(
    job: Job,
    *,
    plan: PlanSpec | str | None = None,
    out: Path | str | None = None,
    steps: int | None = None,
    resume: bool = False,
) -> Run:
    """The run of `job` here, on the world it was started in (`evenly run`, torchrun, srun, mpirun, or one process).

    plan:   how to split; with "auto" the plan that is predicted to be fastest, of those that state what else is said
            (`auto precision=bfloat16`); with None all ranks share each batch.
    out:    folder for metrics, events and checkpoints; without one nothing is written.
    steps:  length of the whole run; by default the job's.
    resume: go on from the newest checkpoint in `out`, with the microbatch that it was made with if the job states none.

    What `evenly run` was told on its command line stands in for what is left out here.
    Raises `UserError` (with `PlanError`) where the job, the plan and the world do not fit together.
    """
    named, sought = (plan, False) if isinstance(plan, PlanSpec) else asked_plan(plan)
    return start_as_told(job, RunOptions(named, Path(out) if out else None, steps, resume, search=sought))


def start_as_told(job: Job, options: RunOptions) -> Run:
    """`start` with its arguments as data."""
    options = merge_options(options)
    decision, world = connect_and_resolve(job, options, find_here())
    if world.device == "cpu" and decision.plan.exact == "bitwise" and chosen_threads() is None:
        torch.set_num_threads(1)  # how a sum is cut among threads shows in its bits
    try:
        return Run(job, decision, world, options)
    except UserError:  # raised by all ranks alike, which may go on to something else
        disconnect(world)
        raise


def write_plan(run: Run, path: Path, *, predicted: Mapping[str, Any] | None = None) -> None:
    """What decides the run's numbers, how they were split and what was predicted of that, as JSON."""
    job = run.job
    decisions: dict[str, Any] = {
        "job": job.name,
        "plan": str(run.plan),
        "world": run.world.size,
        "steps": run.steps,
        "global_batch": job.global_batch,
        "microbatch": None if job.microbatch_cost is not None else job.samples_per_microbatch,
        "microbatch_cost": job.microbatch_cost,
        "seed": job.seed,
        "parameters": run.composed.elements,
    }
    if predicted is not None:
        decisions["predicted"] = predicted
    path.write_text(json.dumps(decisions, indent=1) + "\n")
