"""Ranks that are steadily slower than the others in what they compute themselves. Pure: the times of steps in.

A rank is compared with those that do the same: at one position of the pipeline. Its time is that of its own forwards
and backwards, without waiting for others, per unit of work, so that uneven shares are no slowness. Steps are taken
together to spans of `SPAN_S`: on a busy machine now one core is slower for a moment and now another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

SPAN_S, SPANS = 0.5, 20
SLOWER = 1.3  # than the median of the others, in the median of the spans
ALWAYS = 0.9  # of the spans, in which it is slower by at least half of that


class SlowRank(NamedTuple):
    """rank: by its number. ratio: of its time to that of the others."""

    rank: int
    ratio: float

    def __str__(self) -> str:
        return f"rank {self.rank} is slow: its own computing takes {self.ratio:.1f} x as long as that of the others"


class SlowRanks:
    """Takes the times of one step after another; names a rank once.

    alike: of each rank, a number that those have in common which do the same.
    """

    def __init__(self, alike: Sequence[int]) -> None:
        self._others = [
            [other for other, its in enumerate(alike) if its == mine and other != rank]
            for rank, mine in enumerate(alike)
        ]
        self._spans: deque[list[float]] = deque(maxlen=SPANS)
        self._span, self._began_s = [0.0] * len(alike), 0.0
        self._named: set[int] = set()

    def add(self, own_s: Sequence[float], clock_s: float) -> list[SlowRank]:
        """Those found with this step, which ended at `clock_s`.

        own_s: of each rank, seconds per unit of work, 0 where it is not known.
        """
        self._span = [sum(pair) for pair in zip(self._span, own_s, strict=True)]
        if clock_s - self._began_s < SPAN_S:
            return []
        self._spans.append(self._span)
        self._span, self._began_s = [0.0] * len(own_s), clock_s
        if len(self._spans) < SPANS:
            return []
        found = [slow for rank in range(len(own_s)) if rank not in self._named and (slow := self._look(rank))]
        self._named.update(slow.rank for slow in found)
        return found

    def _look(self, rank: int) -> SlowRank | None:
        ratios: list[float] = []
        for own_s in self._spans:
            others = [own_s[other] for other in self._others[rank] if own_s[other] > 0]
            if not others or own_s[rank] <= 0:
                return None
            ratios.append(own_s[rank] / median(others))
        steady = sum(ratio > (1 + SLOWER) / 2 for ratio in ratios) >= ALWAYS * len(ratios)
        return SlowRank(rank, median(ratios)) if steady and median(ratios) > SLOWER else None
