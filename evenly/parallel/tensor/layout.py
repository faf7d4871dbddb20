"""How one dim of a tensor lies over the ranks of the tensor axis: pure numbers, no tensor of torch's.

A split dim is read as `outer` x `units` x `inner`, as a view of those three dims would: the *units* are dealt to the
ranks, neighbouring ones to the same rank, and a rank holds its units of every outer part, one behind the other.
`outer` is 1 but for packed dims: the queries, keys and values of 8 heads of 64 in one dim of 1536 are 3 x 8 x 64.
Where the units cannot be dealt evenly the first ranks hold more, by torch's rule for pieces: rounded up, the last ones
shorter.

Where they can, neighbouring units of a rank are one unit, so that layouts that put the same elements on every rank are
equal: 8 heads of 64 on two ranks, and 2 groups of 4 x 64, are both 1 x 2 x 256.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Self


class _Numbers(NamedTuple):
    dim: int
    outer: int
    units: int
    inner: int
    ranks: int


class Layout(_Numbers):
    """A tensor whose dim `dim` is split over `ranks` ranks as outer x units x inner."""

    @classmethod
    def of(cls, dim: int, outer: int, units: int, inner: int, ranks: int) -> Self:
        """The layout in the form in which equal ones compare equal; every rank must get a unit."""
        assert cls.deals(units, ranks), "a rank would be left without a unit"
        if units % ranks == 0:
            units, inner = ranks, inner * (units // ranks)
        return cls(dim, outer, units, inner, ranks)

    def __reduce__(self) -> tuple[type[Self], tuple[int, ...]]:
        """A copy keeps the numbers alone, and nothing that was computed of them."""
        return type(self), tuple(self)

    @staticmethod
    def deals(units: int, ranks: int) -> bool:
        return units > (ranks - 1) * -(-units // ranks)

    @cached_property
    def length(self) -> int:
        return self.outer * self.units * self.inner

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        each = -(-self.units // self.ranks)
        return tuple(min(each, self.units - rank * each) * self.inner for rank in range(self.ranks))

    def own_length(self, rank: int) -> int:
        return self.outer * self.sizes[rank]

    def full_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The whole tensor's shape, from that of a rank's part."""
        return (*shape[: self.dim], self.length, *shape[self.dim + 1 :])

    def part(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """The inverse of `full_shape`."""
        return (*shape[: self.dim], self.own_length(rank), *shape[self.dim + 1 :])

    @cached_property
    def _moved(self) -> dict[int, Self]:
        return {self.dim: self}

    def at(self, dim: int) -> Self:
        """The same of another dim; the same object for the same dim."""
        known = self._moved.get(dim)
        if known is None:
            known = self._moved[dim] = self._replace(dim=dim)
            vars(known)["_moved"] = self._moved
        return known

    def stretched(self, times: int) -> Self:
        """The layout of a dim in which every element of this one is repeated `times` times."""
        return self._replace(inner=self.inner * times)

    def viewed(self, shape: Sequence[int], target: Sequence[int]) -> Self | None:
        """The layout when the whole tensor, of `shape`, is viewed as `target`; None where no dim of it is split.

        The units keep their place among all elements: as many lie before them, seen as digits of a flat index.
        """
        before = math.prod(shape[: self.dim]) * self.outer
        passed = 1
        for dim, length in enumerate(target):
            outer, rest = divmod(before, passed)
            if rest == 0 and length % (outer * self.units) == 0 and length > 1:
                return self._replace(dim=dim, outer=outer, inner=length // (outer * self.units))
            passed *= length
        return None

    def pieces(self, lengths: Sequence[int]) -> list[Self] | None:
        """The pieces into which the full dim is cut; None where one would end within an outer part."""
        part = self.units * self.inner
        if any(length % part or not length for length in lengths):
            return None
        return [self._replace(outer=length // part) for length in lengths]
