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
from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True)
class Layout:
    """A tensor whose dim `dim` is split over `ranks` ranks as outer x units x inner."""

    dim: int
    outer: int
    units: int
    inner: int
    ranks: int

    @classmethod
    def of(cls, dim: int, outer: int, units: int, inner: int, ranks: int) -> Self:
        """The layout in the form in which equal ones compare equal; every rank must get a unit."""
        assert cls.deals(units, ranks), "a rank would be left without a unit"
        if units % ranks == 0:
            units, inner = ranks, inner * (units // ranks)
        return cls(dim, outer, units, inner, ranks)

    @staticmethod
    def deals(units: int, ranks: int) -> bool:
        """Whether each of `ranks` gets a unit."""
        return units > (ranks - 1) * -(-units // ranks)

    @property
    def length(self) -> int:
        """The length of the full dim."""
        return self.outer * self.units * self.inner

    @property
    def sizes(self) -> list[int]:
        """What each rank holds of one outer part."""
        each = -(-self.units // self.ranks)
        return [min(each, self.units - rank * each) * self.inner for rank in range(self.ranks)]

    def own_length(self, rank: int) -> int:
        """What `rank` holds of the dim."""
        return self.outer * self.sizes[rank]

    def full_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The whole tensor's shape, from that of a rank's part."""
        return (*shape[: self.dim], self.length, *shape[self.dim + 1 :])

    def part(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """The inverse of `full_shape`."""
        return (*shape[: self.dim], self.own_length(rank), *shape[self.dim + 1 :])

    def at(self, dim: int) -> Layout:
        """The same of another dim."""
        return Layout(dim, self.outer, self.units, self.inner, self.ranks)

    def matches(self, other: Layout) -> bool:
        """Whether both put the same indices of their dim, wherever it stands, on every rank."""
        mine, theirs = (self.outer, self.units, self.inner), (other.outer, other.units, other.inner)
        return mine == theirs and self.ranks == other.ranks

    def stretched(self, times: int) -> Layout:
        """The layout of a dim in which every element of this one is repeated `times` times."""
        return replace(self, inner=self.inner * times)

    def viewed(self, shape: Sequence[int], target: Sequence[int]) -> Layout | None:
        """The layout when the whole tensor, of `shape`, is viewed as `target`; None where no dim of it is split.

        The units keep their place among all elements: as many lie before them, seen as digits of a flat index.
        """
        before = math.prod(shape[: self.dim]) * self.outer
        passed = 1
        for dim, length in enumerate(target):
            outer, rest = divmod(before, passed)
            if rest == 0 and length % (outer * self.units) == 0 and length > 1:
                return Layout(dim, outer, self.units, length // (outer * self.units), self.ranks)
            passed *= length
        return None

    def pieces(self, lengths: Sequence[int]) -> list[Layout] | None:
        """The pieces into which the full dim is cut; None where one would end within an outer part."""
        part = self.units * self.inner
        if any(length % part or not length for length in lengths):
            return None
        return [replace(self, outer=length // part) for length in lengths]
