"""The flight recorder of a rank: its last operations and where it is now, in a file that survives the process.

A rank *enters* an operation (a collective, a send) and *leaves* it. Each is one *entry* of a ring buffer of `ENTRIES`.
It *ticks* whenever it gets on: with every microbatch, and where it enters or leaves an operation or a state.
A background thread writes a *heartbeat*: where the main thread is, and since when, as it last *looked*: with every beat
at one that stands still, now and then at one that gets on. Both go into a memory-mapped file:
writing costs microseconds and no system call, and the file stays readable after SIGKILL.

File: a header slot, then `ENTRIES` slots of `SLOT_BYTES`, little endian. Header: MAGIC, rank, time of the beat, since
when the main thread is where it is, ticks, longest step, length of a JSON text, the text (state, own_code, where).
Entry: serial (0 while it is being written), number in its group, entered, left (0 while inside), length, JSON of a
`CollectiveCall`. Times are `time.time()`.

Where the main thread is: the innermost function of the user's that has been running since the last tick, so that a loop
is named and not what it calls in turn.

Order: a `Recorder` is opened before its rank joins the others; `read` may be called by anyone at any moment.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

from evenly.errors import EVENLY, is_users
from evenly.observe.stacks import Place, StackReader, ThreadStack, place_text
from evenly.observe.timings import Timing

ENTRIES = 256
SLOT_BYTES = 640
BEAT_S = 0.5
LOOK_S = 4.0  # between two looks at a thread that gets on: one takes up to milliseconds, in which no other runs

MAGIC = b"evenly2\n"
_HEADER = struct.Struct("<8siddQdH")
_ENTRY = struct.Struct("<QQddH")
_SERIAL = struct.Struct("<Q")
_TIME = struct.Struct("<d")
_LEFT_AT = struct.calcsize("<QQd")
LONGEST_TEXT = SLOT_BYTES - _ENTRY.size
LONGEST_PLACE = 72  # letters, of which JSON makes up to 6 bytes each

# In "running" nobody can say how long it may take: the code between steps, building the model, the end.
State = Literal["running", "first step", "step", "evaluating", "saving", "ended"]

_COMMUNICATION = (str(Path(EVENLY, "comm")), str(Path(EVENLY, "observe")))


class CollectiveCall(NamedTuple):
    """One call of an operation: the arguments that must agree between the ranks of a group, and where it was called.

    group:  name and ranks of the group, as text.
    dtype:  of the tensor, '' where only some ranks know it.
    shape:  of the tensor, None for a length that may differ between ranks; None for all of it where only some know it.
    detail: root, kind of reduction and the like, which must agree.
    label:  what the tensor is, '' if unknown.
    where:  place in the code: function (file:line).
    """

    operation: str
    group: str
    dtype: str
    shape: tuple[int | None, ...] | None
    detail: str = ""
    label: str = ""
    where: str = ""

    def asked(self) -> str:
        """`all_reduce of float32 [3, 5], sum`: what must agree."""
        shape = "" if self.shape is None else f" [{', '.join('*' if n is None else str(n) for n in self.shape)}]"
        tensor = f" of {self.dtype}{shape}" if self.dtype else ""
        return f"{self.operation}{tensor}" + (f", {self.detail}" if self.detail else "")


@dataclass(frozen=True)
class Entry:
    """One operation of a rank: the `number`-th of its group. left_s is None while the rank is inside."""

    serial: int
    number: int
    entered_s: float
    left_s: float | None
    call: CollectiveCall


@dataclass(frozen=True)
class RankRecord:
    """The content of a rank's file. `entries` from oldest to newest.

    since_s:        since when the main thread is at `where` without getting on.
    ticks:          how often the rank has got on.
    longest_step_s: of the steps so far.
    in_own_code:    whether the main thread is in the user's code, and not in this package's below it.
    writing:        what a thread of its own writes, '' for nothing.
    """

    rank: int
    beat_s: float
    since_s: float
    where: str
    state: str
    entries: tuple[Entry, ...]
    ticks: int = 0
    longest_step_s: float = 0.0
    in_own_code: bool = False
    writing: str = ""


class Recorder:
    """Writes one rank's file. Safe for several threads; `close` stops the beat and leaves the file."""

    def __init__(self, path: Path, rank: int) -> None:
        self._rank, self._lock = rank, threading.Lock()
        with path.open("w+b") as file:
            # Room for all of it: a mapped file that the disk has no room for ends the process by SIGBUS.
            os.posix_fallocate(file.fileno(), 0, SLOT_BYTES * (ENTRIES + 1))
            self._memory = mmap.mmap(file.fileno(), 0)
        self._serial = self._ticks = 0
        self._state: State = "running"
        self._longest_step_s = 0.0
        self.waited_s = 0.0  # for other ranks, in all
        self.timings: dict[int, Timing] | None = None  # by serial; None at any time: another thread may end them
        self.writing = ""  # what a thread of its own writes: a short name
        self._since_s = time.time()
        self._beat("starting", "running")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, name="evenly beat", daemon=True)
        self._thread.start()

    def enter(self, number: int, text: bytes) -> int:
        """Notes that the rank begins the `number`-th operation of its group; returns the serial for `leave`.

        text: of the call, by `call_text`.
        """
        with self._lock:
            self._serial += 1
            start = _start(self._serial)
            memory = self._memory
            _ENTRY.pack_into(memory, start, 0, number, time.time(), 0.0, len(text))  # no entry while it is written
            memory[start + _ENTRY.size : start + _ENTRY.size + len(text)] = text
            _SERIAL.pack_into(memory, start, self._serial)  # last: a reader takes no half-written entry
            self._ticks += 1
            return self._serial

    def leave(self, serial: int, waited_from_s: float | None = None) -> None:
        """Notes the end of an operation, unless newer ones have taken its slot already.

        waited_from_s: since when the rank has waited for it (`time.perf_counter`); by default since it was entered.
        """
        if self._serial - serial < ENTRIES:
            _TIME.pack_into(self._memory, _start(serial) + _LEFT_AT, time.time())
        if (timings := self.timings) is not None and (timing := timings.get(serial)) is not None:
            timing.waited_from_s = timing.begin_s if waited_from_s is None else waited_from_s
            timing.ended_s = time.perf_counter()
        self._ticks += 1

    def time_operations(self) -> None:
        """From here to `timed` it is noted when operations are under way, which costs more."""
        self.timings = self.timings or {}

    def timed(self) -> list[Timing]:
        """The operations since `time_operations`, in order; ends it."""
        found, self.timings = self.timings or {}, None
        return [*found.values()]

    def tick(self) -> None:
        """Notes that the rank gets on."""
        self._ticks += 1

    @contextmanager
    def during(self, state: State) -> Generator[None]:
        """Within, the rank is in `state`."""
        before, began_s = self._state, time.monotonic()
        self._state = state
        self._ticks += 1
        try:
            yield
        finally:
            self._state = before
            self._ticks += 1
            if state in ("first step", "step"):
                self._longest_step_s = max(self._longest_step_s, time.monotonic() - began_s)

    def close(self) -> None:
        """Records that the rank has ended; safe to call twice."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            self._beat("", "ended")

    def _keep_beating(self) -> None:
        main, reader = threading.main_thread().ident, StackReader()
        standing, ticks, looked_s, where, own_code = UserStack(()), -1, -LOOK_S, "", False
        while not self._closed.wait(BEAT_S):
            moved, ticks = ticks != self._ticks, self._ticks
            if moved:
                standing, own_code, self._since_s = UserStack(()), False, time.time()
            if not moved or time.monotonic() - looked_s >= LOOK_S:
                looked_s = time.monotonic()
                stack = reader.read(main) or ThreadStack(0, ())
                standing = self._still(standing, UserStack.of(stack))
                where = next(map(str, (*standing.places[-1:], *stack.places[:1])), "")
                own_code = own_code_runs(stack.places)
            self._beat(where, self._state, own_code)
        reader.close()

    def _still(self, before: UserStack, now: UserStack) -> UserStack:
        """What of `before` still runs, or `now` where that is nothing."""
        common = before.common(now)
        if before.places and not common.places:
            self._since_s = time.time()
        return common if common.places else now

    def _beat(self, where: str, state: State, own_code: bool = False) -> None:
        where = where if len(where) <= LONGEST_PLACE else f"...{where[3 - LONGEST_PLACE :]}"  # the line comes last
        text = _encoded({"state": state, "own_code": own_code, "writing": self.writing, "where": where})
        _HEADER.pack_into(
            self._memory, 0, MAGIC, self._rank, time.time(), self._since_s, self._ticks, self._longest_step_s, len(text)
        )
        self._memory[_HEADER.size : _HEADER.size + len(text)] = text


def read(path: Path) -> RankRecord | None:
    """Reads a recorder's file; None if it is incomplete or damaged."""
    try:
        memory = path.read_bytes()
        header = _header(memory)
        entries = [entry for slot in range(1, ENTRIES + 1) if (entry := _entry(memory, slot * SLOT_BYTES))]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, struct.error):
        return None
    return None if header is None else replace(header, entries=tuple(sorted(entries, key=lambda e: e.serial)))


