"""Shares: which microbatch runs on which rank.

*share* of a rank is the list of microbatches it runs · *load* of a rank is the sum of their costs · *owners*
are the ranks of all microbatches, in their order. A step takes as long as its slowest rank, so shares are
dealt to make the largest load least.

Shares are free: they change when and where a microbatch runs, never what it computes. Every rank deals for
itself and must come to the same answer, so effort is bounded by counts and never by a clock, and sums are
taken in a fixed order or exactly rounded.

Three attempts, each starting from the one before and none making it worse: the costliest microbatch to the
least loaded rank; exchanges that relieve the heaviest rank; a search that proves the least possible load
where microbatches are few. Reaching a lower bound ends them early.

Where a second cost is given, exchanges then even that out too, for a slightly larger first load: work that grows with
the square of a length (attention) has an unknown part in the cost, and even in both sums is even in any mix of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace
from itertools import pairwise
from math import fsum, inf

import numpy as np
from numpy.typing import NDArray

Owners = NDArray[np.int64]
Floats = NDArray[np.float64]

SEARCH_NODES = 1_000  # about 1.5 ms
SEARCH_MICROBATCHES = 24  # beyond, a search of so few nodes hardly finds what exchanges do not
EXCHANGES = 50
ENOUGH = 1.001  # a load this close to the lower bound is not worth an exchange
SLACK = 1.01  # of the largest load, for evening out the second cost
_ROUNDING = 1 + 1e-12


def deal(costs: Sequence[float], ranks: int, second: Sequence[float] | None = None) -> list[list[int]]:
    """The microbatches of each rank, ascending; `ranks` lists, empty ones last.

    costs, second: of each microbatch, finite and not negative. Equal costs give every rank a consecutive run, with
    counts that differ by at most one. Otherwise the largest load is the least possible wherever the search
    can prove it, and never more than that of dealing in turn; with a `second` cost, up to `SLACK` times that.
    """
    if ranks < 1 or not all(0 <= cost < inf for cost in costs):
        raise ValueError(f"cannot deal to {ranks} ranks the costs {list(costs)}")
    if len(set(costs)) <= 1 and len(set(second or ())) <= 1:
        return _consecutive(len(costs), ranks)
    values = np.array(costs, dtype=np.float64)
    owners = _best_owners(values, ranks)
    if second is not None and ranks > 1:
        limit = float(_loads(values, owners, ranks).max()) * SLACK
        owners = _exchange(np.array(second, dtype=np.float64), owners, ranks, 0.0, (values, limit))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for microbatch, owner in enumerate(owners.tolist()):
        shares[owner].append(microbatch)
    return sorted(shares, key=lambda share: (not share, share))


def deal_by_speed(costs: Sequence[float], speeds: Sequence[float]) -> list[list[int]]:
    """The microbatches of each rank, ascending, where ranks differ in speed (positive, of any unit).

    The costliest first, each to the rank that is then done with it first: at equal costs no other counts end earlier.
    """
    shares: list[list[int]] = [[] for _ in speeds]
    loads = [0.0] * len(speeds)
    for microbatch in sorted(range(len(costs)), key=lambda one: -costs[one]):
        rank = min(range(len(speeds)), key=lambda one: ((loads[one] + costs[microbatch]) / speeds[one], one))
        loads[rank] += costs[microbatch]
        shares[rank].append(microbatch)
    return [sorted(share) for share in shares]


def _consecutive(count: int, ranks: int) -> list[list[int]]:
    least, longer = divmod(count, ranks)
    starts = [rank * least + min(rank, longer) for rank in range(ranks + 1)]
    return [list(range(start, end)) for start, end in pairwise(starts)]


def _best_owners(costs: Floats, ranks: int) -> Owners:
    bound = _lower_bound(costs, ranks)
    in_turn = np.arange(len(costs)) % ranks
    owners = min(_costliest_first(costs, ranks), in_turn, key=lambda owners: _loads(costs, owners, ranks).max())
    owners = _exchange(costs, owners, ranks, bound * ENOUGH)
    if len(costs) <= SEARCH_MICROBATCHES:
        return _ShareSearch(costs, owners, ranks, bound * _ROUNDING).best()
    return owners


def _loads(costs: Floats, owners: Owners, ranks: int) -> Floats:
    loads = np.zeros(ranks)
    np.add.at(loads, owners, costs)
    return loads


def _lower_bound(costs: Floats, ranks: int) -> float:
    """The mean load, or if more: of the k x ranks + 1 costliest, k + 1 must meet on one rank, for every k."""
    ordered: list[float] = np.sort(costs)[::-1].tolist()
    meetings = (fsum(ordered[last - last // ranks : last + 1]) for last in range(0, len(ordered), ranks))
    return max(fsum(ordered) / ranks, *meetings)


def _costliest_first(costs: Floats, ranks: int) -> Owners:
    """Each to the least loaded rank of the moment; at most 4/3 of the least possible load."""
    owners = np.zeros(len(costs), dtype=np.int64)
    queue = [(0.0, 0, rank) for rank in range(ranks)]  # the count spreads microbatches that cost nothing
    for microbatch in np.argsort(-costs, kind="stable").tolist():
        load, count, rank = queue[0]
        owners[microbatch] = rank
        heapreplace(queue, (load + float(costs[microbatch]), count + 1, rank))
    return owners


def _exchange(
    costs: Floats, owners: Owners, ranks: int, enough: float, bound: tuple[Floats, float] | None = None
) -> Owners:
    """Swap a microbatch of the heaviest rank for a cheaper one, or for nothing, while its load falls.

    Nothing is one more microbatch of every rank, of no cost. `bound` holds other costs and the most that any rank
    may have of them.
    """
    nothing = np.zeros(ranks)
    costs, others = np.append(costs, nothing), None if bound is None else np.append(bound[0], nothing)
    owners = np.append(owners, np.arange(ranks))
    for _ in range(EXCHANGES):
        loads = _loads(costs, owners, ranks)
        heavy = int(loads.argmax())
        if loads[heavy] <= enough:
            break
        own, other = np.flatnonzero(owners == heavy), np.flatnonzero(owners != heavy)
        relief = costs[own][:, None] - costs[other]
        heavier = np.maximum(loads[heavy] - relief, loads[owners[other]] + relief)
        if bound is not None and others is not None:
            relief, loads_of_others = others[own][:, None] - others[other], _loads(others, owners, ranks)
            heaviest = np.maximum(loads_of_others[heavy] - relief, loads_of_others[owners[other]] + relief)
            heavier[heaviest > bound[1]] = inf
        best = int(heavier.argmin())
        if heavier.flat[best] >= loads[heavy]:
            break
        row, column = divmod(best, len(other))
        owners[own[row]], owners[other[column]] = owners[other[column]], heavy
    return owners[: len(costs) - ranks]


class _ShareSearch:
    """Depth first over the microbatches, costliest first; improves on `owners` or proves that nothing does.

    Ranks of equal load are interchangeable, so only one of them is tried. A branch ends where the ranks that
    can still take the cheapest microbatch have no room left below the best load for all that remains.
    """

    def __init__(self, costs: Floats, owners: Owners, ranks: int, bound: float) -> None:
        self.order = np.argsort(-costs, kind="stable")
        self.costs: list[float] = costs[self.order].tolist()
        self.remaining: list[float] = np.cumsum(costs[self.order][::-1])[::-1].tolist()
        self.loads, self.ranks = [0.0] * ranks, range(ranks)
        self.owners = [0] * len(costs)
        self.best_owners, self.best_load = owners, float(_loads(costs, owners, ranks).max())
        self.bound = bound
        self.nodes_left = SEARCH_NODES

    def best(self) -> Owners:
        self._place(0)
        return self.best_owners

    def _place(self, at: int) -> None:
        if at == len(self.costs):
            self._keep()
            return
        self.nodes_left -= 1
        if self.nodes_left < 0 or not self._fits(at):
            return
        cost, tried = self.costs[at], -1.0
        for load, rank in sorted(zip(self.loads, self.ranks, strict=True)):
            if load + cost >= self.best_load or self.best_load <= self.bound:
                return
            if load > tried:
                tried = load
                self.loads[rank], self.owners[at] = load + cost, rank
                self._place(at + 1)
                self.loads[rank] = load

    def _fits(self, at: int) -> bool:
        limit = self.best_load - self.costs[-1]
        useful = [load for load in self.loads if load < limit]
        return (len(useful) * self.best_load - fsum(useful)) * _ROUNDING > self.remaining[at]

    def _keep(self) -> None:
        self.best_load = max(self.loads)
        self.best_owners = np.empty(len(self.owners), dtype=np.int64)
        self.best_owners[self.order] = self.owners
