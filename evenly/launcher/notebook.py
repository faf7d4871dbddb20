"""Launching from a notebook: its cells are no terminal, and no file that ranks could import.

What rank 0 prints goes to its log, and from there to the cell: a kernel's standard output does not end in a file
descriptor that ranks could have.
"""

from __future__ import annotations

import codecs
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

LOOK_EVERY_S = 0.1


def in_notebook() -> bool:
    kernelapp = sys.modules.get("ipykernel.kernelapp")
    return kernelapp is not None and bool(kernelapp.IPKernelApp.initialized())


@contextmanager
def followed(log: Path) -> Generator[None]:
    """Within, what is added to the file `log` is printed as well, soon; all of it when it ends."""
    ended = threading.Event()
    begin = log.stat().st_size if log.exists() else 0
    thread = threading.Thread(target=_follow, args=(log, begin, ended), name="evenly-output", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _follow(log: Path, begin: int, ended: threading.Event) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # an encoded character may be there in part
    at, last = begin, False
    while not last:
        last = ended.wait(LOOK_EVERY_S)
        if not log.exists():
            continue
        with log.open("rb") as file:
            file.seek(at)
            written = file.read()
        at += len(written)
        if text := decoder.decode(written, last):
            print(text, end="", flush=True)
