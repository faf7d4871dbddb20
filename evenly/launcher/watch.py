"""Watching the ranks of a launch: who waits, for whom, and for how long.

A thread of the launcher reads what the ranks record. When one has stood still for longer than it may and the records
show who is the cause, the stacks of all ranks are written to the logs, the cause is kept as `diagnosis`, and all ranks
are ended. Waiting that the records do not explain is left to the time limit of the backend: ranks of other nodes cannot
be seen from here.

A rank that ends before the others' run does is a failure too, whatever its exit code: torch's agent takes 0 for success
and waits for the others, which wait for the one that left. It is kept as `left`.
"""

from __future__ import annotations

import multiprocessing.process
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from evenly.errors import is_users
from evenly.launcher.rank import LaunchFolder, RankExit, describe_exit, end_rank
from evenly.observe.diagnosis import Diagnosis
from evenly.observe.recorder import RankRecord
from evenly.observe.stacks import stacks_in
from evenly.observe.stalls import Standstills, explain_stall

BETWEEN_LOOKS_S = 0.5
BETWEEN_KILLS_S = 0.2
LEFT_S = 1.5  # for the agent to see the end of a rank that has failed
STACKS_TIMEOUT_S = 1.0  # of one process
AGENT_TIMEOUT_S = 60.0  # for the agent to see that a rank has died, which ends the launch


@dataclass
class Orders:
    """What a run on several nodes asks of the ranks of one.

    pause: to save and return where a checkpoint is due. end: to be ended at once.
    """

    pause: bool = False
    end: bool = False


class Watch:
    """Watches the ranks, in a thread, while the `with` block lasts.

    limit_s: how long a rank may stand still; None: by what it does, see `evenly.observe.stalls`. orders: for the ranks.
    """

    def __init__(self, folder: LaunchFolder, limit_s: float | None, orders: Orders | None = None) -> None:
        self._folder, self._standstills, self._orders = folder, Standstills(limit_s), orders or Orders()
        self._looked_s = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="evenly watch", daemon=True)
        self._processes: dict[int, BaseProcess] = {}  # by process id
        self._first_seen_s: dict[tuple[int, str], float] = {}  # ended without an error, while the agent ended none
        self.diagnosis: Diagnosis | None = None
        self.left: RankExit | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while self.diagnosis is None and self.left is None and not self._over.wait(BETWEEN_LOOKS_S):
            if self._orders.end:
                self._end_ranks()
                return
            if self._orders.pause:
                self._folder.ask_to_pause()
            self._end_if_one_left()
            if self._overdue(self._folder.glances()):
                self._act()

    def _overdue(self, records: list[RankRecord]) -> dict[int, float]:
        """Looks at `records`: the ranks that have stood still too long, with the seconds."""
        now_s = time.monotonic()
        self._standstills.look(records, now_s - self._looked_s)
        self._looked_s = now_s
        return self._standstills.overdue(records)

    @property
    def gone(self) -> RankExit | None:
        """How the first rank has ended that was seen to be gone before the agent had ended any; for when all have."""
        if self.left is not None:
            return self._as_it_ended(self.left)
        first = min(self._first_seen_s, key=self._first_seen_s.__getitem__, default=None)
        return None if first is None else self._as_it_ended(_left(*first))

    def _as_it_ended(self, seen: RankExit) -> RankExit:
        """`seen`, unless its exit code, which the agent is late to read on a busy machine, was not 0."""
        process = self._processes.get(self._folder.pids().get(seen.rank, 0))
        if process is None or not process.exitcode or seen.rank in self._folder.done():  # that one was ended from here
            return seen
        return describe_exit(seen.rank, process.exitcode)

    def _end_if_one_left(self) -> None:
        """Ends all ranks where one has ended, and the others cannot come to an end without it."""
        failing, pids, now_s = self._folder.failing(), self._folder.pids(), time.monotonic()
        # active_children() would read exit codes, which the agent does at the same time.
        self._processes |= {child.pid or 0: child for child in list(multiprocessing.process._children)}  # pyright: ignore
        if not all(_lives(pids.get(rank, 0)) for rank in failing):
            return  # the agent ends the others
        for rank, found in who_left(self._folder):
            if now_s - self._first_seen_s.setdefault((rank, found), now_s) < LEFT_S or failing:
                continue
            self.left = _left(rank, found)
            self._end_ranks()
            return

    def _end_ranks(self) -> None:
        """Kills all ranks, also those that are starting, and sees that the agent notices."""
        until_s = time.monotonic() + LEFT_S
        while time.monotonic() < until_s:
            for pid in self._folder.pids().values():
                end_rank(pid)
            if self._over.wait(BETWEEN_KILLS_S):
                return
        os.kill(os.getpid(), signal.SIGQUIT)  # none was there to be ended, and the agent waits for a result

    def _act(self) -> None:
        if self._diagnosis(self._folder.records()) is None:
            return
        if self._any_died() and self._over.wait(AGENT_TIMEOUT_S):
            return
        save_stacks(self._folder)
        # Read the records again: on a busy machine the ranks may have gone on meanwhile, or their heartbeat was late.
        records = self._folder.records()
        diagnosis = self._diagnosis(records)
        if diagnosis is None:
            return
        seen = {record.rank: record.where for record in records}
        elsewhere = [
            f"; rank {rank} also has a thread or data worker in {', '.join(places)}"
            for rank in diagnosis.ranks
            if (places := users_places(self._folder.stacks(rank), besides=seen.get(rank, "")))
        ]
        self.diagnosis = replace(diagnosis, text=diagnosis.text + "".join(elsewhere))
        for pid in self._folder.pids().values():
            end_rank(pid)

    def _diagnosis(self, records: list[RankRecord]) -> Diagnosis | None:
        """Also None if a rank has failed: the launcher ends the others and reports its error."""
        overdue = self._overdue(records)
        if self._folder.failing() or not overdue:
            return None
        stopped = {rank for rank, pid in self._folder.pids().items() if _status(pid) == psutil.STATUS_STOPPED}
        return explain_stall(records, overdue, self._standstills.silent(overdue), stopped, now_s=time.time())

    def _any_died(self) -> bool:
        ended = {record.rank for record in self._folder.records() if record.state == "ended"}
        return any(rank not in ended and not _lives(pid) for rank, pid in self._folder.pids().items())


