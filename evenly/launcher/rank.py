"""The rank's side of a launch: what each process that the agent starts runs, and the files it writes.

A rank reports two things to its launcher through files in a control folder: its process id, so that signals can be
forwarded, and its error with the time, so that the first of several failing ranks is known.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from evenly.errors import CheckpointError, EvenlyError, ResumeError, RunError, UserError, place_of, rank_of, step_of
from evenly.launcher.environment import PAUSE, become_environment, process_environment
from evenly.launcher.out_of_memory import KILLED_CHILD, is_out_of_memory
from evenly.launcher.part import NodePart
from evenly.launcher.stop_signals import STOP_SIGNALS
from evenly.observe.recorder import RankRecord, glance, read

# A failing rank waits before it exits, so that the agent has seen a peer's end that came before its own:
# a moment, and longer where its error says that a peer is gone.
SETTLE_S = 0.25
LINGER_S = 2.0

LONGEST_MESSAGE = 2000
LESS_MEMORY = "ask for less memory (microbatch, sharding, number of ranks)"

PEER_LOSS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "ncclRemoteError",
    "NCCL communicator was aborted",
    "remote process exited or there was a network error",
)

Kind = Literal["killed", "memory", "error", "aborted", "peer", "interrupted"]
CAUSES: tuple[Kind, ...] = get_args(Kind)  # in the order in which one is the cause of another
EXIT_STOPPED = 128  # of a run that was stopped, plus the number of the signal


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """How a rank failed: from its exception, or from its exit code if it left none.

    kind: "memory" where it had no room.
    asked, found, do: of an error of evenly's; of any other `asked` is ''.
    step: optimizer step of the failure, None if that is unknown.
    cause: the rank that an error of all ranks arose on, None if it is not another.
    resuming: whether it is of the checkpoint that the run was to go on from.
    """

    rank: int
    time_s: float
    kind: Kind
    found: str
    asked: str = ""
    do: str = ""
    step: int | None = None
    cause: int | None = None
    resuming: bool = False
    exit_code: int = 1
    traceback: str = ""

    @property
    def text(self) -> str:
        return ": ".join(part for part in (self.asked, self.found) if part)

    @property
    def is_mistake(self) -> bool:
        """Whether it is a mistake in the job or the plan, which does not depend on rank or step."""
        return bool(self.asked) and self.exit_code == UserError.exit_code and self.step is None

    @property
    def exit_reason(self) -> str:
        """How the rank ended, as a predicate ('was killed by SIGKILL'); '' if it only lost a peer."""
        if self.kind in ("peer", "interrupted"):
            return ""
        return self.found.removeprefix("it ").partition(";")[0] if self.kind != "error" else f"raised {self.text}"

    def as_killed_for_memory(self) -> RankExit:
        """The same where the kernel has killed processes for want of memory, this rank or its child among them."""
        if self.kind != "killed" and KILLED_CHILD not in self.found:
            return self
        found = "the kernel killed it, or a process that it had started, for want of memory (its control group's limit)"
        return replace(self, kind="memory", found=found, do=LESS_MEMORY)

    @property
    def order(self) -> tuple[int, float]:
        """Sort key: the cause first. A kill is never caused by another rank's error; an abort may be."""
        return CAUSES.index(self.kind), self.time_s


