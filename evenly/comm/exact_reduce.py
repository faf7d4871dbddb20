"""Exact sums (see `exact_sum`) over the ranks of a group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch

from evenly.comm.collectives import all_gather, all_reduce, gather_values
from evenly.comm.exact_sum import ExactSum
from evenly.comm.groups import Group

EXPONENTS, LOWEST = 2200, -1100  # a bin for each exponent that a float64 can have
HALF_BITS, MANTISSA_BITS = 27, 53


def pairs_of_others(mine: torch.Tensor, group: Group) -> torch.Tensor:
    """The rows (index, value) that the other ranks give, of low terms (`ExactSum.pairs`), one rank after the other."""
    sizes = gather_values(len(mine), group)
    pairs = all_gather(mine.to(group.device), group, sizes=sizes, label="low terms").split(sizes)
    others = [theirs for position, theirs in enumerate(pairs) if position != group.position]
    return torch.cat([mine[:0].to(group.device), *others]).to(mine.device)


def begin_exact_all_reduce(total: ExactSum, group: Group, *, label: str = "") -> Callable[[], None]:
    """Begins to add the sums of all ranks of `group` to `total`, on each; returns what ends it.

    Every rank gets all ranks' numbers: meant for few ranks, or few numbers. label: what it is, for messages.
    """
    if group.size == 1:
        return lambda: None
    low = torch.full((1,), float(total.has_low_terms), dtype=torch.float64, device=total.high.device)
    mine = torch.cat([total.high, low]).view(1, -1)
    pending = all_gather.begin(mine, group, sizes=[1] * group.size, label=label)

    def finish() -> None:
        rows = pending.wait()
        others = pairs_of_others(total.pairs(), group) if bool((rows[:, -1] > 0).any()) else None
        total.set(rows[:, :-1])
        if others is not None:
            total.add_pairs(others)

    return finish


def exact_norm(tensors: Iterable[torch.Tensor], group: Group | None) -> float:
    """The norm of all elements of all `tensors`, over all ranks of `group`: the same in any order, on any rank.

    The square of a float32 number is exact in float64. Mantissas of squares are added up as integers, by exponent.
    """
    bins = np.zeros((2, EXPONENTS), np.int64)
    for tensor in tensors:
        for chunk in tensor.detach().flatten().split(1 << 20):
            mantissas, exponents = np.frexp(np.square(chunk.double().cpu().numpy()))
            upper = np.floor(np.ldexp(mantissas, MANTISSA_BITS - HALF_BITS))
            lower = np.ldexp(mantissas, MANTISSA_BITS) - np.ldexp(upper, HALF_BITS)
            for row, weights in zip(bins, (upper, lower), strict=True):
                row += np.bincount(exponents - LOWEST, weights, EXPONENTS).astype(np.int64)
    summed = torch.from_numpy(bins)
    if group is not None:
        summed = all_reduce(summed.to(group.device), group, label="norm of the gradient")
    places = summed.any(0).nonzero().flatten().tolist()
    lowest = min(places, default=0)
    halves = zip(places, *summed[:, places].tolist(), strict=True)
    total = sum(((upper << HALF_BITS) + lower) << (place - lowest) for place, upper, lower in halves)
    exponent = lowest + LOWEST - MANTISSA_BITS
    # Of whole numbers a quotient is rounded once.
    return math.sqrt(total << exponent if exponent >= 0 else total / (1 << -exponent))
