"""Whether two numbers are the same up to what a device may do to them."""

from __future__ import annotations

import math

ROUNDING = 1e-5  # of a GPU, whose sums may come in another order each time


def same(one: float, other: float, *, exact: bool) -> bool:
    """Whether two losses are the same number, up to the rounding of a GPU unless `exact`."""
    if math.isnan(one) or math.isnan(other) or one == other:
        return math.isnan(one) == math.isnan(other)
    return not exact and abs(one - other) <= ROUNDING * max(abs(one), abs(other))
