"""Microbatches: how a batch is cut into the pieces that one forward runs.

*cost* of a sample is its length · *padded cost* of a group is what a forward computes once its samples are
padded to the longest: largest cost x number of samples · *budget* the largest padded cost of one microbatch ·
*overhead* what a microbatch costs whatever is in it, in units of padded cost.

The cut is a function of the batch, the costs and the size or budget. It must never learn how many ranks there
are or what the plan is: random streams and sums follow microbatches, so the cut is part of the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from evenly.errors import UserError

# A forward costs something of its own (launches, small matrices that leave the device idle). Counted by
# padding alone the best cut would be one sample each; this share of the budget is charged per microbatch. On a CPU
# the true share is far smaller, but there a smaller budget, which costs nothing, leaves as little padding.
OVERHEAD_PER_BUDGET = 1 / 16


def cut(
    indices: Sequence[int],
    *,
    size: int | None = None,
    costs: Sequence[float] | None = None,
    budget: float | None = None,
) -> list[list[int]]:
    """Cut a batch into microbatches; every index occurs in exactly one.

    Without `costs`: consecutive runs of at most `size` samples, as few as that allows, whose sizes differ by at
    most one: a short last run would be less work for one rank, and too few samples for BatchNorm.
    With `costs` (one per index, in the order of `indices`): runs of the batch sorted by (cost, position),
    each of at most `size` samples and of at most `budget` padded cost, where given; a sample above the
    budget runs alone. Of all such cuts the one with the least total of padded cost and overhead; without a
    budget, the one with the least padded cost among those with the fewest microbatches.

    Raises `UserError` for a cost that is negative or not finite, `ValueError` for options that do not fit.
    """
    _check_options(len(indices), size, costs, budget)
    if costs is None:
        return _even_runs(indices, size or len(indices))
    values = _checked_costs(indices, costs)
    order = np.argsort(values, kind="stable")
    ends = _best_ends(values[order], size or len(indices), budget)
    ordered = [indices[position] for position in order.tolist()]
    return [ordered[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _even_runs(indices: Sequence[int], size: int) -> list[list[int]]:
    runs = -(-len(indices) // max(size, 1))
    ends = [len(indices) * run // max(runs, 1) for run in range(runs + 1)]
    return [list(indices[start:end]) for start, end in pairwise(ends)]


def padded_cost(costs_of_group: Sequence[float]) -> float:
    """Largest cost x number of samples of a non-empty group."""
    return float(max(costs_of_group)) * len(costs_of_group)


def _check_options(count: int, size: int | None, costs: Sequence[float] | None, budget: float | None) -> None:
    if size is None and budget is None:
        raise ValueError("a cut needs a size or a budget")
    if size is not None and size < 1:
        raise ValueError(f"size {size} must be at least 1")
    if budget is not None and not (isfinite(budget) and budget > 0):
        raise ValueError(f"budget {budget} must be a finite number above 0")
    if costs is None and budget is not None:
        raise ValueError("a budget needs costs")
    if costs is not None and len(costs) != count:
        raise ValueError(f"{len(costs)} costs for {count} indices")


def _checked_costs(indices: Sequence[int], costs: Sequence[float]) -> NDArray[np.float64]:
    values = np.array(costs, dtype=np.float64)
    bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if bad.size:
        raise UserError(
            "microbatches of like length, by the job's cost",
            f"the cost of sample {indices[bad[0]]} is {costs[bad[0]]}",
            "let cost return a finite number that is not negative",
        )
    return values


def _best_ends(costs: NDArray[np.float64], size: int, budget: float | None) -> list[int]:
    """Ends of the cheapest groups of ascending `costs`, by dynamic programming over where a group ends.

    `least[end]` is the least total of the first `end` samples and `begins[end]` where its last group begins.
    """
    count = len(costs)
    earliest, latest = _begin_window(costs, size, budget)
    overhead = 0.0 if budget is None else budget * OVERHEAD_PER_BUDGET
    least, begins = np.zeros(count + 1), [0] * (count + 1)
    samples = np.arange(count, -1, -1, dtype=np.float64)  # samples[count - end + begin] == end - begin
    for end, (cost, low, high) in enumerate(zip(costs.tolist(), earliest, latest, strict=True), 1):
        totals = samples[count - end + low : count - end + high + 1] * cost
        totals += least[low : high + 1]
        at = int(totals.argmin())  # the first of equals: the longest last group
        begins[end] = low + at
        least[end] = totals[at] + overhead
    return _trace(begins)


def _begin_window(costs: NDArray[np.float64], size: int, budget: float | None) -> tuple[list[int], list[int]]:
    """First and last allowed begin of a group that ends after each sample, both inclusive."""
    ends = np.arange(1, len(costs) + 1)
    if budget is None:
        # A multiple of the size is the last begin that leaves ceil(end / size) groups, the fewest.
        return np.maximum(ends - size, 0).tolist(), ((ends - 1) // size * size).tolist()
    allowed = np.minimum(_samples_in_budget(costs, budget), size)
    return np.maximum(ends - allowed, 0).tolist(), (ends - 1).tolist()


def _samples_in_budget(costs: NDArray[np.float64], budget: float) -> NDArray[np.int64]:
    """How many samples padded to each cost stay within the budget; at least one."""
    least_cost = budget / (len(costs) + 1)  # all samples fit at this cost and below
    samples = np.clip(np.floor(budget / np.maximum(costs, least_cost)), 1, len(costs))
    samples += (samples + 1) * costs <= budget  # the quotient is rounded, the product decides
    samples -= (samples > 1) & (samples * costs > budget)
    return samples.astype(np.int64)


def _trace(begins: list[int]) -> list[int]:
    ends: list[int] = []
    end = len(begins) - 1
    while end > 0:
        ends.append(end)
        end = begins[end]
    return ends[::-1]