@dataclass(frozen=True)
class LaunchFolder:
    """Owns every file of a launch: logs, process ids, exits.

    control:   what launcher and ranks of this node tell each other, in a folder of its own.
    temporary: whether the logs are in that folder too.
    """

    logs: Path
    control: Path
    temporary: bool

    def log(self, rank: int) -> Path:
        return self.logs / f"rank{rank}.log"

    def put_pid(self, rank: int) -> None:
        _write(self.control / f"{rank}.pid", str(os.getpid()))

    def pids(self) -> dict[int, int]:
        """Process id by global rank, of the ranks that have started."""
        return {int(path.stem): int(path.read_text()) for path in self.control.glob("*.pid")}

    def put_exit(self, found: RankExit) -> None:
        _write(self.control / f"{found.rank}.json", json.dumps(asdict(found)))

    def exits(self) -> list[RankExit]:
        return [RankExit(**json.loads(path.read_text())) for path in self.control.glob("*.json")]

    def note_done(self, rank: int) -> None:
        """Marks the rank's function as returned."""
        (self.control / f"{rank}.done").touch()

    def done(self) -> set[int]:
        """Ranks whose function has returned."""
        return {int(path.stem) for path in self.control.glob("*.done")}

    def note_failing(self, rank: int) -> None:
        """Marks the rank as failed, before its exit is written: nobody need wait for it."""
        (self.control / f"{rank}.failing").touch()

    def failing(self) -> set[int]:
        """Ranks that have failed."""
        return {int(path.stem) for path in self.control.glob("*.failing")}

    def ask_to_pause(self) -> None:
        """Asks the ranks to pause where the next checkpoint is due."""
        (self.control / PAUSE).touch()

    def records(self) -> list[RankRecord]:
        return [record for path in sorted(self.control.glob("*.record")) if (record := read(path)) is not None]

    def glances(self) -> list[RankRecord]:
        return [record for path in self.control.glob("*.record") if (record := glance(path)) is not None]

    def stack_file(self, rank: int) -> Path:
        return self.control / f"{rank}.stacks"

    def stacks(self, rank: int) -> str:
        path = self.stack_file(rank)
        return path.read_text(errors="replace") if path.exists() else ""

    def remove(self) -> None:
        """Remove the control folder: nothing reads it any more, and its lock is still held."""
        shutil.rmtree(self.control if self.temporary else self.control.parent, ignore_errors=True)

    def remove_logs(self) -> None:
        """Remove the logs, if nobody named their folder."""
        if self.temporary:
            shutil.rmtree(self.logs, ignore_errors=True)


