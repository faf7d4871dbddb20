"""When the whole machine stood still.

A virtual machine may be given no time by its host, for tenths of a second and all cores at once; its own clocks,
those of processes too, run on. A process that every few milliseconds needs a core at once, before all others, sees
such stalls as gaps between its beats. `Stalls` starts one and subtracts what it saw: what is left is the time in
which this machine ran.

Real-time priority is needed, since else a gap may as well be a busy machine: without the right to it nothing is
subtracted, and `known` is false.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from itertools import accumulate, pairwise
from types import TracebackType
from typing import Self

BEAT_S = 0.002
STALL_S = 0.003  # a beat that comes later than this is a stall: waking up takes 0.1 ms


class Stalls:
    """Watches while the `with` block lasts. All times are those of `time.perf_counter`."""

    def __enter__(self) -> Self:
        self._file = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen([sys.executable, __file__], stdout=self._file)
        self._begins, self._ends = [], []
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()
        self._file.seek(0)
        lines = self._file.read().splitlines()
        self._file.close()
        self.known = lines[:1] == ["watching"]
        spans = [tuple(map(float, line.split())) for line in lines[1:]]
        self._begins, self._ends = [begin for begin, _ in spans], [end for _, end in spans]
        self._sums = [0.0, *accumulate(end - begin for begin, end in spans)]

    def ran(self, begin: float, seconds: float) -> float:
        """How much of the `seconds` from `begin` on this machine ran; call it after the block."""
        return seconds - (self._stood_until(begin + seconds) - self._stood_until(begin))

    def _stood_until(self, moment: float) -> float:
        """Seconds of stalls before `moment`."""
        whole = bisect_right(self._ends, moment)
        under_way = max(0.0, moment - self._begins[whole]) if whole < len(self._begins) else 0.0
        return self._sums[whole] + under_way


def watch() -> None:
    """Prints the begin and end of every stall, until it is ended."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return
    print("watching", flush=True)
    for last, now in pairwise(_beats()):
        if now - last > BEAT_S + STALL_S:
            print(last + BEAT_S, now, flush=True)


def _beats():
    while True:
        time.sleep(BEAT_S)
        yield time.perf_counter()


if __name__ == "__main__":
    watch()
