"""Starting ranks: torch's elastic agent, a warm forkserver, and one clear error where a rank fails.

    warm_up -> start_ranks -> the agent -> one process per rank: `rank_main` -> the function

Each rank leads a process group of its own, so that a terminal's Ctrl-C reaches the launcher alone, which
forwards it once, and so that a rank can be ended together with the processes it started.
"""

from __future__ import annotations

import atexit
import logging
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from evenly.errors import RankError, RunError, UserError
from evenly.launcher.environment import (
    CONTROL_VARIABLE,
    LOOPBACK,
    LOOPBACK_INTERFACE,
    NOTEBOOK_VARIABLE,
    PRELOAD_VARIABLE,
    changed_environment,
    process_environment,
    rank_environment,
)
from evenly.launcher.folders import open_folder, own_temporary_folder
from evenly.launcher.notebook import followed, in_notebook
from evenly.launcher.out_of_memory import kills_for_memory
from evenly.launcher.part import NodePart
from evenly.launcher.rank import (
    EXIT_STOPPED,
    Kind,
    LaunchFolder,
    RankExit,
    RankTask,
    Task,
    describe_exit,
    dump_by_value,
    end_rank,
    rank_main,
)
from evenly.launcher.signals import StopRequest, forwarded_signals, hold_signals, stop_forkserver
from evenly.launcher.watch import Orders, Watch
from evenly.observe.diagnosis import Diagnosis, explain, is_waiting
from evenly.observe.recorder import RankRecord

Start = Literal["forkserver", "spawn"]

# What every rank needs before its function can run.
PRELOAD = (
    *("evenly.launcher.no_collection", "torch", "torch.distributed", "torch.distributed.elastic.multiprocessing"),
    "evenly.launcher.rank",
)

# Each look of the agent takes milliseconds from the ranks' cores: at torch's 0.1 s, 10 % of a slow one.
LOOK_EVERY_S = 0.5


