"""Which rank speaks where ranks fail that no launcher of evenly's watches: the first to fail, through their store.

Those that only lost it keep quiet. A rank that was killed says nothing; then the first of the others to notice speaks,
and which one it was is known to what has started them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from evenly.launcher.environment import restart_count

BETWEEN_LOOKS_S = 0.05
STORE_LIMIT = timedelta(seconds=5)  # of one that is gone


class LastWords:
    """What the ranks of one world say of its end in `store`. Methods raise `dist.DistError` where that is gone."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store = dist.PrefixStore(f"last words {restart_count()}", store)
        with suppress(RuntimeError):
            self._store.set_timeout(STORE_LIMIT)

    def speaks(self, text: str) -> bool:
        """Whether this rank is to say `text`: it is the first to fail, or the first has said something else."""
        first = self._store.compare_set("failed", "", f"{self.rank} {text}").decode()
        self._store.add("asked", 1)
        rank, _, said = first.partition(" ")
        return int(rank) == self.rank or said != text

    def anything_said(self, limit_s: float) -> bool:
        return _within(limit_s, lambda: self._store.check(["failed"]))

    def wait_for_others(self, limit_s: float) -> None:
        """Waits until all ranks have asked whether they speak, `limit_s` at most: of the one that has the store."""
        _within(limit_s, lambda: self._store.add("asked", 0) >= self.size)


def _within(limit_s: float, found: Callable[[], bool]) -> bool:
    until_s = time.monotonic() + limit_s
    while not found():
        if time.monotonic() > until_s:
            return False
        time.sleep(BETWEEN_LOOKS_S)
    return True
