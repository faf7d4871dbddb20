"""`evenly run`: starts the ranks of this machine, together with other machines' or alone, and prints the result."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenly.checkpoint.folder import CheckpointFolder
from evenly.errors import PlanError, UserError
from evenly.hardware.cluster_text import local_devices, local_gpus
from evenly.jobfile import check_settings, owns_loop, parse_settings, read_with
from evenly.launcher.agent import FailedRank, Launch, start_ranks, warm_up
from evenly.launcher.environment import CHECK_VARIABLE, OPTIONS_VARIABLE, find_here, import_quiet_torch
from evenly.launcher.rank import EXIT_STOPPED
from evenly.launcher.rounds import NodeRange
from evenly.observe.loggers.choose import make_loggers
from evenly.observe.run_folder import RunFolder
from evenly.observe.sinks import finite
from evenly.plan import PlanSpec, asked_plan
from evenly.train.start_again import start_until_done

if TYPE_CHECKING:
    from evenly.launcher.environment import ProcessInfo
    from evenly.train.loop import Summary
    from evenly.train.options import RunOptions

# What every rank needs; pipelining imports what the first optimizer does, which takes a second.
PRELOAD = ["evenly.train.loop", "evenly.train.run", "evenly.train.resume", "torch.distributed.pipelining"]


@dataclass(frozen=True)
class RunRequest:
    """The command line of `evenly run`."""

    job: Path
    arguments: list[str]
    plan: str | None
    devices: int | None
    out: Path | None
    steps: int | None
    resume: bool
    step: int | None
    skip_nonfinite: int
    check: bool
    stall_limit_s: float | None
    settings: list[str]
    nodes: NodeRange
    node_rank: int
    rendezvous: str
    secret_file: Path | None
    json_only: bool
    save_to: Path | None = None
    snapshot: int | None = None
    restarts: int = 0
    keep_plan: bool = False
    log: Sequence[str] = ()
    quiet: bool = False
    cluster: Path | None = None
    autoresume: bool = False
    ray: NodeRange | None = None


def run(request: RunRequest, on_nodes: Callable[..., int], as_rank: Callable[[RunRequest, ProcessInfo], int]) -> int:
    """Trains; returns the exit code.

    on_nodes: does so together with the launchers of other nodes. as_rank: as one of the ranks that another launcher has
    started.
    """
    place = find_here()
    under_launcher = place.size > 1 and (request.nodes.most == 1 or not request.rendezvous)
    if under_launcher and place.size > place.nodes:
        return as_rank(request, place)
    asked = read_request(request)
    warm_up(PRELOAD)  # imports torch in the fork server while this process imports it too
    plan, script = asked.plan or PlanSpec(), asked.script
    if under_launcher:
        request = _with_place(request, place)
    request = with_autoresume(request)
    nodes = request.nodes
    if nodes.most > 1:
        import_quiet_torch()
    _check_restarts(request, script=script)
    devices = request.devices or devices_here(plan.devices, nodes.most)
    fitted = fit_all(plan, devices, nodes)
    _check_gpus(devices)
    ranks = devices if fitted.replicas is None else _one_process(fitted, nodes.most)
    chosen_elsewhere = request.node_rank > 0 or (script and request.out is None)
    out = request.out if chosen_elsewhere else choose_folder(request)
    options = run_options(request, asked, out, None if fitted.replicas is None else devices)
    launch = Launch(
        devices=ranks,
        node=request.node_rank,
        log_dir=out and RunFolder(out).logs,
        preload=PRELOAD,
        environment={
            **({OPTIONS_VARIABLE: options.to_text()} if script else {}),
            **({CHECK_VARIABLE: "1"} if request.check else {}),
        },
        stall_limit_s=request.stall_limit_s,
    )
    _announce(request, devices, out)
    if nodes.most > 1:
        return on_nodes(request, launch, asked.settings, options, script=script)
    return _start_until_done(request, launch, asked.settings, options, script=script)


@dataclass(frozen=True)
class ReadRequest:
    """What a command line asks for. plan: None for the default. search: whether to search for the best of those that
    agree with it. script: whether the job's file owns its loop.
    """

    plan: PlanSpec | None
    search: bool
    script: bool
    settings: dict[str, Any]


def read_request(request: RunRequest) -> ReadRequest:
    """Raises `UserError` for what can be seen before anything starts."""
    script = owns_loop(request.job)
    plan, search = read_with(request.job, lambda: asked_plan(request.plan))
    if request.cluster is not None and not search:
        found = f"the plan is {plan or 'the default'}, and nothing is searched"
        raise UserError(f"--cluster {request.cluster}", found, "add --plan auto")
    if request.arguments and request.arguments not in (sys.argv[1:], sys.argv[2:]):  # the job may follow -- too
        raise UserError(
            f"arguments {' '.join(request.arguments)}",
            f"what {request.job} is to find in sys.argv follows --",
            "put -- before them, or pass settings with --set KEY=VALUE",
        )
    sys.argv[1:] = request.arguments
    if request.settings and script:
        raise UserError(
            f"--set {request.settings[0]}",
            f"{request.job} calls evenly.start: it runs as a script, and nobody calls its job()",
            "pass arguments to the script, after --",
        )
    settings = parse_settings(request.settings)
    if not script:
        check_settings(request.job, settings)
    make_loggers(request.log)
    return ReadRequest(plan, search, script, settings)


def with_autoresume(request: RunRequest) -> RunRequest:
    """`request` with --resume where --autoresume was given and the folder has a checkpoint. Raises `UserError`."""
    if not request.autoresume:
        return request
    if request.out is None:
        raise UserError("--autoresume", "the run's folder has no name", "name it: --out DIR")
    places = [CheckpointFolder(place) for place in (request.out, request.save_to) if place is not None]
    return replace(request, resume=request.resume or any(place.steps() for place in places))


def run_options(request: RunRequest, asked: ReadRequest, out: Path | None, devices: int | None = None) -> RunOptions:
    from evenly.train.options import RunOptions

    return RunOptions(
        plan=asked.plan,
        search=asked.search,
        out=out,
        steps=request.steps,
        resume=request.resume,
        step=request.step,
        skip_nonfinite=request.skip_nonfinite,
        devices=devices,
        save_to=request.save_to,
        snapshot=request.snapshot,
        log=tuple(request.log),
        quiet=request.quiet,
        cluster=request.cluster and request.cluster.resolve(),
    )


def _announce(request: RunRequest, devices: int, out: Path | None) -> None:
    if not request.json_only and not request.quiet:
        where = f"{devices} {'device' if devices == 1 else 'devices'}"
        where += f" of node {request.node_rank}, one of {request.nodes}" if request.nodes.most > 1 else ""
        print(f"evenly run {request.job} on {where}" + (f", into {out}" if out else ""), file=sys.stderr)


def _with_place(request: RunRequest, place: ProcessInfo) -> RunRequest:
    """`request` on the node that a launcher of one task per node has given this process."""
    nodes = request.nodes
    if nodes.most not in (1, place.nodes):
        raise UserError(f"--nodes {nodes}", f"{place.launcher} has started {place.nodes}", "ask for as many of it")
    least = nodes.least if nodes.most > 1 else place.nodes
    rendezvous = f"{place.address}:{place.port}"
    return replace(request, nodes=NodeRange(least, place.nodes), node_rank=place.node, rendezvous=rendezvous)


def fit_all(plan: PlanSpec, devices: int, nodes: NodeRange) -> PlanSpec:
    """`plan` for the most nodes of so many devices; raises `PlanError` that names all numbers that it does not fit."""
    if not nodes.elastic:
        return plan.fit(devices * nodes.most)
    problems: list[str] = []
    fitted = plan
    for number in range(nodes.least, nodes.most + 1):
        try:
            fitted = plan.fit(devices * number)
            fitted.complete(plan.precision or "float32")
        except PlanError as problem:
            problems.append(f"on {number}, {problem.found}")
    if problems:
        asked = f"plan {plan} on {nodes} nodes with {devices} device{'s' * (devices != 1)} each"
        raise PlanError(
            asked, "; ".join(problems), "leave a size open (data takes what remains), or give other --nodes"
        )
    return fitted


def _check_restarts(request: RunRequest, *, script: bool) -> None:
    if not request.restarts and not request.nodes.elastic:
        return
    asked = "--restarts" if request.restarts else f"--nodes {request.nodes.least}:{request.nodes.most}"
    if request.out is None and script:
        raise UserError(asked, "the script chooses its folder by itself", "name the folder: --out DIR")
    if request.step is not None:
        found = f"a restart goes on from the newest checkpoint, which may be of those after step {request.step}"
        raise UserError(f"{asked} and --step", found, "leave out one of them, or move those checkpoints away")
    if request.snapshot and request.nodes.most > 1:
        raise UserError("--snapshot on several nodes", "they share no memory", "run without --snapshot")


def _start_until_done(
    request: RunRequest, launch: Launch, settings: dict[str, Any], options: RunOptions, *, script: bool
) -> int:
    """Starts the ranks, and again where they have failed and that is allowed."""

    def start(options: RunOptions) -> int:
        variables = {OPTIONS_VARIABLE: options.to_text()} if script else {}
        these = replace(launch, environment={**launch.environment, **variables})
        return _start(request, these, settings, options, script=script)

    return start_until_done(
        start,
        options,
        restarts=request.restarts,
        keep_plan=request.keep_plan or request.step is not None,
        stopped=lambda: bool(launch.stop.signum),
    )


def _start(request: RunRequest, launch: Launch, settings: dict[str, Any], options: RunOptions, *, script: bool) -> int:
    try:
        stopped, summary = train_on_ranks(request, launch, settings, options, script=script)
    except FailedRank as failed:
        if request.snapshot and options.out is not None:
            _keep_snapshot(options.out)
        failed.do = with_way_on(failed, request, options.out)
        raise
    if summary is not None:
        print_summary(summary, request)
    return exit_code(stopped, launch.stop.signum)


def train_on_ranks(
    request: RunRequest, launch: Launch, settings: dict[str, Any], options: RunOptions, *, script: bool
) -> tuple[bool, Summary | None]:
    """Runs the ranks of this machine: whether they have stopped early, and the summary of a job's run."""
    from evenly.train.loop import run_job_file, run_script

    if script:
        stopped = start_ranks(run_script, (request.job, request.json_only), launch)
        return any(stopped.values()), None
    results = start_ranks(run_job_file, (request.job, settings, options, request.json_only), launch)
    summary: Summary = results[min(results)]
    return summary.stopped, summary


