"""One run: a job under a plan on the world that this process belongs to.

`start` connects, builds and composes; `Run.step` is the training step, of `forward_backward` and `update`; `close` ends
it in the reverse order.
The same calls are made on every rank, in the same order.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch

from evenly.comm.collectives import gather_values
from evenly.comm.connect import disconnect
from evenly.comm.groups import Group
from evenly.comm.world import World
from evenly.data.alone import all_ranks, alone
from evenly.data.loader import Loader, Share, holding_first, share_of_samples, share_of_step, worker_count
from evenly.engine.assemble import build_and_compose
from evenly.engine.compose import Composed
from evenly.engine.executor import Batch, Executor, LossFunction, MicrobatchExecutor
from evenly.engine.updaters import Updaters
from evenly.errors import RunError, UserError, place_of
from evenly.job import Job
from evenly.launcher.allocator import FreedMemory, hand_back_freed_memory
from evenly.launcher.environment import available_cores, chosen_threads, find_here, keep_primitives
from evenly.observe.loggers.choose import make_loggers
from evenly.observe.run_folder import RunFolder
from evenly.observe.sinks import Sink
from evenly.observe.slow import SlowRanks
from evenly.plan import Plan, PlanSpec, asked_plan
from evenly.train.average import averaged_weights
from evenly.train.batches import batches_to_come
from evenly.train.evaluate import evaluate
from evenly.train.hooks import Hooks
from evenly.train.interrupt import Interrupt
from evenly.train.keep_state import keeping_state
from evenly.train.look import check_job, check_model, check_update, shapes_vary, worthwhile_primitives
from evenly.train.look_loss import warn_of_batch_norm, warn_of_idle_ranks
from evenly.train.options import RunOptions, merge_options
from evenly.train.pretrained import ModelStart
from evenly.train.rank_speeds import measured_speeds
from evenly.train.recorder import RunRecorder, record_decisions
from evenly.train.reports import Evaluation, PassReport, StepReport
from evenly.train.resolve_run import ResolvedRun, connect_and_resolve
from evenly.train.same_samples import check_same_samples
from evenly.train.step import (
    OpenStep,
    check_no_open_step,
    check_without_phases,
    prepare_for,
    run_pass,
    step_under_way,
    train_step,
)
from evenly.train.streaming import open_streams
from evenly.train.whole_model import whole_model, whole_parameters

if TYPE_CHECKING:
    from evenly.checkpoint.store import CheckpointStore
    from evenly.launcher.environment import ProcessInfo
    from evenly.train.snapshots import Snapshots


OUT = "give `out` to evenly.start, or --out to evenly run"
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _at_work(method: Callable[Concatenate[Run, Arguments], Result]) -> Callable[Concatenate[Run, Arguments], Result]:
    @wraps(method)
    def run(self: Run, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with self.inside():
            return method(self, *args, **kwargs)

    return run


class Run:
    """A job in progress on this rank. Made by `start`; a context manager.

    Public attributes: `job` (with its microbatch decided), `plan` (complete), `world`, `devices` (of this
    rank), `model`, `optimizer` (of a job with phases what stands for all of theirs), `steps_done`, `out` (folder).
    """

    def __init__(
        self, job: Job, decision: ResolvedRun, world: World, options: RunOptions, sinks: Sequence[Sink] = ()
    ) -> None:
        job = holding_first(decision.apply_to(job))
        self.job, self.world, self.out = job, world, options.out
        self.steps, self.steps_done = options.steps or job.steps, 0
        self.left_out, self.may_leave_out = 0, options.skip_nonfinite  # batches that are not finite
        self.hands, self.feed = open_streams(job, world, self.steps)
        with world.during("first step"):
            seen = check_job(job, decision.plan, world, self.feed)
            vary = shapes_vary(job, decision.plan, seen)
        self.model_start = ModelStart(job, world, options)
        self.composed: Composed = build_and_compose(job, decision.plan, world, self.model_start)
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
        self.updaters = Updaters(job, self.plan, self.composed, world)
        self.optimizer, self.schedule = self.updaters.optimizer, self.updaters.first.schedule
        self.weight_average = averaged_weights(job, self.plan, self.composed)
        with world.during("first step"):
            check_update(self.updaters, world, saves=self.out is not None)
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
        self.stopped = False  # all ranks agreed to stop early, as was asked from outside
        self.asked_to_end = self.ended_early = False  # by the job: on this rank, and agreed by all
        self.hooks = Hooks(job)
        self.open_step: OpenStep | None = None  # between its first forward and its update
        self.wholes_made = 0  # since the last step
        self._first_step = 0  # of this process
        self.clock = time.perf_counter()
        self.store: CheckpointStore | None = None
        self.snapshots: Snapshots | None = None
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
        self.updaters.show_groups()

    @property
    def is_main(self) -> bool:
        """Whether this rank is the one that speaks for all."""
        return self.world.is_main

    @property
    def goes_on(self) -> bool:
        """Whether there are steps left, and neither a stop was requested nor the job has ended the run."""
        return self.steps_done < self.steps and not self.stopped and not self.ended_early

    # ------------------------------------------------------------------------------------------ training
    def batches(self) -> Iterator[Batch]:
        """The batches of the steps to come, until a stop is requested.

        Each is of the step that comes next: where a loop has trained on others as well, those between are passed over.
        A stream goes on with the batch after the last one that it gave.
        """
        return batches_to_come(self)

    def batch(self, samples: Sequence[Any]) -> Batch:
        """A batch for the next step of `samples` that the loop has made, the same on all ranks, in any number.

        They are counted into microbatches of the job's size, and put together by its `collate`. A collective.
        Raises `UserError` where ranks have different samples.
        """
        check_same_samples(samples, self.world.group("world"))
        share, loader = self.share(self.steps_done, len(samples)), Loader(self.job, samples=samples)
        return Batch(share, loader.read(iter([share])), loader, made=True)

    def step(self, batch: Batch, loss: LossFunction | None = None) -> StepReport:
        """Trains one step on `batch`: `forward_backward` and `update`, or all phases of the job in turn; then calls the
        hooks of `on_step`.

        Raises `RunError` if the loss or the gradient is not finite, and no more such batches may be left out.
        """
        if loss is not None:
            check_without_phases(self, "run.step(batch, loss)")
        prepare_for(self, batch)
        report = self._in_step(lambda: train_step(self, batch, loss))
        self.hooks.call(self, "on_step", report)
        return report

    def forward_backward(self, batch: Batch, loss: LossFunction | None = None) -> PassReport:
        """Adds the gradient of `batch` to that of the step, which `update` ends; what it returns is of this batch.

        Called several times before one `update`, the step's loss is the sum of all totals over the sum of all weights:
        its microbatches are those of all batches, in this order. loss: of the same form, in place of the job's.
        """
        check_without_phases(self, "run.forward_backward(batch)")
        prepare_for(self, batch)
        return self._in_step(lambda: run_pass(self, batch, loss))

    def update(self) -> StepReport:
        """Ends the step that `forward_backward` has begun: clips, steps, schedules and records as `step` does."""
        if self.open_step is None:
            raise RunError("run.update()", "there are no gradients", "call run.forward_backward(batch) before")
        report = self._in_step(lambda: train_step(self, None, None))
        self.hooks.call(self, "on_step", report)
        return report

    @_at_work
    def _in_step(self, act: Callable[[], Result]) -> Result:
        """`act`, which begins the next step, goes on with it, or ends it."""
        # A block that has been compiled may be compiled again, for other shapes.
        state = "first step" if self._first_step == self.steps_done or self.plan.compile != "off" else "step"
        with self.world.during(state), step_under_way(self), keeping_state(self):
            return act()

    def stop(self) -> None:
        """Ends the run, which counts as done: after this step if a hook of any rank calls it, else after the next."""
        self.asked_to_end = True

    def log(self, values: Mapping[str, Any]) -> None:
        """Adds a record of the first rank's `values` to metrics.jsonl and all sinks, with the number of steps done."""
        self.recorder.logged(self.steps_done, values)

    def whole_model(self, *, main_only: bool = False, device: str | None = None) -> AbstractContextManager[Any]:
        """Within, the whole model in a module of its own, in evaluation mode; a collective.

        main_only: only the first rank gets it; the others get None, and wait for it at the end. device: by default this
        rank's. Random numbers drawn within are the same on all ranks, and follow from the step. What is done to it does
        not change the training.
        """
        check_no_open_step(self, "run.whole_model()")
        return whole_model(self, main_only=main_only, device=device)

    def whole_parameters(self) -> AbstractContextManager[None]:
        """Have whole parameters within, to read and to change, on every rank that holds them; a collective.

        It does nothing where they are whole already. Raises `RunError` inside a step or an evaluation.
        """
        return whole_parameters(self)

    # ---------------------------------------------------------------------------------------- evaluation
    def evaluate(self, *, average: bool = True) -> Evaluation:
        """Evaluates loss, metrics and figures over the job's `eval_data`, every sample exactly once.

        Then calls the hooks of `on_evaluation`. average: whether of the averaged weights, where the job has an average
        and it has begun. Does not affect training. Raises `RunError` where the loss is not finite, or a metric counts
        nothing.
        """
        check_no_open_step(self, "run.evaluate()")
        evaluation = self._evaluate(average)
        self.hooks.call(self, "on_evaluation", evaluation)
        return evaluation

    @_at_work
    def _evaluate(self, average: bool) -> Evaluation:
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
        with self.inside(), all_ranks(), self.updaters.as_dtensors():
            yield

    @contextmanager
    def inside(self) -> Generator[None]:
        """Within, model and optimizer have what this rank has of parameters; outside, the job's code finds wholes."""
        with self.composed.showing(False), self.updaters.inside(), alone():
            yield

    def save(self, *, score: float | None = None) -> None:
        """Begins a checkpoint of the steps done so far; `score` (lower is better) decides which is kept as best.

        Then calls the hooks of `on_save`, unless there is one of this step.
        """
        check_no_open_step(self, "run.save()")
        if self._save(score):
            self.hooks.call(self, "on_save", self.steps_done)

    @_at_work
    def _save(self, score: float | None) -> bool:
        if self.store is None:
            raise UserError("run.save()", "the run has no folder", OUT)
        due = self.saved_at != self.steps_done
        if due:
            from evenly.train.resume import save

            with keeping_state(self), self.world.during("saving"), self.updaters.evaluating():
                save(self, self.store, score)
            self.saved_at = self.steps_done
            self.recorder.saved(self.steps_done)
        self.clock = time.perf_counter()
        return due

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

            self.snapshots = Snapshots(self, self.store, options.snapshot)

    # --------------------------------------------------------------------------------------------- the end
    @_at_work
    def close(self, *, failed: bool = False) -> None:
        """Finishes checkpoints, removes all hooks and leaves the process group; safe to call twice."""
        self.interrupt.close()
        try:
            if self.store is not None and not failed:
                with self.world.during("saving"):
                    self.store.close()
                if self.snapshots is not None:
                    self.snapshots.close()
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
        stated, job = self.job.loading, evaluating or self.job
        workers = worker_count(cores=available_cores(), local_ranks=world.local_size, device=world.device)
        pin = world.device.startswith("cuda") and stated.get("pin_memory", True)
        options: Any = {"workers": stated.get("num_workers", workers), "prefetch": stated.get("prefetch_factor")}
        return Loader(job, evaluation=evaluating is not None, pin=pin, **options)

    @property
    def speeds(self) -> tuple[float, ...]:
        """Of the ranks of the data axis, where they differ."""
        return tuple(float(speed) for speed in self.plan.data.speeds)

    def share(self, step: int, made: int | None = None) -> Share:
        """Of the batch of `step`, or of so many samples that were made for it."""
        data: Group = self.world.group("data")
        place: Any = {"rank": data.position, "ranks": data.size, "speeds": self.speeds}
        if made is not None:
            return self.fitted(share_of_samples(self.job, made, step, **place))
        return self.fitted(share_of_step(self.job, step, **place))

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


def start_with_options(
    job: Job, options: RunOptions, sinks: Sequence[Sink] = (), place: ProcessInfo | None = None
) -> Run:
    """`start` with its arguments as data; at `place`, or where its launcher says that this process is."""
    options = merge_options(options)
    sinks = [*sinks, *make_loggers(options.log)]
    decision, world = connect_and_resolve(job, options, place or find_here())
    options = replace(options, out=options.out or decision.out)
    if world.device == "cpu" and decision.plan.exact == "bitwise" and chosen_threads() is None:
        torch.set_num_threads(1)  # the bits of a sum depend on the number of threads
    torch.compiler.set_stance("force_eager")  # looks see each operation of what the job has compiled
    # torch's compiler looks at the gradients of what goes into a graph, and warns that there are none.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    try:
        with alone():
            run = Run(job, decision, world, options, sinks)
    except UserError:  # raised on all ranks, which may go on
        disconnect(world)
        raise
    if not (run.composed.in_step or run.composed.tensor or run.composed.pipeline):  # parameters are whole in steps
        torch.compiler.set_stance("default")
    if run.is_main:
        warn_of_batch_norm(job, run.model, run.job.samples_per_microbatch)
        warn_of_idle_ranks(run.job, run.plan)
    return run