class FailedRank(RankError):
    """The first failing rank.

    rank:      its global rank, None where the run as a whole was stopped.
    exit_code: 2 where the rank raised a `UserError`, 128 + signal where the run was stopped, else 1.
    traceback: the rank's own, '' where it left none.
    step:      optimizer step of the failure, None if that is unknown.
    kind:      how the rank failed; "memory" where it had no room.
    resuming:  whether it could not go on from a checkpoint, which is another job's.
    """

    resuming: bool = False

    def __init__(
        self,
        asked: str,
        found: str,
        do: str,
        *,
        rank: int | None,
        exit_code: int = 1,
        traceback: str = "",
        step: int | None = None,
        kind: Kind = "error",
    ) -> None:
        super().__init__(asked, found, do)
        self.rank, self.exit_code, self.traceback = rank, exit_code, traceback
        self.step, self.kind = step, kind

    def _render_traceback_(self) -> list[str]:
        return [*self.traceback.splitlines(), "", *str(self).splitlines()]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How to start the ranks of this node.

    devices:     ranks on this node.
    node:        number of this node.
    part:        what its ranks are of a world on several nodes; None where they are all.
    start:       how processes are made; 'forkserver' is the fastest after `warm_up`.
    log_dir:     folder of rank{N}.log; by default a temporary one that only a failed run leaves.
    preload:     modules that the forkserver imports for the ranks.
    environment: variables to set in the ranks.
    stall_limit_s: how long a rank may stand still before all are ended, with the reason; None: minutes, by what it
                 does, and at least three times its longest step.
    look_every_s: how often the agent looks whether ranks have ended.
    stop:        the stop signals that this launch has received.
    orders:      what the run asks of the ranks while they run.
    notebook:    whether this process is a notebook's kernel: rank 0's output is then written to the cell.
    """

    devices: int
    node: int = 0
    part: NodePart | None = None
    start: Start = "forkserver"
    log_dir: Path | None = None
    preload: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    stall_limit_s: float | None = None
    look_every_s: float = LOOK_EVERY_S
    stop: StopRequest = field(default_factory=StopRequest, compare=False)
    orders: Orders = field(default_factory=Orders, compare=False)
    notebook: bool = field(default_factory=in_notebook)

    @property
    def first_rank(self) -> int:
        return 0 if self.part is None else self.part.first_rank


def launch(fn: Callable[..., Any], *args: Any, devices: int, start: Start = "forkserver") -> list[Any]:
    """Run `fn(*args)` in `devices` ranks on this machine; their results in the order of ranks.

    What the ranks cannot import (a notebook's cells, nested functions) is sent to them. Each rank has torchrun's
    variables in its environment. Raises `UserError` where the function cannot be sent, `FailedRank` with the error of
    the first rank that failed.
    """
    results = start_ranks(fn, args, Launch(devices=devices, start=start))
    return [results[rank] for rank in sorted(results)]


def start_ranks(fn: Callable[..., Any], args: Sequence[Any], launch: Launch) -> dict[int, Any]:
    """Run `fn(*args)` in the ranks of this node; their results by global rank.

    Rank 0 has the terminal, every other rank its log file. Ctrl-C or SIGTERM is forwarded to the ranks once,
    as SIGINT; they are expected to finish their step and return. A second one, or 30 s, ends them hard.
    Raises as `launch` does.
    """
    _check(launch)
    task = _task(fn, tuple(args), launch.start)
    if launch.start == "forkserver":
        warm_up(launch.preload)
    with ExitStack() as stack:
        interface = LOOPBACK_INTERFACE if launch.part is None else launch.part.interface
        stack.enter_context(changed_environment(rank_environment(process_environment(), interface)))
        stack.enter_context(_quiet_agent())
        stack.enter_context(_main_module(needed=task.needs_main))
        folder = open_folder(launch.log_dir, launch.node, stack)
        stack.callback(folder.remove)
        stack.enter_context(forwarded_signals(folder, launch.stop))
        environment = {**process_environment(), CONTROL_VARIABLE: str(folder.control), **launch.environment}
        if launch.notebook:
            environment[NOTEBOOK_VARIABLE] = "1"
            stack.enter_context(followed(folder.log(0)))
        try:
            results = _run(RankTask(task, folder, environment, launch.part, launch.notebook), launch)
        except FailedRank as failed:
            if failed.exit_code == UserError.exit_code:  # a refusal says all in its message
                folder.remove_logs()
            raise
    folder.remove_logs()
    return {launch.first_rank + rank: pickle.loads(results[rank]) for rank in sorted(results)}


# --- the forkserver -------------------------------------------------------------------------------------


def warm_up(preload: Sequence[str] = (), libraries: Sequence[str] = ()) -> None:
    """Start the forkserver, which imports torch and `preload` while the caller goes on with its own imports.

    Call it before importing torch. A server that runs already is kept as it is. libraries: of the job, see `preload`.
    """
    from multiprocessing import forkserver

    # Stop signals are the launcher's to handle, also while the server imports.
    variables = {**rank_environment(process_environment()), PRELOAD_VARIABLE: ",".join(libraries)}
    with changed_environment(variables), hold_signals():
        forkserver.set_forkserver_preload([*PRELOAD, *preload, "evenly.launcher.preload"])
        try:
            forkserver.ensure_running()
        except OSError as problem:  # a socket's path has 107 bytes at most
            found = f"no socket can be made in the temporary folder {tempfile.gettempdir()}: {problem}"
            raise UserError("start ranks", found, "set TMPDIR to a folder with a short name, which exists") from None
    own_temporary_folder()
    atexit.register(stop_forkserver)


@contextmanager
def _main_module(*, needed: bool) -> Generator[None]:
    """Keep ranks from importing this process's main module if they do not need it."""
    main = vars(sys.modules["__main__"])
    hidden = {} if needed else {name: main[name] for name in ("__file__", "__spec__") if name in main}
    # The file's name is taken away and not set to None: `inspect`, which the agent uses, expects one or none.
    main.pop("__file__" if hidden else "", None)
    main.update({"__spec__": None} if hidden else {})
    try:
        yield
    finally:
        main.update(hidden)


# --- what can be seen before ranks start ----------------------------------------------------------------


def _check(launch: Launch) -> None:
    asked = f"start {launch.devices} ranks"
    if launch.devices < 1:
        raise UserError(asked, "it must be at least 1", "ask for at least one rank")
    if launch.start not in ("forkserver", "spawn"):
        raise UserError(asked, f"start={launch.start!r}", "use forkserver or spawn")


def _task(fn: Callable[..., Any], args: tuple[Any, ...], start: Start) -> Task:
    try:
        task = Task(pickle.dumps((fn, args)))
        if not task.needs_main or _main_is_a_file():
            return task
    except (pickle.PicklingError, AttributeError, TypeError):
        pass  # a nested function, say
    try:
        return Task(dump_by_value((fn, args)), by_value=True)
    except Exception as error:  # whatever the objects in it raise
        name = getattr(fn, "__qualname__", repr(fn))
        raise UserError(
            f"run {name} in ranks started by {start}",
            f"it cannot be sent to another process: {error}",
            "make in the ranks what cannot be sent (open files, locks, tensors on GPUs)",
        ) from None


def _main_is_a_file() -> bool:
    path = getattr(sys.modules["__main__"], "__file__", None)
    return path is not None and Path(path).is_file()


# --- the agent ------------------------------------------------------------------------------------------


def _run(assignment: RankTask, launch: Launch) -> dict[int, bytes]:
    """Run the agent until all ranks have returned; raises the first failure."""
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    watch, killed = Watch(assignment.folder, launch.stall_limit_s, launch.orders), kills_for_memory()
    try:
        with watch:
            return elastic_launch(_agent_config(launch), rank_main)(assignment)
    except ChildFailedError as failed:
        exit_codes = {launch.first_rank + rank: failure.exitcode for rank, failure in failed.failures.items()}
    except SignalException as quit_signal:
        exit_codes = {}
        if watch.left is None and not launch.orders.end:  # it was a user's
            launch.stop.ask(int(quit_signal.sigval))
            launch.stop.end()
    except (DistNetworkError, DistStoreError, RendezvousError) as error:
        raise RunError("start the ranks", str(error).splitlines()[0], "see `evenly doctor`") from None
    finally:
        for pid in assignment.folder.pids().values():
            end_rank(pid)
    for_memory, gone = kills_for_memory() > killed, watch.gone
    if watch.left is not None:  # where the kernel has killed it, torch's agent may be slow to learn its exit code
        left = gone or watch.left
        raise _failed(assignment.folder, replace(left, kind="killed").as_killed_for_memory() if for_memory else left)
    if watch.diagnosis is not None:
        raise _stalled(assignment.folder, watch.diagnosis)
    raise _first_failure(assignment.folder, exit_codes, launch.stop, gone, for_memory=for_memory)


def _agent_config(launch: Launch) -> Any:
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig

    rendezvous_handler_registry.register("evenly", _rendezvous)
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=launch.devices,
        run_id="evenly",
        role="rank",
        rdzv_backend="evenly",
        rdzv_endpoint=LOOPBACK,
        rdzv_configs={"launch": launch},
        local_addr=LOOPBACK,
        max_restarts=0,
        start_method=launch.start,
        monitor_interval=launch.look_every_s,
        logs_specs=_no_logs(),
        # Where the agent handles a signal it kills the ranks at once; the others are forwarded.
        signals_to_handle="SIGQUIT",
    )