def _keep_snapshot(out: Path) -> None:
    """What ranks that are gone have left in memory becomes a checkpoint; the memory is free again."""
    from evenly.checkpoint.shared_memory import keep_snapshot, memory_folder

    keep_snapshot(out)
    memory_folder(out).discard()


def exit_code(stopped: bool, signum: int) -> int:
    """Of a run that `stopped` early or did not; signum: the signal that this process had, none if another had it."""
    return EXIT_STOPPED + (signum if signum > 0 else signal.SIGINT) if stopped else 0


def with_way_on(failed: FailedRank, request: RunRequest, out: Path | None) -> str:
    """What to do about the failure, and from which checkpoint the run can go on; none makes up for a mistake."""
    mistaken = failed.exit_code == UserError.exit_code
    newest = None if out is None or mistaken else CheckpointFolder(out).newest_readable()
    way_on = f"go on from step {newest.step} with: {_way_on(request, out)}" if newest and out is not None else ""
    return "; ".join(filter(None, (failed.do, way_on)))


def _way_on(request: RunRequest, out: Path | str) -> str:
    """The command by which a run goes on; the plan is free, and its number of devices."""
    settings = [word for setting in request.settings for word in ("--set", setting)]
    steps = [] if request.steps is None else ["--steps", str(request.steps)]
    steps += [] if request.save_to is None else ["--save-to", str(request.save_to)]
    ending = ["--", *request.arguments] if request.arguments else []
    steps += [word for one in request.log for word in ("--log", one)]
    skip = ["--skip-nonfinite", str(request.skip_nonfinite)] if request.skip_nonfinite else []
    skip += [] if request.ray is None else ["--ray", request.ray.to_text()]
    return shlex.join(
        ["evenly", "run", str(request.job), *settings, *steps, *skip, "--resume", "--out", str(out), *ending]
    )


