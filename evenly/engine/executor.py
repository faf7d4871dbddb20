"""Executors run this rank's share of a batch; the results are the totals of the step and the summed gradients.

`Executor` has what both kinds share: the job's loss of one microbatch, and the sums over ranks that end a step.
`MicrobatchExecutor` runs forward and backward of each microbatch in turn; `pipeline_executor` runs stages.
"""

from __future__ import annotations

import resource
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import inf
from time import perf_counter
from typing import Any, Protocol, cast

import torch

from evenly.comm.collectives import all_reduce
from evenly.comm.groups import Group
from evenly.comm.host_numbers import on_device
from evenly.comm.world import World
from evenly.data.generators import DrawnNumbers, undisturbed
from evenly.data.loader import KeptMicrobatches, Microbatch, MicrobatchStream, Share
from evenly.data.stream import stream_key
from evenly.engine.compose import Composed
from evenly.engine.metrics import MetricNames
from evenly.engine.outputs import on_cpu
from evenly.engine.precision import autocast, place_batch
from evenly.engine.step_totals import StepTotals, StepTotalsBuilder, as_loss
from evenly.engine.trace import NonFiniteWatch, Origin
from evenly.errors import RunError
from evenly.job import Job, Loss
from evenly.parallel.core.memory import HOST, Category, MemoryCounter, on
from evenly.parallel.data.replicas import Replica
from evenly.plan import Plan
from evenly.plan.schedule import ActionSpan, Kind

LossFunction = Callable[[torch.nn.Module, Any], Any]
See = Callable[[Sequence[torch.Tensor]], object]


class Executor(ABC):
    """Runs the batches of `job` through the model of `composed`.

    loss_function: of the pass that runs; the job's, unless its phase or the batch has another.
    phase: of the job, whose pass it is; '' for the job itself.
    counter: counts the memory of tensors in the steps in which that is asked for, else None.
    watch: sees all operations while a step is repeated because of numbers that are not finite, else None.
    outputs: takes this rank's outputs by microbatch while an evaluation gathers them, else None.
    """

    def __init__(self, job: Job, plan: Plan, composed: Composed, world: World) -> None:
        self.job, self.plan, self.composed, self.world = job, plan, composed, world
        self.devices = list(dict.fromkeys(replica.device for replica in composed.replicas))
        self.counter: MemoryCounter | None = None
        self.watch: NonFiniteWatch | None = None
        self.loss_function: LossFunction = job.loss
        self.phase = ""
        self._losses = {"": job.loss} | {name: phase.loss for name, phase in (job.phases or {}).items()}
        self.outputs: dict[int, Any] | None = None
        self._metrics = MetricNames(world)
        self._tensor_group: Group | None = world.groups.get("tensor")

    # ------------------------------------------------------------------------------------------------ a pass
    def step(
        self, batch: Batch, *, scale: float, stop: Callable[[], bool], spans: list[Any] | None, ended: bool = False
    ) -> StepTotals:
        """Runs forward and backward of the batch; the summed gradients are then in `composed.gradients`.

        scale: factor on the loss before the backward. stop: called once; whether this rank wants to stop the run.
        ended: whether the job has asked here to end it. spans: list to append the passes of this rank to.
        """
        gradients = self.composed.gradients
        for calls in self.composed.calls:
            calls.forget()
        builder = StepTotalsBuilder(
            self.world,
            microbatches=len(batch.share.microbatches),
            layers=self.composed.layers,
            devices=len(self.devices),
            first=batch.first,
        )
        with undisturbed(*self.devices), self.computing(batch.phase, batch.loss):
            self.allocating("sums")
            gradients.begin(numbers=builder.size, rounds=self.rounds(batch.share))
            began_s = perf_counter() - self.world.waited_s
            self.run_batch(batch, builder, scale=scale, spans=spans)
            own_s = perf_counter() - self.world.waited_s - began_s
            times = {"busy_s": own_s * self._is_timed, "own_s": own_s / self._work_of(batch)}
            memory_bytes = [peak_bytes(device) for device in self.devices]
            numbers = builder.numbers(memory_bytes=memory_bytes, **times, stop=stop(), ended=ended)
            gradients.start_reduce(self.combine(numbers))
            with on(HOST):
                batch.microbatches.ahead()
            return self._with_metrics(builder, builder.read(gradients.finish_reduce()))

    def _with_metrics(self, builder: StepTotalsBuilder, totals: StepTotals) -> StepTotals:
        found = self._metrics.sum(builder.metrics, totals.marks, len(totals.totals))
        return replace(totals, metrics=found) if found else totals

    def traced_step(self, batch: Batch, *, scale: float) -> tuple[StepTotals, list[Origin]]:
        """As `step`, and where numbers on this rank that are not finite came from."""
        self.watch = NonFiniteWatch(replica.module for replica in self.composed.replicas)
        try:
            with self.watch, torch.compiler.set_stance("force_eager"):
                totals = self.step(batch, scale=scale, stop=lambda: False, spans=None)
            return totals, self.watch.origins
        finally:
            self.watch = None

    @contextmanager
    def computing(self, phase: str, loss: LossFunction | None = None) -> Generator[None]:
        """Within, passes are of `phase` of the job, '' for the job itself, and compute its loss, or `loss`."""
        before = self.phase, self.loss_function
        self.phase, self.loss_function = phase, self._losses[phase] if loss is None else loss
        try:
            yield
        finally:
            self.phase, self.loss_function = before

    def stream_of(self, step: int, microbatch: int) -> int:
        """The random stream of a microbatch in training; each phase of the job has its own."""
        return stream_key(self.job.seed, "microbatch", *filter(None, [self.phase]), step, microbatch)

    def _work_of(self, batch: Batch) -> float:
        """What this rank computes of a pass, in samples or by their costs; infinite where its time is not known.

        On a GPU a rank's thread waits where it reads a number, for its own work and for that of others. Samples that
        the loop has made have no known cost.
        """
        share = batch.share
        if not self._is_timed or not share.own or batch.made:
            return inf
        return sum(share.costs[one] if share.costs else len(share.microbatches[one]) for one in share.own) or inf

    @property
    def _is_timed(self) -> bool:
        return self.world.recorder is not None and self.world.device == "cpu"

    def evaluate(self, batch: Batch) -> StepTotals:
        """Runs the forward of the batch in evaluation mode; random states and training mode are restored."""
        share = batch.share
        builder = StepTotalsBuilder(self.world, microbatches=len(share.microbatches), first=share.first)
        with undisturbed(*self.devices), self.composed.evaluating(), torch.no_grad():
            self.evaluate_batch(batch, builder)
        numbers = on_device(builder.numbers(), self.world.device)
        summed = all_reduce(numbers, self.world.group("world"), label="evaluation").tolist()
        return self._with_metrics(builder, builder.read(summed))

    def look(
        self, microbatches: Sequence[Microbatch], see: See = lambda _: None, replica: int = 0
    ) -> tuple[list[float], list[int]]:
        """The losses of `microbatches` in turn, where this rank computes them, and a number for the order of blocks.

        Where the first was run once more before all, its loss comes last. Nothing is recorded and no gradient computed;
        all ranks run equally many. replica: on which they run. see: is given the outputs of each forward on this rank
        that require a gradient: the loss, or what the next stage receives.
        """
        losses, orders = self.look_at(microbatches, see, replica)
        self.composed.gradients.reshard()
        return losses, orders

    @abstractmethod
    def look_at(self, microbatches: Sequence[Microbatch], see: See, replica: int) -> tuple[list[float], list[int]]:
        """As `look`."""

    def loss_of(self, microbatch: Microbatch, replica: int = 0) -> Loss:
        """The loss of a microbatch of the first step in training, on a replica; it is not recorded."""
        key = self.stream_of(0, microbatch.number)
        with self.composed.statistics[replica].recording(-1):  # leaves no trace, and notices what changes
            return self._loss(self.composed.replicas[replica], microbatch.copied(), key)

    @abstractmethod
    def rounds(self, share: Share) -> int:
        """The most backwards that any rank of the data axis runs in a step."""

    @abstractmethod
    def run_batch(self, batch: Batch, builder: StepTotalsBuilder, *, scale: float, spans: list[Any] | None) -> None:
        """Runs forward and backward of every microbatch; losses go to `builder`, gradients to `composed.gradients`."""

    @abstractmethod
    def evaluate_batch(self, batch: Batch, builder: StepTotalsBuilder) -> None:
        """Runs the forward of every microbatch; losses go to `builder`."""

    def combine(self, numbers: list[float] | torch.Tensor) -> list[float] | torch.Tensor:
        """Sums `numbers` over the ranks that ran the same microbatches as this one."""
        if self._tensor_group is None:
            return numbers
        vector = on_device(numbers, self.world.device)
        return all_reduce(vector, self._tensor_group, label="losses and weights")

    # ------------------------------------------------------------------------------------------ a microbatch
    def training_loss(self, replica: Replica, microbatch: Microbatch, step: int, builder: StepTotalsBuilder) -> Loss:
        """The loss of `microbatch`, recorded in `builder`; of a filler zero, and not recorded."""
        key = self.stream_of(step, microbatch.number)
        statistics = self.composed.statistics[replica.number]
        if self.watch is not None:
            self.watch.begin(microbatch)
        if not microbatch.counts:
            with statistics.recording(None):
                return Loss(self._loss(replica, microbatch, key).total * 0, 0)
        with statistics.recording(microbatch.number):
            loss = self._loss(replica, microbatch, key)
        if self.watch is not None:
            self.watch.end(loss.total)
        self.record_result(builder, microbatch, loss, statistics.calls(microbatch.number))
        return loss

    def evaluation_loss(self, replica: Replica, microbatch: Microbatch, builder: StepTotalsBuilder) -> None:
        """Computes the loss of `microbatch` and records it in `builder`."""
        key = stream_key(self.job.seed, "evaluation", microbatch.number)
        with self.composed.statistics[replica.number].evaluating():
            loss = self._loss(replica, microbatch, key, outputs=self.outputs is not None)
        if microbatch.counts:
            self.record_result(builder, microbatch, loss, [])
            if self.outputs is not None and self._records:
                self.outputs[microbatch.number] = loss.outputs

    def record_result(
        self, builder: StepTotalsBuilder, microbatch: Microbatch, loss: Loss | None, calls: list[int]
    ) -> None:
        """Records the result of a microbatch; only the first rank of the tensor axis does, the others have the same."""
        if self._records:
            builder.add(microbatch.number, loss, calls)

    @property
    def _records(self) -> bool:
        return self._tensor_group is None or self._tensor_group.position == 0

    def _loss(self, replica: Replica, microbatch: Microbatch, key: int, *, outputs: bool = False) -> Loss:
        """The job's loss, with random numbers from the stream `key`; with its `outputs` on the CPU, or without."""

        def finish(found: Any) -> Loss:
            loss = as_loss(found, microbatch.samples)
            return replace(loss, outputs=on_cpu(loss.outputs, microbatch.samples, self._whole) if outputs else None)

        return self.run_code(replica, microbatch, key, finish=finish)

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """All of a tensor that may be split over the tensor axis; its ranks call it in the same order."""
        split = self.composed.tensor
        return tensor if split is None else cast("torch.Tensor", split.gathered([tensor])[0])

    def run_code(
        self, replica: Replica, microbatch: Microbatch, key: int, *, finish: Callable[[Any], Any] = lambda loss: loss
    ) -> Any:
        """`finish` of what the loss function returns, with random numbers from the stream `key`."""
        self.world.tick()
        drawing = self.composed.calls[replica.number].drawing(key)
        precision = self.plan.precision
        with on(replica.loss_number), autocast(precision, replica.device), self.composed.execution_context, drawing:
            batch = place_batch(microbatch.batch, precision, replica.loss_device)
            return finish(self.loss_function(replica.called, batch))

    def backward_root(self, loss: Loss, scale: float) -> torch.Tensor | None:
        """The tensor to call backward on; None if the loss is a constant."""
        if not loss.total.requires_grad:
            # A constant has gradient zero, which is what a microbatch without anything that counts adds.
            needed = self.composed.gradients.zero() if float(loss.weight) == 0 else None
            if float(loss.weight) != 0 or (self.composed.in_step and needed is None):
                raise RunError(
                    "the loss must depend on the model's parameters",
                    "its total requires no gradient",
                    "do not detach it",
                )
            total = needed
        else:
            total = loss.total if scale == 1.0 else loss.total * scale
        if total is not None and (outputs := self.composed.gradients.outputs) is not None:
            outputs.watch_backward(total)
        return total

    # ---------------------------------------------------------------------------------------------- memory
    def allocating(self, category: Category) -> None:
        """Counts memory that is allocated from now on as `category`."""
        if self.counter is not None:
            self.counter.category = category

    def track_gradients(self) -> None:
        """Counts the memory of gradients and their sums."""
        if self.counter is not None:
            self.composed.gradients.track(self.counter)


