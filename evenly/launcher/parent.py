"""A rank that another launcher has started ends where that launcher is gone, however it ended."""

from __future__ import annotations

import os
import signal
import threading
import time

LOOK_EVERY_S = 1.0


def end_with_parent() -> None:
    """Kills this process as soon as the one that has started it is gone; a thread looks."""
    threading.Thread(target=_watch, args=(os.getppid(),), name="parent watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY_S)
    os.write(2, b"evenly: this rank ends, since the process that has started it is gone\n")
    os.kill(os.getpid(), signal.SIGKILL)
