"""Where the threads of this process are, read by one of them without touching the frames of the others.

`faulthandler` writes the stacks of all threads from C, at one moment, and makes no frame object. A frame object of
another thread's frame (`sys._current_frames`, `f_back`) changes how that frame is ended: a thread that walked the
frames of one in which `torch.compile` evaluates code has ended the process.

Of a stack there are the 100 innermost frames, as `faulthandler` is built; of each the file, the function and the line.
"""

from __future__ import annotations

import faulthandler
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+).*\n((?:  .*\n?)*)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_LEFT_OUT = re.compile(r"^  \.\.\.$", re.MULTILINE)
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")


class Place(NamedTuple):
    """A function on a stack, and the line that it is at."""

    file: str
    function: str
    line: int

    def __str__(self) -> str:
        """`train (train.py:88)`."""
        return place_text(self.file, self.function, self.line)


class ThreadStack(NamedTuple):
    """The places of thread `ident`, innermost first. cut: whether there are outer ones besides."""

    ident: int
    places: tuple[Place, ...]
    cut: bool = False


class StackReader:
    """Reads the stack of a thread of this process; `close` gives the memory for that back."""

    def __init__(self) -> None:
        self._file = os.memfd_create("evenly stacks")

    def read(self, ident: int | None) -> ThreadStack | None:
        """The stack of thread `ident`; None where it has none."""
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        faulthandler.dump_traceback(self._file, all_threads=True)
        text = os.pread(self._file, os.fstat(self._file).st_size, 0).decode(errors="replace")
        return next((stack for stack in stacks_in(text) if stack.ident == ident), None)

    def close(self) -> None:
        os.close(self._file)


def stacks_in(text: str) -> list[ThreadStack]:
    return [
        ThreadStack(
            int(ident, 16),
            tuple(Place(_plain(file), _plain(name), int(line)) for file, line, name in _FRAME.findall(block)),
            _LEFT_OUT.search(block) is not None,
        )
        for ident, block in _THREAD.findall(text)
    ]


def _plain(text: str) -> str:
    """Letters that are not ASCII are written as `\\xe4`."""
    return _ESCAPED.sub(lambda found: chr(int(found[1] or found[2] or found[3], 16)), text) if "\\" in text else text


@lru_cache(maxsize=4096)  # operations of a step come from the same places every time
def place_text(file: str, function: str, line: int) -> str:
    """`Lines.__getitem__ (data.py:31)`; of a module's own code `data.py:31`."""
    place = f"{Path(file).name}:{line}"
    return place if function == "<module>" else f"{function.replace('<locals>.', '')} ({place})"