def _write(path: Path, text: str) -> None:
    """Write so that a reader finds the whole file or none."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


@dataclass(frozen=True)
class Task:
    """The function and its arguments, pickled.

    by_value: whether what the ranks cannot import (a notebook's cells, nested functions) is in it itself, and so in its
    result.
    """

    pickled: bytes
    by_value: bool = False

    @property
    def needs_main(self) -> bool:
        return not self.by_value and b"__main__" in self.pickled

    def __call__(self) -> Any:
        fn, args = pickle.loads(self.pickled)
        return fn(*args)


@dataclass(frozen=True)
class RankTask:
    """Everything that the launcher passes to a rank.

    part: of its node, where there are several. followed: whether the launcher reads rank 0's output from its log.
    """

    task: Task
    folder: LaunchFolder
    environment: Mapping[str, str]
    part: NodePart | None = None
    followed: bool = False


def rank_main(assignment: RankTask) -> bytes:
    """Runs in each rank; returns the function's result, pickled."""
    gc.enable()  # which the fork server has not
    local_rank, part = int(process_environment()["LOCAL_RANK"]), assignment.part
    become_environment(assignment.environment, {} if part is None else part.variables(local_rank))
    rank = int(process_environment()["RANK"])
    try:
        _become_rank(assignment.folder, rank, redirected=rank > 0 or assignment.followed)
        result = _dumped(_call_task(assignment.task), by_value=assignment.task.by_value)
    except BaseException as error:
        _fail(assignment.folder, rank, error)
    # The run is over for this rank; a late Ctrl-C has nothing to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assignment.folder.note_done(rank)
    return result


def _become_rank(folder: LaunchFolder, rank: int, *, redirected: bool) -> None:
    """Sets up this process as a rank: process group, log, signal handlers, and a watch on its launcher."""
    os.setpgid(0, 0)
    # Data workers are started as in a plain script, not as this process was.
    multiprocessing.set_start_method(None, force=True)
    # Its group is not the terminal's, which must not stop it for writing there.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    threading.Thread(target=_end_with_launcher, name="launcher watch", daemon=True).start()
    if redirected:
        _redirect(folder.log(rank))
    _use_threads()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Written by a handler in C, so that a rank stuck in a library can still be asked.
    stacks = folder.stack_file(rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    folder.put_pid(rank)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _end_with_launcher() -> None:
    """Kill this rank and its children as soon as its launcher is gone, however it ended."""
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        launcher.join()
        os.killpg(0, signal.SIGKILL)


def end_rank(pid: int) -> None:
    """Kill a rank and all that it started."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _redirect(log: Path) -> None:
    """Send this process's output, and that of all it starts, to `log`."""
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("ab") as target:
        os.dup2(target.fileno(), 1)
        os.dup2(target.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _use_threads() -> None:
    """Set the number of threads again: the process that forked this one may have used another."""
    import torch

    threads = process_environment().get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > 0 and int(threads) != torch.get_num_threads():
        torch.set_num_threads(int(threads))


def _call_task(task: Task) -> Any:
    try:
        return task()
    except SystemExit as ended:
        if ended.code in (None, 0):
            return None
        raise


def _dumped(result: Any, *, by_value: bool) -> bytes:
    try:
        return dump_by_value(result) if by_value else pickle.dumps(result)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"return a {type(result).__name__} from a rank",
            f"it cannot be sent to the launcher: {error}",
            "return numbers, text, tensors or containers of them",
        ) from None


def dump_by_value(value: Any) -> bytes:
    """Pickles `value` together with the functions and classes in it that no other process can import."""
    import cloudpickle

    return cloudpickle.dumps(value)


def _fail(folder: LaunchFolder, rank: int, error: BaseException) -> NoReturn:
    """Write the exit for the launcher, then end this process without waiting for threads that may hang."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):
        folder.note_failing(rank)
    found = describe(rank, error)
    with suppress(OSError):  # the disk may be full, which may be the error
        folder.put_exit(found)
    with suppress(OSError), folder.log(rank).open("a") as log:
        log.write(found.traceback)
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    time.sleep(LINGER_S if found.kind == "peer" else SETTLE_S)
    os._exit(found.exit_code)


def describe(rank: int, error: BaseException) -> RankExit:
    """The exit of a rank whose function raised `error`."""
    asked, found, do = _describe_error(error)
    step, kind = step_of(error), _kind(error)
    return RankExit(
        rank=rank,
        time_s=time.time(),
        kind=kind,
        asked=asked,
        found=found[:LONGEST_MESSAGE],
        do=do,
        step=step if isinstance(step, int) else None,
        cause=rank_of(error),
        resuming=isinstance(error, ResumeError),
        exit_code=error.exit_code if isinstance(error, EvenlyError) and kind != "memory" else 1,
        traceback="".join(traceback.format_exception(error)),
    )


def describe_exit(rank: int, exit_code: int) -> RankExit:
    """The exit of a rank that wrote none; a negative `exit_code` is a signal."""
    if exit_code >= 0:
        return RankExit(
            rank=rank,
            time_s=time.time(),
            kind="error",
            found=f"it ended with exit code {exit_code} and no error",
            do="where a script calls evenly.launch, put the call under: if __name__ == '__main__'",
        )
    name = _signal_name(-exit_code)
    found, do = f"it was killed by {name}", ""
    if name == "SIGKILL":
        found += "; the usual sender is the kernel's out-of-memory killer"
        do = f"{LESS_MEMORY}, or see the kernel's log"
    kind: Kind = "aborted" if name == "SIGABRT" else "killed"
    return RankExit(rank=rank, time_s=time.time(), kind=kind, found=found, do=do)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _kind(error: BaseException) -> Kind:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if is_out_of_memory(error):
        return "memory"
    raised = error.__cause__ if type(error) is RunError and error.__cause__ is not None else error
    of_ranks = isinstance(raised, (RuntimeError, ConnectionError, CheckpointError))  # which they save together
    return "peer" if of_ranks and any(text in str(raised) for text in PEER_LOSS) else "error"


def in_one_line(error: BaseException) -> str:
    """What `error` says, with its class; of an error of evenly's what was asked and found."""
    if isinstance(error, EvenlyError):
        return ": ".join(filter(None, (error.asked, error.found)))
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _describe_error(error: BaseException) -> tuple[str, str, str]:
    if _kind(error) == "memory":
        place = "" if isinstance(error, EvenlyError) else place_of(error)
        return "", f"it had no room: {in_one_line(error)}{place}", LESS_MEMORY
    if isinstance(error, EvenlyError):
        return error.asked, error.found, error.do
    if isinstance(error, KeyboardInterrupt):
        return "", "it was interrupted in the middle of its work", ""
    if isinstance(error, SystemExit):
        return "", f"it called sys.exit({error.code!r}){place_of(error)}", ""
    found = in_one_line(error)
    if _kind(error) == "peer":
        return "", f"it lost another rank ({found})", "look at the ranks of the other nodes"
    return "", f"{found}{place_of(error)}", ""