def glance(path: Path) -> RankRecord | None:
    try:
        with path.open("rb") as file:
            return _header(file.read(SLOT_BYTES))
    except (OSError, ValueError, KeyError, TypeError, RecursionError, struct.error):
        return None


def _header(memory: bytes) -> RankRecord | None:
    magic, rank, beat_s, since_s, ticks, longest_step_s, length = _HEADER.unpack_from(memory)
    if magic != MAGIC:
        return None
    values: dict[str, Any] = json.loads(memory[_HEADER.size : _HEADER.size + length])
    where, state = str(values["where"]), str(values["state"])
    own_code, writing = bool(values["own_code"]), str(values["writing"])
    return RankRecord(rank, beat_s, since_s, where, state, (), ticks, longest_step_s, own_code, writing)


def _entry(memory: bytes, start: int) -> Entry | None:
    serial, number, entered_s, left_s, length = _ENTRY.unpack_from(memory, start)
    if serial == 0:
        return None
    call = call_from(memory[start + _ENTRY.size : start + _ENTRY.size + length])
    return Entry(serial, number, entered_s, left_s or None, call)


def call_from(text: bytes) -> CollectiveCall:
    """The call of `call_text`. Raises `ValueError`, `TypeError` or `KeyError` for another text."""
    fields: dict[str, Any] = json.loads(text)
    shape = fields.pop("shape")
    return CollectiveCall(**fields, shape=None if shape is None else tuple(shape))