def _rendezvous(parameters: Any) -> Any:
    from evenly.launcher.rendezvous import OneNode

    launch: Launch = parameters.get("launch")
    return OneNode() if launch.part is None else OneNode(launch.part.port)


def _no_logs() -> Any:
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class NoLogs(LogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            nowhere = dict.fromkeys(envs, "")
            return LogsDest(stdouts=nowhere, stderrs=nowhere, error_files=nowhere)

        @property
        def root_log_dir(self) -> str:
            return ""

    return NoLogs()


@contextmanager
def _quiet_agent() -> Generator[None]:
    """Keep torch's own lines about starting and ending processes off the terminal."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn")]
    before = [logger.propagate for logger in loggers]
    silent = logging.NullHandler()
    for logger in loggers:
        logger.addHandler(silent)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(silent)
            logger.propagate = propagate


# --- what went wrong ------------------------------------------------------------------------------------


def _first_failure(
    folder: LaunchFolder,
    exit_codes: Mapping[int, int],
    stop: StopRequest,
    gone: RankExit | None = None,
    *,
    for_memory: bool = False,
) -> FailedRank:
    """gone: how a rank has ended that was gone while the others were alive.

    for_memory: whether the kernel has killed any process for want of memory.
    """
    exits = folder.exits()
    reported = {found.rank for found in exits}
    exits += [describe_exit(rank, code) for rank, code in exit_codes.items() if rank not in reported]
    if for_memory:
        exits = [found.as_killed_for_memory() for found in exits]
    first = min(exits, key=lambda found: found.order, default=None)
    if gone is not None and first is not None and first.kind == "peer" and not stop.signum:  # they have lost it
        exits, first = [*exits, gone], gone
    if stop.signum and (stop.hard or first is None or first.kind in ("peer", "interrupted")):
        return _stopped(stop)
    if first is None:
        return FailedRank("the run failed", "no rank left an error", f"see the logs: {folder.logs}", rank=None)
    records, reasons = folder.records(), {e.rank: e.exit_reason for e in exits if e.exit_reason}
    diagnosis = explain(records, now_s=first.time_s, exit_reasons=reasons)
    if diagnosis is not None and _is_victim(first, records):
        return _stalled(folder, diagnosis)
    return _failed(folder, first, None if first.kind == "memory" else diagnosis)


def _is_victim(found: RankExit, records: Sequence[RankRecord]) -> bool:
    """Whether a rank has failed since others did: one that has lost them, or aborted where it waited for them."""
    waits = any(record.rank == found.rank and is_waiting(record) for record in records)
    return found.kind == "peer" or (found.kind == "aborted" and waits)


def failed_rank(first: RankExit) -> FailedRank:
    """The error of a run of which a rank was the first to fail so."""
    rank = first.rank if first.cause is None else first.cause
    asked, found = f"rank {rank} failed" + ("" if first.step is None else f" at step {first.step}"), first.text
    if first.is_mistake:
        asked, found = first.asked, first.found
    failed = FailedRank(
        asked,
        found,
        first.do,
        rank=rank,
        exit_code=first.exit_code,
        traceback=first.traceback,
        step=first.step,
        kind=first.kind,
    )
    failed.resuming = first.resuming
    return failed


def _failed(folder: LaunchFolder, first: RankExit, diagnosis: Diagnosis | None = None) -> FailedRank:
    failed = failed_rank(first)
    log = folder.log(first.rank if first.cause is None else first.cause)
    whose = "its" if not first.is_mistake else f"rank {failed.rank}'s"
    where = f"see {whose} log: {log}" if log.exists() else f"see the logs: {folder.logs}"
    if first.exit_code == UserError.exit_code and folder.temporary:  # its logs are removed
        where = ""
    failed.found += f"; {diagnosis.text}" if diagnosis and not first.is_mistake else ""
    failed.do = "; ".join(filter(None, (first.do, where)))
    return failed


def _stalled(folder: LaunchFolder, diagnosis: Diagnosis) -> FailedRank:
    stacks = ", with the stacks of all ranks" if [*folder.logs.glob("*.stacks")] else ""
    return FailedRank(
        "the ranks did not come together" if len(folder.records()) > 1 else "the run did not get on",
        diagnosis.text,
        f"{diagnosis.do}; the logs{stacks}: {folder.logs}",
        rank=diagnosis.ranks[0],
    )


def _stopped(stop: StopRequest) -> FailedRank:
    return FailedRank(
        f"the run was stopped by {signal.Signals(stop.signum).name}",
        "its ranks were killed" if stop.hard else "a rank ended in the middle of its work",
        "",
        rank=None,
        exit_code=EXIT_STOPPED + stop.signum,
        kind="interrupted",
    )
