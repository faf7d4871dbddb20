"""`evenly run --ray`: a run on workers of a Ray cluster, each a rank."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenly.cli.run import (
    RunRequest,
    choose_folder,
    exit_code,
    print_summary,
    read_request,
    run_options,
    with_autoresume,
    with_way_on,
)
from evenly.errors import UserError
from evenly.launcher.agent import FailedRank
from evenly.launcher.rounds import NodeRange
from evenly.train.loop import Summary, run_job_file

if TYPE_CHECKING:
    from evenly.launcher.environment import ProcessInfo
    from evenly.train.options import RunOptions


def run_on_ray(request: RunRequest, workers: NodeRange) -> int:
    """Trains; returns the exit code. Raises the first failure."""
    from evenly.ray import RayWorkers, train_on_workers

    asked = read_request(request)
    _check(request, script=asked.script)
    request = with_autoresume(request)
    out = choose_folder(request).absolute()
    request = replace(request, save_to=request.save_to and request.save_to.absolute())
    options = replace(run_options(request, asked, out), quiet=request.quiet or request.json_only)
    if not request.json_only and not request.quiet:
        print(f"evenly run {request.job} on {workers} workers of Ray, into {out}", file=sys.stderr, flush=True)
    train = partial(_train, (request.job, *request.arguments), Path.cwd(), asked.settings, request.json_only)
    try:
        summary = train_on_workers(
            train, options, RayWorkers(workers), restarts=request.restarts, keep_plan=request.keep_plan
        )
    except FailedRank as failed:
        failed.do = with_way_on(failed, request, out)
        raise
    print_summary(summary, request)
    return exit_code(summary.stopped, 0)


def _train(
    words: tuple[Any, ...],
    folder: Path,
    settings: dict[str, Any],
    json_only: bool,
    options: RunOptions,
    place: ProcessInfo,
) -> Summary:
    """On a worker, which has the driver's `folder`, or works in a copy of it that Ray has made."""
    job, *sys.argv[1:] = words
    here = folder / job if (folder / job).is_file() else job
    return run_job_file(here, settings, options, json_only, place)


def _check(request: RunRequest, *, script: bool) -> None:
    """Raises `UserError` where the command asks for what workers of Ray cannot do."""
    given = {
        "--devices": request.devices is not None,
        "--nodes": request.nodes.most > 1,
        "--step": request.step is not None,
        "--check": request.check,
        "--stall-limit": request.stall_limit_s is not None,
        "--snapshot": request.snapshot is not None,
    }
    if any(given.values()):
        names = " and ".join(name for name, found in given.items() if found)
        raise UserError(f"{names} with --ray", "Ray starts the workers, and watches them", "leave it out")
    if script:
        found = f"{request.job} calls evenly.start: it runs as a script, and Ray's workers train a job"
        raise UserError("a run on workers of Ray", found, "define job() -> evenly.Job in it")
