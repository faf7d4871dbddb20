"""One run: a job under a plan on the world that this process belongs to.

`start` connects, builds and composes; `Run.step` is the training step; `close` ends it in the reverse order.
The same calls are made on every rank, in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import torch

from evenly.comm.collectives import gather_values
from evenly.comm.connect import disconnect
from evenly.comm.groups import Group
from evenly.comm.world import World
from evenly.data.loader import Loader, Share, share_of_step, worker_count
from evenly.engine.assemble import build_and_compose
from evenly.engine.compose import Composed
from evenly.engine.executor import Batch, Executor, MicrobatchExecutor
from evenly.engine.precision import LossScale
from evenly.engine.updater import Updater
from evenly.errors import RunError, UserError, place_of
from evenly.job import Job
from evenly.launch.allocator import FreedMemory, hand_back_freed_memory
from evenly.launch.environment import available_cores, chosen_threads, find_here, keep_primitives
from evenly.observe.loggers.choose import make_loggers
from evenly.observe.run_folder import RunFolder
from evenly.observe.sinks import Sink
from evenly.observe.slow import SlowRanks
from evenly.plan import Plan, PlanSpec, asked_plan
from evenly.train.average import averaged_weights
from evenly.train.evaluate import evaluate
from evenly.train.interrupt import Interrupt
from evenly.train.keep_state import keeping_state
from evenly.train.look import check_job, check_model, check_update, shapes_vary, worthwhile_primitives
from evenly.train.options import RunOptions, merge_options
from evenly.train.rank_speeds import measured_speeds
from evenly.train.recorder import RunRecorder, record_decisions
from evenly.train.reports import Evaluation, StepReport
from evenly.train.resolve_run import ResolvedRun, connect_and_resolve
from evenly.train.step import train_step

if TYPE_CHECKING:
    from evenly.checkpoint.store import CheckpointStore
    from evenly.train.snapshots import Snapshots


OUT = "give `out` to evenly.start, or --out to evenly run"
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _at_work(method: Callable[Concatenate[Run, Arguments], Result]) -> Callable[Concatenate[Run, Arguments], Result]:
    """A method within which parameters are what this rank has of them."""

    @wraps(method)
    def run(self: Run, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with self.inside():
            return method(self, *args, **kwargs)

    return run


class Run:
    """A job in progress on this rank. Made by `start`; a context manager.

    Public attributes: `job` (with its microbatch decided), `plan` (complete), `world`, `devices` (of this
    rank), `model`, `optimizer`, `steps_done`, `out` (folder).
    """

    def __init__(
        self, job: Job, decision: ResolvedRun, world: World, options: RunOptions, sinks: Sequence[Sink] = ()
    ) -> None:
        job = decision.apply_to(job)
        self.job, self.world, self.out = job, world, options.out
        self.steps, self.steps_done = options.steps or job.steps, 0
        self.left_out, self.may_leave_out = 0, options.skip_nonfinite  # batches that are not finite
        self._data: Group = world.group("data")
        with world.during("first step"):
            seen = check_job(job, decision.plan, world)
            vary = shapes_vary(job, decision.plan)
        self.composed: Composed = build_and_compose(job, decision.plan, world)
        if vary:
            keep_primitives(worthwhile_primitives(self.composed.model, decision.plan))  # before the first forward
        self.freed_memory = _freed_memory(options, world)
        self.model = self.composed.model
        self.plan = decision.plan
        if self.composed.pipeline is not None:  # stages are found in the model
            self.plan = self.plan.with_stages(self.composed.pipeline.model.stage_plan.counts)
        if self.plan.data.speeds == "measured":
            self.plan = self.plan.with_speeds(measured_speeds(world))
        self.executor = make_executor(job, self.plan, self.composed, world)
        self.devices = self.executor.devices
        self.updater = Updater(job, self.plan, self.composed, world)
        self.optimizer, self.schedule = self.updater.optimizer, self.updater.schedule
        self.weight_average = averaged_weights(job, self.plan, self.composed)
        with world.during("first step"):
            check_update(self.updater, world)
            self.averages = check_model(job, self.plan, self.executor, seen, world)
        position = self.composed.pipeline.group.position if self.composed.pipeline is not None else 0
        self.slow = SlowRanks(gather_values(position, world.group("world")))
        self.slow_ranks: list[str] = []  # found in the step before
        self.looked_at = seen if self.averages else []  # the microbatches that were looked at
        for statistics in self.composed.statistics:
            statistics.add_averages(self.averages)
        self.interrupt = Interrupt()
        self.saved_at: int | None = None  # step of the newest checkpoint
        self.evaluation_due = self.evaluates_later = False  # of the state gone on from; whether the loop heeds it
        self.state_is_whole = False  # the state is that after `steps_done` steps
        self.stopped = False  # all ranks agreed to stop early
        self._first_step = 0  # of this process
        self.clock = time.perf_counter()
        self.store: CheckpointStore | None = None
        self._snapshots: Snapshots | None = None
        folder = RunFolder(self.out) if self.out is not None else None
        if folder is not None:
            self._open(options)
        elif options.resume:
            raise UserError("resuming", "the run has no folder", OUT)
        self.state_is_whole = True
        self.recorder = RunRecorder(folder, world, sinks, steps_done=self.steps_done, steps=self.steps)
        record_decisions(self, decision.predicted, options.settings)
        # From now on to the job's code, but within the methods of this class.
        self.composed.show_parameters()
        self.updater.show_groups()

    @property
    def loss_scale(self) -> LossScale:
        """The factor of the loss in float16."""
        return self.updater.loss_scale

    # ------------------------------------------------------------------------------------------ training
    def batches(self) -> Iterator[Batch]:
        """The remaining batches of the run, until a stop is requested."""
        share = lru_cache(maxsize=64)(self._share)  # called here and by the loader, which may be ahead
        microbatches = self.loader().read(share(step) for step in range(self.steps_done, self.steps))
        self.clock = time.perf_counter()
        while self.steps_done < self.steps and not self.stopped:
            step = self.steps_done
            yield Batch(share(step), microbatches)
            if self.steps_done == step:
                raise RunError(
                    f"batch of step {step + 1}", "it was not given to run.step", "give every batch to run.step once"
                )
            if self._snapshots is not None:
                self._snapshots.take_if_due()

    @_at_work
    def step(self, batch: Batch) -> StepReport:
        """Trains one step on `batch`.

        Raises `RunError` if the loss or the gradient is not finite, and no more such batches may be left out.
        """
        if batch.share.step != self.steps_done:
            raise RunError(
                f"run.step after {self.steps_done} steps",
                f"a batch of step {batch.share.step + 1}",
                "use each batch once",
            )
        if self.updater.advance.waits(self.steps_done):  # no one has asked for it, or it was saved before
            self.evaluate()
        # A block that has been compiled may be compiled again, for other shapes.
        state = "first step" if self._first_step == self.steps_done or self.plan.compile != "off" else "step"
        with keeping_state(self), self.world.during(state):
            return train_step(self, batch)

    # ---------------------------------------------------------------------------------------- evaluation
    @_at_work
    def evaluate(self, *, average: bool = True) -> Evaluation:
        """Evaluates loss, metrics and figures over the job's `eval_data`, every sample exactly once.

        average: whether of the averaged weights, where the job has an average and it has begun. Does not affect
        training. Raises `RunError` where the loss is not finite, or a metric counts nothing.
        """
        return evaluate(self, average=average)

    @contextmanager
    def averaged_weights(self) -> Generator[None]:
        """Within, the model has the averaged weights (`Job.average`), once the average has begun: to draw samples, say.

        No step can be made and nothing be saved meanwhile. Afterwards the weights are as before, bit by bit.
        """
        if self.weight_average is None:
            raise UserError("run.averaged_weights()", "the job keeps no average", "give the Job average=evenly.EMA()")
        with self.weight_average.in_model():
            yield

    # ---------------------------------------------------------------------------------------- checkpoints
    @contextmanager
    def state_as_saved(self) -> Generator[None]:
        """Within, parameters are this rank's parts, sharded ones and optimizer state DTensors."""
        with self.inside(), self.updater.as_dtensors():
            yield

    @contextmanager
    def inside(self) -> Generator[None]:
        """Within, model and optimizer have what this rank has of parameters; outside, the job's code finds wholes."""
        with self.composed.showing(False), self.updater.inside():
            yield

    @_at_work
    def save(self, *, score: float | None = None) -> None:
        """Begins a checkpoint of the steps done so far; `score` (lower is better) decides which is kept as best."""
        if self.store is None:
            raise UserError("run.save()", "the run has no folder", OUT)
        if self.saved_at != self.steps_done:
            from evenly.train.resume import snapshot

            with keeping_state(self), self.world.during("saving"):
                self.store.save(snapshot(self), score=score)
            self.saved_at = self.steps_done
            self.recorder.saved(self.steps_done)
        self.clock = time.perf_counter()

    def _open(self, options: RunOptions) -> None:
        # torch's distributed checkpoint takes a second to import: only runs that save wait for it.
        from evenly.train.resume import open_store, restore

        self.store = open_store(self, options)
        if options.resume:
            try:
                restore(self, self.store, options.step)
            except BaseException:
                self.store.close()
                raise
            self.saved_at = None if self.evaluation_due else self.steps_done
            self._first_step = self.steps_done
        if options.snapshot:
            from evenly.train.snapshots import Snapshots

            self._snapshots = Snapshots(self, self.store, options.snapshot)

    # --------------------------------------------------------------------------------------------- the end
    @_at_work
    def close(self, *, failed: bool = False) -> None:
        """Finishes checkpoints, removes all hooks and leaves the process group; safe to call twice."""
        self.interrupt.close()
        try:
            if self.store is not None and not failed:
                with self.world.during("saving"):
                    self.store.close()
                if self._snapshots is not None:
                    self._snapshots.close()
        finally:
            self.recorder.close(self.steps_done, failed=failed)
            self.composed.close()
            if not failed:  # the others may be gone: a failed rank leaves by ending
                disconnect(self.world)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None and self.steps_done and self.saved_at != self.steps_done and self.store is not None:
            self.save()
        self.close(failed=kind is not None)
        if isinstance(error, SystemExit):
            raise left_early(error, self.steps_done) from error

    # ---------------------------------------------------------------------------------------------- shares
    def loader(self, evaluating: Job | None = None) -> Loader:
        """A loader of the job's data, or of what a job with one evaluation set evaluates."""
        world = self.world
        workers = worker_count(cores=available_cores(), local_ranks=world.local_size, device=world.device)
        pin = world.device.startswith("cuda")
        return Loader(evaluating or self.job, evaluation=evaluating is not None, workers=workers, pin=pin)

    def _share(self, step: int) -> Share:
        speeds = tuple(float(speed) for speed in self.plan.data.speeds)
        group = self._data
        return self.fitted(share_of_step(self.job, step, rank=group.position, ranks=group.size, speeds=speeds))

    def fitted(self, share: Share) -> Share:
        """`share` with the fillers that the plan needs."""
        return share.filled() if self.composed.in_step else share