@lru_cache(maxsize=1024)
def call_text(*call: Any) -> bytes:
    """A `CollectiveCall`, its fields one by one, as JSON of at most `LONGEST_TEXT` bytes; long words are cut."""
    fields = CollectiveCall(*call)._asdict()
    text = _encoded(fields)
    for letters in (60, 15):
        for word in ("label", "where", "detail", "shape", "group"):
            if len(text) <= LONGEST_TEXT:
                return text
            fields[word] = None if word == "shape" else fields[word][:letters]
            text = _encoded(fields)
    return text


def _encoded(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode(errors="replace")


def _start(serial: int) -> int:
    return SLOT_BYTES * (1 + serial % ENTRIES)


# ---------------------------------------------------------------------------------- places in the code
_users: dict[str, bool] = {}  # file -> whether it is the user's


def own_code_runs(places: Sequence[Place]) -> bool:
    """Whether the user's code runs at `places`, innermost first: it or a library that it has called, and not this
    package.
    """
    for place in places:
        if place.file.startswith(EVENLY):
            return False
        if is_users(place.file):
            return True
    return False


class UserStack(NamedTuple):
    """The user's functions on the stack of a thread, from outside to inside. cut: outer ones may not be seen."""

    places: tuple[Place, ...]
    cut: bool = False

    @classmethod
    def of(cls, stack: ThreadStack) -> UserStack:
        return cls(tuple(place for place in reversed(stack.places) if is_users(place.file)), stack.cut)

    def common(self, other: UserStack) -> UserStack:
        """The outer functions that are the same, called on the same lines; all, as far as they cannot be seen."""
        if other.cut:
            return self
        depth = 0
        for mine, its in zip(self.places, other.places, strict=False):
            if mine[:2] != its[:2] or (depth and self.places[depth - 1] != other.places[depth - 1]):
                break
            depth += 1
        return UserStack(other.places[:depth])


def frame_place(frame: FrameType | None) -> str:
    """`Lines.__getitem__ (data.py:31)`; '' without a frame."""
    if frame is None:
        return ""
    return place_text(frame.f_code.co_filename, frame.f_code.co_qualname, frame.f_lineno)


def here() -> str:
    """The place in the user's code that led to this call; without one, the caller of the communication layer."""
    frame = caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:  # out of this package and of libraries
        file = frame.f_code.co_filename
        users = _users.get(file)
        if users is None:
            users = _users[file] = is_users(file)
        if users:
            break
        frame = frame.f_back
    if frame is None:
        frame = caller
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_COMMUNICATION):
            frame = frame.f_back
    return place_text(frame.f_code.co_filename, frame.f_code.co_qualname, frame.f_lineno)