def who_left(folder: LaunchFolder) -> Iterator[tuple[int, str]]:
    """Ranks that have ended and are missed, with what was found."""
    done, pids = folder.done(), folder.pids()
    for rank, pid in pids.items():
        if rank not in done and not _lives(pid):
            yield rank, "it ended with exit code 0 before the run had ended"
    joined = {record.rank for record in folder.records()} if done else set[int]()
    if waiting := joined - done:
        for rank in sorted(done - joined):
            yield rank, f"its function returned before it had joined the run of rank {min(waiting)}"


def _left(rank: int, found: str) -> RankExit:
    do = "look for sys.exit and os._exit in the job; let all ranks leave its loop together"
    return RankExit(rank=rank, time_s=time.time(), kind="error", found=found, do=do)


def _lives(pid: int) -> bool:
    return _status(pid) not in (psutil.STATUS_ZOMBIE, "")


def _status(pid: int) -> str:
    """The state of a process, by psutil's words; '' where there is none."""
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return ""


def save_stacks(folder: LaunchFolder) -> None:
    """Asks every rank, with its data workers, for the stacks of its threads, and puts them next to the logs."""
    for rank, pid in folder.pids().items():
        try:
            processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            for process in processes:  # one after the other: they write into one file
                if process.pid == pid or _listens(process.pid):
                    before = folder.stacks(rank)
                    process.send_signal(signal.SIGUSR1)
                    _wait_for_more(folder, rank, before)
        except psutil.NoSuchProcess:
            continue
        if folder.stacks(rank):
            shutil.copy(folder.stack_file(rank), folder.logs / f"rank{rank}.stacks")


def _wait_for_more(folder: LaunchFolder, rank: int, before: str) -> None:
    """Waits until a dump has been written completely."""
    deadline, last = time.monotonic() + STACKS_TIMEOUT_S, before
    while time.monotonic() < deadline:
        time.sleep(0.05)
        stacks = folder.stacks(rank)
        if stacks == last and stacks != before:
            return
        last = stacks


def _listens(pid: int) -> bool:
    """Whether a process handles SIGUSR1, which would end it otherwise; Linux only."""
    try:
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def users_places(stacks: str, *, besides: str) -> list[str]:
    """The innermost place in the user's code of every thread in a dump by faulthandler, but for `besides`."""
    places: dict[str, None] = {}
    for stack in stacks_in(stacks):
        if (place := next((one for one in stack.places if is_users(one.file)), None)) is not None:
            places[str(place)] = None
    return [place for place in places if _function(place) != _function(besides)]


def _function(place: str) -> tuple[str, str]:
    """Function and file of `Lines.__getitem__ (data.py:31)`; the line moves between two looks."""
    function, _, rest = place.partition(" (")
    return function.rpartition(".")[2], rest.partition(":")[0]
