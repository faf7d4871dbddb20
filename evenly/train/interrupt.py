"""A stop request from outside (Ctrl-C, or the end of an allocation), honoured between two steps.

The signal only sets a flag. Ranks receive it at different times, so the flag is reduced with the next step's totals,
and all stop after the same step.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Handles SIGINT and SIGTERM until `close`; a second signal, at least a second later, stops at once.

    was_asked: the signal by which a stop was requested in this process, 0 without one.
    """

    was_asked = 0

    def __init__(self) -> None:
        self._asked_at: float | None = None
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}

    def close(self) -> None:
        """Restores the signal handlers; safe to call twice."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @property
    def asked(self) -> bool:
        """Whether a stop was requested in this process."""
        return self._asked_at is not None

    def _ask(self, number: int, _: Any) -> None:
        # A terminal and the launcher may both deliver the same Ctrl-C.
        if self._asked_at is not None and time.monotonic() - self._asked_at > 1:
            raise KeyboardInterrupt
        self._asked_at = self._asked_at or time.monotonic()
        Interrupt.was_asked = number