def print_summary(summary: Summary, request: RunRequest) -> None:
    if request.json_only:
        print(json.dumps(finite(asdict(summary))))
        return
    if request.quiet:
        return
    from evenly.cli.tables import print_wrapped

    evaluation = "" if summary.eval_loss is None else f", evaluation loss {summary.eval_loss:.4f}"
    evaluation += "".join(f", {name} {value:.4f}" for name, value in summary.eval_metrics.items())
    evaluation += " (averaged weights)" if summary.eval_averaged else ""
    if summary.loss is None and summary.ended_early:
        print(f"nothing left to do: the job has ended the run after step {summary.steps}{evaluation}", flush=True)
        return
    if summary.loss is None:
        print_wrapped(
            f"nothing left to do: step {summary.steps} is already done, and {summary.steps_asked} were asked for"
            f"{evaluation}; for more, repeat the run's settings or give --steps"
        )
        return
    done = f"steps {summary.first_step} to {summary.steps}" if summary.first_step != 1 else f"{summary.steps} steps"
    print_wrapped(
        f"{done} on {summary.world} {'rank' if summary.world == 1 else 'ranks'} ({summary.plan}) "
        f"in {summary.seconds:.1f} s: "
        f"loss {summary.first_loss:.4f} -> {summary.loss:.4f}{evaluation}"
        f"{', stopped early by the job' if summary.ended_early else ''}"
    )
    if summary.out:
        again = f"; go on with: {_way_on(request, summary.out)}" if summary.stopped else ""
        print_wrapped(f"metrics, logs and checkpoints in {summary.out}{again}")