class MicrobatchExecutor(Executor):
    """Runs the microbatches in order, one per replica of the model at a time."""

    def rounds(self, share: Share) -> int:
        return share.rounds

    def run_batch(self, batch: Batch, builder: StepTotalsBuilder, *, scale: float, spans: list[Any] | None) -> None:
        gradients, replicas = self.composed.gradients, self.composed.replicas
        for microbatches in batch.rounds(len(replicas)):
            self.allocating("activations")
            losses: list[Loss] = []
            drawn: list[Any] = []  # within each a backward draws on where its own forward has ended
            for replica, microbatch in zip(replicas, microbatches, strict=False):
                with timed(spans, "forward", microbatch.number):
                    losses.append(self.training_loss(replica, microbatch, batch.share.step, builder))
                drawn.append(DrawnNumbers(replica.device).again() if len(replicas) > 1 else nullcontext())
            if batch.remaining == 0:
                gradients.expect_last()
            self.allocating("temporaries")
            for microbatch, loss, drawing in zip(microbatches, losses, drawn, strict=False):
                gradients.counting = microbatch.counts and loss.total.requires_grad
                with timed(spans, "backward", microbatch.number), drawing:
                    self._backward(loss, scale)
                    gradients.finish_backward()
                self.track_gradients()

    def look_at(self, microbatches: Sequence[Microbatch], see: See, replica: int) -> tuple[list[float], list[int]]:
        gradients = self.composed.gradients
        losses: list[float] = []
        before: list[float] = []
        gradients.survey(lambda: before.extend(self._losses_of_phases(microbatches[0])))
        if self.job.phases:
            before = []  # of the other phases too
        orders: list[int] = []
        for microbatch in microbatches:
            gradients.reshard()
            gradients.forget_order()
            gradients.gather()
            losses.append(self._seen_loss(microbatch, see, replica))
            orders.append(gradients.unit_order)
        gradients.forget_order()
        return losses + before, orders

    def _seen_loss(self, microbatch: Microbatch, see: See = lambda _: None, replica: int = 0) -> float:
        """The loss of a microbatch that is looked at; what the forward has left for a backward is gone afterwards."""
        total = self.loss_of(microbatch, replica).total
        with self.composed.backward_context:
            see([total] if total.requires_grad else [])
        self.composed.gradients.forget_forward()
        return float(total.detach())

    def _losses_of_phases(self, microbatch: Microbatch) -> list[float]:
        """The loss of each phase of the job; of a job without phases the one that is computed."""
        if not self.job.phases:
            return [self._seen_loss(microbatch)]
        losses: list[float] = []
        for name in self.job.phases:
            with self.computing(name):
                losses.append(self._seen_loss(microbatch))
        return losses

    def _backward(self, loss: Loss, scale: float) -> None:
        if (total := self.backward_root(loss, scale)) is not None:
            with self.composed.backward_context:
                total.backward()

    def evaluate_batch(self, batch: Batch, builder: StepTotalsBuilder) -> None:
        for microbatches in batch.rounds(len(self.composed.replicas)):
            for replica, microbatch in zip(self.composed.replicas, microbatches, strict=False):
                self.evaluation_loss(replica, microbatch, builder)


