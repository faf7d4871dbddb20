"""Forwards stop signals from the launcher to its ranks: the first asks them to stop, the second kills them."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from evenly.launcher.notebook import in_notebook
from evenly.launcher.stop_signals import STOP_SIGNALS

if TYPE_CHECKING:
    from evenly.launcher.rank import LaunchFolder


# How long ranks may take to finish their step, and a launcher to start any rank, after a stop signal.
STOP_TIMEOUT_S = 30.0
START_TIMEOUT_S = 3.0
# How long a launcher may take to end by itself once its ranks were killed.
END_TIMEOUT_S = 3.0


@dataclass
class StopRequest:
    """The stop signals that this launch has received so far.

    kernel: whether this process is a notebook's kernel, which outlives the launch.
    """

    signum: int = 0
    since_s: float = 0.0
    hard: bool = False
    hard_since_s: float = field(default=0.0, init=False)
    kernel: bool = field(default_factory=in_notebook)

    def ask(self, signum: int) -> None:
        if self.signum:
            self.end()
        else:
            self.signum, self.since_s = signum, time.monotonic()

    def end(self) -> None:
        """Asks for the end of all ranks, at once."""
        if not self.hard:
            self.hard, self.hard_since_s = True, time.monotonic()

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.since_s if self.signum else 0.0

    @property
    def waited_hard_s(self) -> float:
        return time.monotonic() - self.hard_since_s if self.hard_since_s else 0.0


@contextmanager
def named_signals() -> Generator[None]:
    """Within, a stop signal ends this process with a word and exit code 128 + its number. For a main thread."""
    with handled(STOP_SIGNALS, _end_named):
        yield


def _end_named(signum: int, frame: FrameType | None) -> None:
    os.write(2, f"evenly: stopped by {signal.Signals(signum).name}\n".encode())
    raise SystemExit(128 + signum)


def end_with_code(command: Callable[[], object]) -> NoReturn:
    """Runs `command` and ends this process with its exit code, also where a stop signal comes when all is done."""
    for number in STOP_SIGNALS:
        signal.signal(number, _end_named)
    code: object = 0
    try:
        command()
    except SystemExit as ended:
        code = ended.code
    with suppress(OSError):  # nobody reads it any more
        sys.stdout.flush()
    for number in STOP_SIGNALS:  # else the interpreter, while it ends, dies of them
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)  # type: ignore[arg-type]


@contextmanager
def handled(signals: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Generator[None]:
    """Within, `handler` gets the signals; then those that had them before."""
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, signal.SIG_DFL if former is None else former)


@contextmanager
def hold_signals() -> Generator[None]:
    """Processes started inside are born with the stop signals blocked; a rank unblocks them when it is set up."""
    from multiprocessing import resource_tracker

    # Starting it would unblock signals of this thread.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def forwarded_signals(folder: LaunchFolder, stop: StopRequest) -> Generator[None]:
    """Forward stop signals to the ranks. A thread does it: the main thread may be waiting inside torch."""
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            stack.enter_context(forwarding(folder, stop))
        stack.enter_context(hold_signals())
        yield


@contextmanager
def forwarding(folder: LaunchFolder, stop: StopRequest) -> Generator[None]:
    """Signals of this process go through a pipe to a thread. Only a main thread can ask for that."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # Started before the signals are held: this thread is the one that gets them.
    thread = threading.Thread(target=_forward, args=(reader, folder, stop), name="evenly-signals", daemon=True)
    thread.start()
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        # The agent takes SIGQUIT for itself and does not give it back.
        with handled((*STOP_SIGNALS, signal.SIGQUIT), _ignore):
            yield
    finally:
        signal.set_wakeup_fd(wakeup)
        os.close(writer)
        thread.join()
        os.close(reader)


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Does nothing: the wake-up pipe wakes the forwarding thread."""


def _forward(reader: int, folder: LaunchFolder, stop: StopRequest) -> None:
    """Read signal numbers until the pipe closes; forward them to every rank, also to those that start later."""
    asked: set[int] = set()
    while True:
        readable, _, _ = select.select([reader], [], [], 0.05 if stop.signum else None)
        numbers = os.read(reader, 64) if readable else None
        if numbers == b"":
            return
        for number in numbers or b"":
            if number in STOP_SIGNALS:
                stop.ask(number)
        if stop.signum:
            if stop.waited_s > STOP_TIMEOUT_S:
                stop.end()
            signal_ranks(folder, stop, asked)
            if (
                stop.waited_hard_s > END_TIMEOUT_S and not stop.kernel
            ):  # a rank that was killed while it sent its result leaves half of it
                leave(folder, stop, "and its ranks were killed")


def signal_ranks(folder: LaunchFolder, stop: StopRequest, asked: set[int]) -> None:
    """Send SIGINT once to each rank that has started, or kill them all."""
    from evenly.launcher.rank import end_rank  # commands without ranks need none of this

    for rank, pid in folder.pids().items():
        if stop.hard:
            end_rank(pid)
        elif rank not in asked:
            signal_rank(pid, signal.SIGINT)
        asked.add(rank)
    if not asked and not stop.kernel and (stop.hard or stop.waited_s > START_TIMEOUT_S):
        # The nodes have not connected, and only the end of this process ends that wait.
        leave(folder, stop, "before any rank had started")


def leave(folder: LaunchFolder, stop: StopRequest, how: str) -> NoReturn:
    """Ends this process, whatever its main thread waits for."""
    stop_forkserver()
    folder.remove()
    folder.remove_logs()
    os.write(2, f"the run was stopped by {signal.Signals(stop.signum).name} {how}\n".encode())
    os._exit(128 + stop.signum)


def stop_forkserver() -> None:
    """End the forkserver at once. It would end by itself, but not before its imports are done, and slowly."""
    from multiprocessing import forkserver, parent_process

    pid = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    if pid is not None and parent_process() is None:
        signal_rank(pid, signal.SIGKILL)


def signal_rank(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass
