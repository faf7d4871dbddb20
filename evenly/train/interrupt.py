"""A stop request from outside (Ctrl-C, or the end of an allocation), honoured between two steps.

The signal only sets a flag. Ranks receive it at different times, so the flag is reduced with the next step's totals,
and all stop after the same step. Whether the launcher asks for a pause, since a node has come, is looked at where a
checkpoint is due.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

from evenly.launcher.environment import pause_asked

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Handles SIGINT and SIGTERM from `begin` to `close`; a second signal, at least a second later, stops at once.

    Before the first step there is nothing to save: a signal ends the process as it ends any.

    was_asked: the signal by which a stop was requested in this process, ELSEWHERE where it was in another, else 0.
    """

    was_asked = 0
    ELSEWHERE = -1

    def __init__(self) -> None:
        self._asked_at: float | None = None
        self._before: dict[signal.Signals, Any] = {}

    def begin(self) -> None:
        """Handle the signals from now on; does nothing where it does."""
        if not self._before and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}

    def close(self) -> None:
        """Restores the signal handlers; safe to call twice."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @property
    def asked(self) -> bool:
        return self._asked_at is not None

    def asked_at(self, *, saving: bool) -> bool:
        """Whether this process stops after a step; saving: whether a checkpoint is due after it."""
        return self.asked or (saving and pause_asked())

    def note_stop(self, *, early: bool) -> None:
        """Notes whether all ranks stop early, for the launcher: perhaps nobody asked for it here."""
        Interrupt.was_asked = Interrupt.was_asked or (self.ELSEWHERE if early else 0)

    def _ask(self, number: int, _: Any) -> None:
        # A terminal and the launcher may both deliver the same Ctrl-C.
        if self._asked_at is not None and time.monotonic() - self._asked_at > 1:
            raise KeyboardInterrupt
        self._asked_at = self._asked_at or time.monotonic()
        Interrupt.was_asked = number
