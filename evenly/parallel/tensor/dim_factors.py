"""Factors: what the dims of tensors are made of when one asks which can be split together.

A dim is a list of *factors*, the outermost first, whose sizes multiply to the dim's: a dim of 256 that is viewed as
4 heads of 64 is [4, 64]. Factors that must be split together are *united*: from then on they are one. A factor that
meets a boundary inside it is *refined* into smaller ones, wherever it stands. A *forbidden* factor can never be split,
and knows why. Dims of size 1 hold no factors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Dim = tuple[int, ...]


class DimFactors:
    """All factors of one analysis; a factor is a number. Those that were united or refined stand for what they
    became.
    """

    def __init__(self) -> None:
        self.size: list[int] = []
        self._became: list[Dim] = []  # empty: still a factor itself
        self._barred: list[str] = []  # why; empty: not

    def new(self, size: int, forbidden: str = "") -> Dim:
        if size <= 1:
            return ()
        self.size.append(size)
        self._became.append(())
        self._barred.append(forbidden)
        return (len(self.size) - 1,)

    def now(self, dim: Iterable[int]) -> Dim:
        became, found = self._became, list[int]()
        for factor in dim:
            if became[factor]:
                self._settle(factor)
            found.extend(became[factor] or (factor,))
        return tuple(found)

    def _settle(self, factor: int) -> None:
        """Notes for `factor`, and all that it became on the way, what they consist of by now."""
        became, waiting = self._became, [factor]
        while waiting:
            own = became[waiting[-1]]
            on_the_way = [one for one in own if any(became[part] for part in became[one])]
            waiting.extend(on_the_way)
            if not on_the_way:
                became[waiting.pop()] = tuple(part for one in own for part in became[one] or (one,))

    def length(self, dim: Iterable[int]) -> int:
        product = 1
        for factor in dim:
            product *= self.size[factor]
        return product

    def reason(self, factor: int) -> str:
        """Why the factor is forbidden; empty if it is not."""
        return self._barred[factor]

    def forbid(self, dim: Iterable[int], why: str) -> None:
        """Never to be split; the first reason stays."""
        for factor in self.now(dim):
            self._barred[factor] = self._barred[factor] or why

    def unite(self, first: Iterable[int], second: Iterable[int], why: str) -> None:
        """What stands at the same place of two dims of one length is split together.

        Refines both until the factors are of one size. Where that is impossible (2 x 3 besides 3 x 2) they are
        forbidden for `reason`.
        """
        left, right = _FactorReader(self, first), _FactorReader(self, second)
        while (a := left.next()) is not None and (b := right.next()) is not None:
            if a == b:
                continue
            small, large, rest = (a, b, right) if self.size[a] <= self.size[b] else (b, a, left)
            if self.size[large] == self.size[small]:
                self._merge(small, large)
            elif self.size[large] % self.size[small] == 0:
                head, tail = self._refine(large, self.size[small])
                self._merge(small, head)
                rest.put_back(tail)
            else:
                self._forbid_until_even(left, right, a, b, why)

    def regroup(self, dims: Sequence[Iterable[int]], lengths: Sequence[int], why: str) -> list[Dim]:
        """The dims of a view of `lengths`, as many elements as `dims` have; refines where the view cuts a factor."""
        source = _FactorReader(self, [factor for dim in dims for factor in dim])
        result: list[Dim] = []
        for place, length in enumerate(lengths):
            dim = self._take(source, length)
            if dim is None:
                self.forbid(source.rest(), why)
                return result + [self.new(one, why) for one in lengths[place:]]
            result.append(dim)
        return result

    def _take(self, source: _FactorReader, length: int) -> Dim | None:
        """The next factors, of `length` together; None where no refinement has a boundary there."""
        start, taken = source.rest(), 1
        dim: list[int] = []
        while taken < length:
            factor = source.next()
            needed, odd = divmod(length, taken)
            if factor is None:  # of no elements at all
                return None
            if odd == 0 and needed % self.size[factor] == 0:
                dim.append(factor)
                taken *= self.size[factor]
            elif odd == 0 and self.size[factor] % needed == 0:
                head, tail = self._refine(factor, needed)
                source.put_back(tail)
                return (*dim, head)
            else:
                source.go_back(start)
                return None
        return tuple(dim)

    def _merge(self, factor: int, into: int) -> None:
        self._became[factor] = (into,)
        self._barred[into] = self._barred[into] or self._barred[factor]

    def _refine(self, factor: int, outer: int) -> tuple[int, int]:
        """Splits `factor` into outer x rest."""
        why = self._barred[factor]
        head, tail = self.new(outer, why), self.new(self.size[factor] // outer, why)
        self._became[factor] = (*head, *tail)
        return head[0], tail[0]

    def _forbid_until_even(self, left: _FactorReader, right: _FactorReader, a: int, b: int, why: str) -> None:
        """Bars `a` and `b` and what follows, up to where both sides have as many elements behind them."""
        self.forbid((a, b), why)
        of_left, of_right = self.size[a], self.size[b]
        while of_left != of_right:
            behind = left if of_left < of_right else right
            factor = behind.next()
            assert factor is not None, "dims of one length"
            self.forbid((factor,), why)
            if behind is left:
                of_left *= self.size[factor]
            else:
                of_right *= self.size[factor]


class _FactorReader:
    """Reads a dim factor by factor, as it is by then: refinements and unions while reading are seen."""

    def __init__(self, factors: DimFactors, dim: Iterable[int]) -> None:
        self._factors = factors
        self._ahead = [*dim][::-1]

    def next(self) -> int | None:
        while self._ahead:
            first, *others = self._factors.now((self._ahead.pop(),))
            self._ahead.extend(others[::-1])
            return first
        return None

    def put_back(self, factor: int) -> None:
        self._ahead.append(factor)

    def rest(self) -> Dim:
        return tuple(self._ahead[::-1])

    def go_back(self, rest: Dim) -> None:
        self._ahead = [*rest[::-1]]
