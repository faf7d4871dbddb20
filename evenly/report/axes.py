"""The axes of pictures: which values they span, with which unit, and where their ticks are. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

TICKS = 5
ROUNDING = 1e-6  # of a value: what differs by no more lies on one line, and no axis is zoomed to that
ROOM = 0.05  # of an axis, above and below what is drawn: marks and lines at its edges are seen whole
Number = float | int | None
BYTES = tuple((2.0 ** (10 * power), unit) for power, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB")))
SECONDS = ((1e-6, "us"), (1e-3, "ms"), (1.0, "s"))
Units = Sequence[tuple[float, str]]


@dataclass(frozen=True)
class ChartAxis:
    """The values from `low` to `high`, which differ; shown divided by `scale`, with `unit` behind.

    log: whether distances are those of logarithms; `low` is above 0 then.
    """

    low: float
    high: float
    title: str = ""
    scale: float = 1.0
    unit: str = ""
    log: bool = False

    def share(self, value: float) -> float:
        if self.log:
            return log10(value / self.low) / log10(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round values between the ends."""
        if self.log:
            powers = [*range(ceil(log10(self.low) - 1e-9), floor(log10(self.high) + 1e-9) + 1)]
            return [10.0**power for power in powers[:: 1 + len(powers) // (TICKS + 2)]]
        return [value * self.scale for value in round_values(self.low / self.scale, self.high / self.scale)]

    def as_data(self) -> str:
        fields = [self.low, self.high, self.scale, self.unit, int(self.log)]
        return escape(json.dumps(fields, separators=(",", ":")))


def axis(
    values: Iterable[Number],
    title: str,
    *,
    units: Units = ((1.0, ""),),
    log: bool = False,
    zero: bool = False,
    room: float = 0.0,
) -> ChartAxis:
    """The axis over all finite `values`, in the largest of `units` that its largest value reaches; zero: from 0 on.

    room: a share of the axis that is added at both ends, but below 0 where no value is.
    """
    found = [value for value in values if value is not None and is_drawn(value, log=log)]
    low, high = (min(found), max(found)) if found else (1.0, 10.0)
    low = min(low, 0.0) if zero and not log else low
    largest = max(abs(low), abs(high))
    if high - low <= max(1e-30, ROUNDING * largest):
        margin = largest / 2 if largest > 1e-30 else 0.5
        low, high = (low / 2, high * 2) if log else (low - margin, high + margin)
        largest = max(abs(low), abs(high))
    elif room and not log:
        more = room * (high - low)
        low, high = (low if low >= 0 and low - more < 0 else low - more), high + more
    scale, unit = next((one for one in reversed(units) if largest >= one[0]), units[0])
    return ChartAxis(low, high, title, scale, unit, log)


def is_drawn(value: Number, *, log: bool = False) -> bool:
    return value is not None and abs(value) < 1e30 and (value > 1e-30 or not log)


def round_values(low: float, high: float, most: int = TICKS) -> list[float]:
    """At most about `most` values between `low` and `high`: multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / most
    power = 10.0 ** floor(log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    return [number * step for number in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * factor or (abs(value) >= factor and factor > 1e3):
            return f"{float(f'{value / factor:.4g}'):g}{letter}"
    return f"{float(f'{value:.4g}'):g}"
