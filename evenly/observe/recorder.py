"""The flight recorder of a rank: its last operations and where it is now, in a file that survives the process.

A rank *enters* an operation (a collective, a send) and *leaves* it. Each is one *entry* of a ring buffer of `ENTRIES`.
A background thread writes a *heartbeat*: where the main thread is, and since when. Both go into a memory-mapped file:
writing costs microseconds and no system call, and the file stays readable after SIGKILL.

File: a header slot, then `ENTRIES` slots of `SLOT_BYTES`, little endian. Header: MAGIC, rank, time of the beat, since
when the main thread is where it is, length of a JSON text, the text (`where`, `state`). Entry: serial (0 while it is
being written), number in its group, entered, left (0 while inside), length, JSON of a `CollectiveCall`. Times are
`time.time()`.

Order: a `Recorder` is opened before its rank joins the others; `read` may be called by anyone at any moment.
"""

from __future__ import annotations

import json
import mmap
import struct
import sys
import threading
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from evenly.errors import EVENLY, is_users

ENTRIES = 256
SLOT_BYTES = 640
BEAT_S = 0.5

MAGIC = b"evenly1\n"
_HEADER = struct.Struct("<8siddH")
_ENTRY = struct.Struct("<QQddH")
_TIME = struct.Struct("<d")
_LEFT_AT = struct.calcsize("<QQd")
LONGEST_TEXT = SLOT_BYTES - _ENTRY.size

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
    """The content of a rank's file. `entries` from oldest to newest; `state` is 'running' or 'ended'."""

    rank: int
    beat_s: float
    since_s: float
    where: str
    state: str
    entries: tuple[Entry, ...]


class Recorder:
    """Writes one rank's file. Safe for several threads; `close` stops the beat and leaves the file."""

    def __init__(self, path: Path, rank: int) -> None:
        self._rank, self._lock = rank, threading.Lock()
        with path.open("w+b") as file:
            file.truncate(SLOT_BYTES * (ENTRIES + 1))
            self._memory = mmap.mmap(file.fileno(), 0)
        self._serial = 0
        self._frame, self._since_s = 0, time.time()
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
            _ENTRY.pack_into(memory, start, 0, number, time.time(), 0.0, len(text))
            memory[start + _ENTRY.size : start + _ENTRY.size + len(text)] = text
            struct.pack_into("<Q", memory, start, self._serial)  # last: a reader takes no half-written entry
            return self._serial

    def leave(self, serial: int) -> None:
        """Notes the end of an operation, unless newer ones have taken its slot already."""
        if self._serial - serial < ENTRIES:
            _TIME.pack_into(self._memory, _start(serial) + _LEFT_AT, time.time())

    def close(self) -> None:
        """Records that the rank has ended; safe to call twice."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            self._beat("", "ended")

    def _keep_beating(self) -> None:
        main = threading.main_thread().ident
        while not self._closed.wait(BEAT_S):
            frame = sys._current_frames().get(main or 0)  # pyright: ignore[reportPrivateUsage]
            frame = users_frame(frame) or frame
            if id(frame) != self._frame:
                self._frame, self._since_s = id(frame), time.time()
            self._beat(frame_place(frame), "running")
            del frame  # it keeps its locals alive

    def _beat(self, where: str, state: str) -> None:
        text = json.dumps({"where": where, "state": state}).encode()[: SLOT_BYTES - _HEADER.size]
        _HEADER.pack_into(self._memory, 0, MAGIC, self._rank, time.time(), self._since_s, len(text))
        self._memory[_HEADER.size : _HEADER.size + len(text)] = text


def read(path: Path) -> RankRecord | None:
    """Reads a recorder's file; None if it is incomplete or damaged."""
    try:
        memory = path.read_bytes()
        magic, rank, beat_s, since_s, length = _HEADER.unpack_from(memory)
        values: dict[str, str] = json.loads(memory[_HEADER.size : _HEADER.size + length])
        entries = [entry for slot in range(1, ENTRIES + 1) if (entry := _entry(memory, slot * SLOT_BYTES))]
        if magic != MAGIC:
            return None
        return RankRecord(
            rank, beat_s, since_s, values["where"], values["state"], tuple(sorted(entries, key=lambda e: e.serial))
        )
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None


def waits_since_s(path: Path) -> float | None:
    """When the rank of a file entered the oldest operation that it is in; None where it is in none. Reads no texts."""
    try:
        memory = path.read_bytes()
        heads = [_ENTRY.unpack_from(memory, slot * SLOT_BYTES) for slot in range(1, ENTRIES + 1)]
    except (OSError, struct.error):
        return None
    return min((entered_s for serial, _, entered_s, left_s, _ in heads if serial and not left_s), default=None)


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
def call_text(call: CollectiveCall) -> bytes:
    """`call` as JSON of at most `LONGEST_TEXT` bytes; long words are cut."""
    fields = call._asdict()
    text = json.dumps(fields).encode()
    for word in ("label", "where", "detail", "shape", "group"):
        if len(text) <= LONGEST_TEXT:
            break
        fields[word] = None if word == "shape" else fields[word][:60]
        text = json.dumps(fields).encode()
    return text


def _start(serial: int) -> int:
    return SLOT_BYTES * (1 + serial % ENTRIES)


# ---------------------------------------------------------------------------------- places in the code
def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is neither in this package nor in a library, or None."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def frame_place(frame: FrameType | None) -> str:
    """`Lines.__getitem__ (data.py:31)`; '' without a frame."""
    if frame is None:
        return ""
    code = frame.f_code
    return _place(code.co_filename, code.co_qualname, frame.f_lineno)


@lru_cache(maxsize=4096)
def _place(filename: str, function: str, line: int) -> str:
    place = f"{Path(filename).name}:{line}"
    return place if function == "<module>" else f"{function.replace('<locals>.', '')} ({place})"


def here() -> str:
    """The place in the user's code that led to this call; without one, the caller of the communication layer."""
    caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    frame = users_frame(caller)
    if frame is None:
        frame = caller
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_COMMUNICATION):
            frame = frame.f_back
    return frame_place(frame)
