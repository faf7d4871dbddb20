"""The driver of a run on Ray: what it refuses before anything starts, and what it does where workers fail."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from evenly.errors import PlanError, UserError
from evenly.job import Job
from evenly.launcher.environment import ProcessInfo
from evenly.launcher.rank import dump_by_value
from evenly.launcher.rounds import NodeRange
from evenly.launcher.shared_folder import put_mark
from evenly.plan import PlanSpec, asked_plan
from evenly.train.launch_job import check_folder
from evenly.train.loop import Summary, run_job
from evenly.train.options import RunOptions
from evenly.train.start_again import start_until_done

Train = Callable[[RunOptions, ProcessInfo], Summary]


@dataclass(frozen=True)
class RayWorkers:
    """The workers that Ray is asked for.

    number: of them; a range takes as many as the cluster has room for. gpus: whether each has one, None for those of a
    cluster that has any. resources: further ones of each, as Ray names them: `{"CPU": 4, "memory": 2**34}`.
    """

    number: NodeRange
    gpus: bool | None = None
    resources: Mapping[str, float] | None = None


def run(
    job: Job | Callable[[], Job],
    *,
    workers: int | tuple[int, int],
    out: Path | str,
    plan: PlanSpec | str | None = None,
    steps: int | None = None,
    gpus: bool | None = None,
    failures: int = 0,
    resources: Mapping[str, float] | None = None,
    resume: bool = False,
) -> Summary:
    """Trains a job on workers of the Ray cluster that this process is connected to, or of the one that Ray finds.

    job:       a `Job`, or a function that makes one on each worker, which saves sending its data.
    workers:   ranks; `(2, 4)` for at least two and at most four, as the cluster has room for, when the run begins and
               whenever nodes are lost or come: then it goes on from its newest checkpoint. The plan has to leave a size
               open for that.
    out:       the run's folder, on storage that all nodes and this process see.
    plan, steps: as for `evenly.start`. resume: whether `out` holds a run that is to go on.
    gpus, resources: of each worker, see `RayWorkers`.
    failures:  how often in an hour workers may fail, or their nodes be lost, and all be started again.

    Where there is no room for a step, it goes on under a plan that needs less memory. Raises `UserError` (with
    `PlanError`) where it cannot be run so, and `FailedRank` with the error of the first rank that failed.
    """
    number = _number_of(workers)
    named, search = (plan, False) if isinstance(plan, PlanSpec) else asked_plan(plan)
    folder = Path(out).absolute()
    check_folder(folder, resume=resume)
    options = RunOptions(plan=named, search=search, out=folder, steps=steps, resume=resume)
    train = partial(_train_made, job)
    return train_on_workers(train, options, RayWorkers(number, gpus, resources), restarts=failures)


def _train_made(job: Job | Callable[[], Job], options: RunOptions, place: ProcessInfo) -> Summary:
    return run_job(job if isinstance(job, Job) else job(), options, place)


def _number_of(workers: int | tuple[int, int]) -> NodeRange:
    least, most = workers if isinstance(workers, tuple) else (workers, workers)
    if not 1 <= least <= most:
        found = "a run has at least one rank" if least < 1 else "the least number comes first"
        raise UserError(f"evenly.ray.run(workers={workers})", found, "ask for a number, or two: (2, 4)")
    return NodeRange(least, most)


def train_on_workers(
    train: Train, options: RunOptions, workers: RayWorkers, *, restarts: int, keep_plan: bool = False
) -> Summary:
    """Calls `train` on every worker, and again from the newest checkpoint as `start_until_done`; rank 0's summary.

    The folder of the options is one that all nodes see.
    """
    check_asked(options.plan, workers)
    pickled = _pickled(train)
    try:
        from evenly.ray.workers import RayTask, connect, fit
    except ImportError as problem:  # ray.train has needs of its own
        raise UserError("a run on workers of Ray", str(problem), 'pip install "evenly[ray]"') from None
    connect(quiet=options.quiet)

    def start(options: RunOptions) -> Summary:
        assert options.out is not None
        mark = put_mark(options.out, secrets.token_hex(8))
        try:
            return fit(RayTask(pickled, options), workers.number, mark, gpus=workers.gpus, resources=workers.resources)
        finally:
            mark.unlink(missing_ok=True)

    return start_until_done(start, options, restarts=restarts, keep_plan=keep_plan)


def _pickled(train: Train) -> bytes:
    try:
        return dump_by_value(train)
    except Exception as error:  # whatever the objects in it raise
        found = f"it cannot be sent to another process: {error}"
        do = "give a function that makes the job: each worker calls it"
        raise UserError("a job for workers of Ray", found, do) from None


def check_asked(plan: PlanSpec | None, workers: RayWorkers) -> None:
    """Raises `UserError` (with `PlanError`) for what no cluster could run."""
    number, asked = workers.number, f"{workers.number} workers of Ray"
    gpus = (workers.resources or {}).get("GPU", 1)
    if gpus != 1:
        raise UserError(asked, f"each would have {gpus:g} GPUs", "a rank has one: gpus=True")
    if plan is None:
        return
    if plan.replicas is not None:
        raise PlanError(f"plan {plan} on {asked}", "replicas share one process", "use ddp")
    problems: dict[int, str] = {}
    for count in range(number.least, number.most + 1):
        try:
            plan.fit(count).complete(plan.precision or "float32")
        except PlanError as problem:
            problems[count] = problem.found
    if problems:
        found = "; ".join(f"on {count}, {text}" if number.elastic else text for count, text in problems.items())
        do = "leave a size open (data takes what remains), or ask for other workers"
        raise PlanError(f"plan {plan} on {asked}", found, do)
