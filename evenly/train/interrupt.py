"""A stop asked for from outside (Ctrl-C, or the end of an allocation), taken up between two steps.

The signal only sets a flag. Ranks receive it at different moments, so the flag travels with the next step's sum
over ranks, and all stop after the same step.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Listens from its creation until `close`; asking again after a second stops at once.

    was_asked: whether any was, in this process.
    """

    was_asked = False

    def __init__(self) -> None:
        self._asked_at: float | None = None
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}

    def close(self) -> None:
        """Gives the signals back; safe to call twice."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @property
    def asked(self) -> bool:
        """Whether this process was asked to stop."""
        return self._asked_at is not None

    def _ask(self, number: int, _: Any) -> None:
        # A terminal and the launcher may both deliver the same Ctrl-C.
        if self._asked_at is not None and time.monotonic() - self._asked_at > 1:
            raise KeyboardInterrupt
        self._asked_at = self._asked_at or time.monotonic()
        Interrupt.was_asked = True
