"""Whether all nodes see one folder: one of them marks it, and the others look for the mark."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

SEEN_LIMIT_S = 10.0  # for a file of one node to be seen on another


def put_mark(folder: Path, token: str) -> Path:
    """Makes `folder`, and a file in it that all nodes have to see; who has made it removes it."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / f".nodes-{token}"
    mark.touch()
    return mark


def sees_mark(mark: Path) -> bool:
    """Whether this node sees the file, or does so before long."""
    until_s = time.monotonic() + SEEN_LIMIT_S
    while True:
        with suppress(OSError):
            list(mark.parent.iterdir())  # has a distant file system look again
            if mark.exists():
                return True
        if time.monotonic() > until_s:
            return False
        time.sleep(0.2)
