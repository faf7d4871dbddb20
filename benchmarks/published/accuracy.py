"""Figures of accuracy from pairs of what was predicted and what was measured. Pure.

An *error* is |predicted / measured - 1|; a *bias* is exp(mean log(predicted / measured)) - 1, which twice too much and
half too little leave at 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

LEAST_ROWS = 3  # of a sweep: two rows are either right or wrong


@dataclass(frozen=True)
class Pair:
    """A prediction and its measurement, in the same unit, both above 0."""

    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Signed, as a fraction: 0.1 where the prediction is a tenth too high."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Fractions, None of no rows. p90: the error that nine tenths of the rows stay below."""

    rows: int
    median: float | None = None
    p90: float | None = None
    bias: float | None = None


def accuracy(pairs: Sequence[Pair]) -> Accuracy:
    """Of all pairs alike."""
    if not pairs:
        return Accuracy(rows=0)
    errors = [abs(pair.error) for pair in pairs]
    bias = math.exp(fmean(math.log(pair.predicted / pair.measured) for pair in pairs)) - 1
    return Accuracy(rows=len(pairs), median=quantile(errors, 0.5), p90=quantile(errors, 0.9), bias=bias)


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between the nearest two of the sorted values, as numpy.quantile has it."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def ranks(values: Sequence[float]) -> list[float]:
    """From 1; equal values share the mean of their places."""
    ordered = sorted(values)
    first = {value: place for place, value in reversed(list(enumerate(ordered, 1)))}
    last = {value: place for place, value in enumerate(ordered, 1)}
    return [(first[value] + last[value]) / 2 for value in values]


def spearman(pairs: Sequence[Pair]) -> float | None:
    """Rank correlation, -1 to 1; None of fewer than 3 pairs, or where either side is all equal."""
    if len(pairs) < LEAST_ROWS:
        return None
    return _correlation(ranks([pair.predicted for pair in pairs]), ranks([pair.measured for pair in pairs]))


def within_sweeps(sweeps: Iterable[Sequence[Pair]]) -> tuple[float | None, int]:
    """The rank correlation within each sweep, as a mean weighted by rows; and how many sweeps have one."""
    found = [(len(sweep), value) for sweep in sweeps if (value := spearman(sweep)) is not None]
    rows = sum(count for count, _ in found)
    return (sum(count * value for count, value in found) / rows if rows else None), len(found)


def _correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    dx, dy = ([value - fmean(values) for value in values] for values in (x, y))
    spread = math.sqrt(sum(d * d for d in dx) * sum(d * d for d in dy))
    return sum(a * b for a, b in zip(dx, dy, strict=True)) / spread if spread else None
