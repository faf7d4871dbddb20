"""`evenly.launch`: a job, or a function, in ranks on this machine, from a script or a notebook.

A launcher imports this module: what trains takes a second to import and is left to the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, overload

from evenly.errors import UserError
from evenly.hardware.cluster_text import local_devices
from evenly.job import Job
from evenly.launcher import agent
from evenly.launcher.agent import Launch, Start, start_ranks
from evenly.observe.run_folder import RunFolder
from evenly.plan import PlanSpec, asked_plan
from evenly.train.loop import Summary, run_job
from evenly.train.options import RunOptions


@overload
def launch(
    what: Job,
    *,
    devices: int | None = None,
    plan: PlanSpec | str | None = None,
    out: Path | str | None = None,
    steps: int | None = None,
    resume: bool = False,
    start: Start = "forkserver",
) -> Summary: ...


@overload
def launch(
    what: Callable[..., Any], *args: Any, devices: int | None = None, start: Start = "forkserver"
) -> list[Any]: ...


def launch(
    what: Job | Callable[..., Any],
    *args: Any,
    devices: int | None = None,
    plan: PlanSpec | str | None = None,
    out: Path | str | None = None,
    steps: int | None = None,
    resume: bool = False,
    start: Start = "forkserver",
) -> Any:
    """Trains a job, or calls a function, in ranks on this machine.

    what:    a `Job`, which is trained as `evenly run` does it; its `Summary` is returned. Or a function, which every
             rank calls with `args`, say one with a loop of its own around `evenly.start`; the results are returned in
             the order of ranks. Both may be made in a notebook's cell.
    devices: ranks; by default those of the plan, else all GPUs, or on a machine without one its CPUs.
    plan, out, steps, resume: of a job, as for `evenly.start`.
    start:   how the processes are made: "forkserver" or "spawn".

    A first interrupt lets the ranks finish their step and save; a second one ends them.
    Raises `UserError` (with `PlanError`) where it cannot be run so, and `FailedRank` with the error of the first rank
    that failed.
    """
    if not isinstance(what, Job):
        _check_function(what, plan=plan, out=out, steps=steps, resume=resume)
        return agent.launch(what, *args, devices=devices or local_devices(), start=start)
    if args:
        raise UserError("launch a job", f"it was given {len(args)} arguments as well", "give them to the job")
    named, search = (plan, False) if isinstance(plan, PlanSpec) else asked_plan(plan)
    count = devices or (named.devices if named is not None else None) or local_devices()
    replicas = named is not None and named.replicas is not None
    if named is not None and not replicas:
        named.fit(count)  # raises before any process starts
    folder = Path(out) if out is not None else None
    check_folder(folder, resume=resume)
    options = RunOptions(named, folder, steps, resume, count if replicas else None, search)
    logs = None if folder is None else RunFolder(folder).logs
    results = start_ranks(run_job, (what, options), Launch(devices=1 if replicas else count, log_dir=logs, start=start))
    return results[0]


def _check_function(what: Any, **of_a_job: Any) -> None:
    if not callable(what):
        raise UserError(f"launch a {type(what).__name__}", "it is neither a Job nor a function", "give one of them")
    if given := [name for name, value in of_a_job.items() if value]:
        found = f"{', '.join(given)} are options of a job" if len(given) > 1 else f"{given[0]} is an option of a job"
        raise UserError("launch a function", found, "give it to evenly.start in the function")


def check_folder(folder: Path | None, *, resume: bool) -> None:
    if folder is None:
        return
    exists = RunFolder(folder).holds_run
    if exists and not resume:
        raise UserError(f"a new run in {folder}", "it already holds a run", "give resume=True, or another folder")
    if resume and not exists:
        raise UserError(f"resuming the run in {folder}", "it holds no run", "check `out`, or leave out resume")