def devices_here(planned: int | None, nodes: int) -> int:
    """Ranks to start on this machine: what the plan says, else all GPUs, else CPU processes."""
    if planned is not None:
        return max(1, planned // nodes)
    return local_devices()


def _one_process(plan: PlanSpec, nodes: int) -> int:
    if nodes > 1:
        raise PlanError(f"plan {plan} on {nodes} nodes", "replicas share one process", "use ddp")
    return 1


def _check_gpus(devices: int) -> None:
    found = local_gpus()
    if found and devices > found:
        raise UserError(f"{devices} devices", f"this machine has {found} GPUs", f"give --devices {found} or fewer")


def choose_folder(request: RunRequest) -> Path:
    """The run's folder: the one named, or the next of runs/NAME-N (with --resume: the newest that has a checkpoint).

    Raises `UserError` if a new run would write into the folder of another, or there is none to resume.
    """
    if request.out is not None:
        exists = RunFolder(request.out).holds_run
        if exists and not (request.resume or request.autoresume):
            raise UserError(
                f"a new run in {request.out}", "it already holds a run", "add --resume, or choose another --out"
            )
        copied = request.save_to is not None and CheckpointFolder(request.save_to).steps()
        if request.resume and not exists and not copied:
            raise UserError(
                f"resuming the run in {request.out}", "it holds no run", "check --out, or leave out --resume"
            )
        return request.out
    stem = request.job.stem
    if not request.resume:
        return next_folder(request.job)
    for number in reversed(_numbers(Path("runs"), stem)):
        if CheckpointFolder(Path("runs") / f"{stem}-{number}").steps():
            return Path("runs") / f"{stem}-{number}"
    raise UserError(f"resuming a run of {request.job}", f"no runs/{stem}-N here has a checkpoint", "give --out DIR")


def next_folder(job: Path) -> Path:
    """runs/NAME-N that is not there yet."""
    numbers = _numbers(Path("runs"), job.stem)
    return Path("runs") / f"{job.stem}-{numbers[-1] + 1 if numbers else 1}"


def _numbers(folder: Path, stem: str) -> list[int]:
    endings = (path.name.removeprefix(f"{stem}-") for path in folder.glob(f"{stem}-*"))
    return sorted(int(ending) for ending in endings if ending.isdecimal())