@contextmanager
def timed(spans: list[Any] | None, kind: Kind, microbatch: int) -> Generator[None]:
    """Within, a microbatch passes; when it did is appended to `spans`, if there are any."""
    if spans is None:
        yield
        return
    clock, began_s = time.time() - perf_counter(), perf_counter()
    yield
    spans.append(ActionSpan(kind, 0, microbatch, clock + began_s, clock + perf_counter()))


class SampleSource(Protocol):
    """What reads the samples of batches, as `Loader` does."""

    def read(self, shares: Iterator[Share]) -> MicrobatchStream:
        """The rank's own microbatches of all `shares`, in order."""
        ...

    def samples(self, share: Share) -> list[Any]:
        """The samples of all ranks' microbatches of `share`, in order."""
        ...


class Batch:
    """This rank's share of one batch, or of an evaluation; a training batch is trained on once.

    loader: of its samples. made: whether the loop has made these, which are not of the job's data.
    first:  the number of its first microbatch in its step, where other passes of the step come before.
    loss:   the loss function to compute in place of the job's, or None. phase: of the job, whose loss it is.
    used:   whether it was trained on.
    """

    def __init__(
        self, share: Share, microbatches: MicrobatchStream, loader: SampleSource, *, made: bool = False
    ) -> None:
        self.share, self.microbatches, self.loader, self.made = share, microbatches, loader, made
        self.first, self.used = 0, False
        self.loss: LossFunction | None = None
        self.phase = ""
        self._remaining = share.runs

    def samples(self) -> list[Any]:
        """The samples of the whole batch, all ranks', in the order of its microbatches, read by this rank.

        Of a stream they come from rank 0: all ranks ask for them.
        """
        return self.loader.samples(self.share)

    def again(self) -> Batch:
        batch = Batch(self.share, self.loader.read(iter([self.share])), self.loader, made=self.made)
        batch.first, batch.loss, batch.phase = self.first, self.loss, self.phase
        return batch

    def for_phases(self, phases: Sequence[str]) -> Iterator[Batch]:
        """The same batch for each of `phases`, which is to be run before the next is asked for; it is read once."""
        kept = KeptMicrobatches(self.microbatches)
        for number, phase in enumerate(phases):
            source = kept.read() if number == 0 < len(phases) - 1 else kept.again() if number else self.microbatches
            batch = Batch(self.share, source, self.loader, made=self.made)
            batch.phase = phase
            yield batch
        self.used, self._remaining = True, 0

    def rounds(self, size: int) -> Iterator[list[Microbatch]]:
        """The microbatches in order, `size` at a time."""
        while self._remaining:
            count = min(size, self._remaining)
            self._remaining -= count
            with on(HOST):
                microbatches = [next(self.microbatches) for _ in range(count)]
            if self.first:
                microbatches = [replace(one, number=one.number + self.first) for one in microbatches]
            yield microbatches

    @property
    def remaining(self) -> int:
        """Microbatches that were not yet run."""
        return self._remaining


def peak_bytes(device: str) -> int:
    """Peak of this rank in bytes: of the allocator on a GPU, of the resident set on the CPU."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