def _freed_memory(options: RunOptions, world: World) -> FreedMemory | None:
    """What keeps freed memory on a CPU; where a run had no room before, it is returned."""
    if options.no_room:
        hand_back_freed_memory()
        return None
    return FreedMemory(ranks=world.local_size) if world.device == "cpu" else None


def left_early(ended: SystemExit, steps_done: int | None = None) -> RunError:
    """The error of a rank whose job has called sys.exit."""
    when = "before the run had begun" if steps_done is None else f"after step {steps_done}"
    found = f"the job called sys.exit({ended.code!r}) {when}{place_of(ended)}"
    return RunError("training to the end of the run", found, "let all ranks leave the loop to end a run early")


def make_executor(job: Job, plan: Plan, composed: Composed, world: World) -> Executor:
    """The executor for `composed`."""
    if composed.pipeline is None or composed.runner is None:
        return MicrobatchExecutor(job, plan, composed, world)
    from evenly.engine.pipeline_executor import PipelineExecutor  # torch's parts behind it take a while to import

    return PipelineExecutor(job, plan, composed, world, pipeline=composed.pipeline, runner=composed.runner)


def start(
    job: Job,
    *,
    plan: PlanSpec | str | None = None,
    out: Path | str | None = None,
    steps: int | None = None,
    resume: bool = False,
    skip_nonfinite: int = 0,
    sinks: Sequence[Sink] = (),
) -> Run:
    """The run of `job` here, on the world it was started in (`evenly run`, torchrun, srun, mpirun, or one process).

    plan:   how to split; "auto" searches for the plan that is predicted to be fastest, under the other settings of
            the text (`auto precision=bfloat16`); None: all ranks share each batch.
    out:    folder for metrics, events and checkpoints; without one nothing is written.
    steps:  length of the whole run; by default the job's.
    resume: continue from the newest checkpoint in `out`, with its microbatch if the job states none.
    skip_nonfinite: how many batches whose loss or gradient is not finite may be left out, on all ranks alike.
    sinks:  also receive the records of the run: loggers (`evenly.TensorBoardLogger()`), or `evenly.observe.sinks.Sink`.

    Arguments that are left out are taken from the command line of `evenly run`.
    Raises `UserError` (with `PlanError`) where the job, the plan and the world do not fit together.
    """
    named, search = (plan, False) if isinstance(plan, PlanSpec) else asked_plan(plan)
    options = RunOptions(named, Path(out) if out else None, steps, resume, search=search, skip_nonfinite=skip_nonfinite)
    return start_with_options(job, options, sinks)


def start_with_options(job: Job, options: RunOptions, sinks: Sequence[Sink] = ()) -> Run:
    """`start` with its arguments as data."""
    options = merge_options(options)
    sinks = [*sinks, *make_loggers(options.log)]
    decision, world = connect_and_resolve(job, options, find_here())
    if world.device == "cpu" and decision.plan.exact == "bitwise" and chosen_threads() is None:
        torch.set_num_threads(1)  # the bits of a sum depend on the number of threads
    try:
        return Run(job, decision, world, options, sinks)
    except UserError:  # raised on all ranks, which may go on
        disconnect(world)
        raise
