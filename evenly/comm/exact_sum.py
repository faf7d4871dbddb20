"""Sums that are rounded once, when they are read: neither the order of additions nor their grouping can show.

An `ExactSum` is a float64 tensor and *low terms*, float64 too, whose sum with it is the exact sum of everything that
was added. Whoever reads it gets that exact sum, rounded; so the result is a function of the numbers that were added,
and of nothing else. Few low terms, as most jobs have, are kept as *pairs* (index, value), many as tensors.

Why it is exact. For floating-point numbers a and b the rounding error e = (a + b) - fl(a + b) is itself one, and six
operations compute it (TwoSum; Knuth, The Art of Computer Programming, volume 2, 4.2.2, theorem B). So (a, b) is
replaced by (fl(a + b), e), which has the same sum: e becomes a pair. Where there are too many, they are added to a
tensor in the same way, what that loses to a second, and so on, with one more tensor where the last loses something:
nothing is ever dropped. With n numbers of float32 the tensors shrink by 2**53 / n each, and all numbers are multiples
of 2**-149: there are never more than eight.

Why it costs little. Adding float32 numbers whose magnitudes lie within a factor of 2**28 has no rounding error in
float64, and then there are no low terms. Whether an addition was rounded is what the processor notes by itself, in the
*inexact* flag of IEEE 754: one look per chunk. Only where it is set are errors computed.

How it is read. `rounded` first renormalizes the terms until each is at most half a unit in the last place of the one
before. Then the sum lies strictly between the first term and its neighbour on the side of the second, unless the
others are zero, and of those two the one with an odd last bit is taken: *rounding to odd*. To round that to a type of
at most 51 bits gives what rounding the exact sum at once would give (Boldo and Melquiond, IEEE Transactions on
Computers 57(4), 2008): a number next to a tie never is on the tie.

A sum of zeros is +0.0, whatever their signs: who added nothing would otherwise have to be distinguished from who added
+0.0. Infinities and NaN propagate as in any sum.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

CHUNK = 1 << 16  # elements whose additions are checked together; they stay in a core's cache
PART = 1 << 11  # elements of a chunk whose errors are computed together, where the chunk has any
# The bit of C's FE_INEXACT.
_INEXACT = {"x86_64": 0x20, "AMD64": 0x20, "i686": 0x20, "aarch64": 0x10, "arm64": 0x10}


class ExactSum:
    """Exact sums, element by element.

    high: 1D float64, contiguous: the sums as far as float64 has them, in the caller's memory.
    """

    def __init__(self, high: torch.Tensor) -> None:
        self.high = high
        self._pairs: list[torch.Tensor] = []  # rows (index, value)
        self._many: dict[int, list[torch.Tensor]] = {}  # by number of the chunk, low terms of all its elements
        self._before = np.empty(0)

    def clear(self) -> None:
        """Drops the low terms; the caller sets `high`."""
        self._pairs.clear()
        self._many.clear()

    @property
    def has_low_terms(self) -> bool:
        """Whether `high` alone is not the sum."""
        return bool(self._pairs or self._many)

    def add(self, values: torch.Tensor, start: int = 0) -> None:
        """Adds `values`, 1D, of any floating type, to the elements from `start` on."""
        values, end = _wide(values), start + len(values)
        for chunk in range(start // CHUNK, -(-end // CHUNK)):
            first, last = max(start, chunk * CHUNK), min(end, (chunk + 1) * CHUNK)
            self._pairs += self._add_high(first, last, values[first - start : last - start])
        if self._pairs and sum(map(len, self._pairs)) > len(self.high) // 16 + 64:
            self._merge()

    def set(self, rows: torch.Tensor, start: int = 0) -> None:
        """Sets the elements from `start` on to the sums over `rows`, 2D, of any floating type, and their low terms."""
        rows, end = _wide(rows), start + rows.shape[1]
        for chunk in range(start // CHUNK, -(-end // CHUNK)):
            first, last = max(start, chunk * CHUNK), min(end, (chunk + 1) * CHUNK)
            self._pairs += self._set_high(first, last, rows[:, first - start : last - start])

    def pairs(self) -> torch.Tensor:
        many = [_pairs_of(term, chunk * CHUNK) for chunk, terms in self._many.items() for term in terms]
        return torch.cat([self.high.new_empty(0, 2), *self._pairs, *many])

    def add_pairs(self, pairs: torch.Tensor, start: int = 0, end: int | None = None) -> None:
        """Adds the values of those rows (index, value) whose index is in start:end, all by default."""
        end = len(self.high) if end is None else end
        inside = pairs[(pairs[:, 0] >= start) & (pairs[:, 0] < end)]
        if len(inside):
            self._pairs.append(inside)

    def rounded(self, start: int = 0, end: int | None = None) -> torch.Tensor:
        """The sums start:end, rounded to odd, in float64; `high` itself where that is the sum."""
        end = len(self.high) if end is None else end
        own = self.high[start:end]
        return own.index_copy(0, *self._low_rounded(start, end)) if self.has_low_terms else own

    def round_into(self, target: torch.Tensor, start: int = 0) -> None:
        """Sets `target`, 1D, to the sums from `start` on, rounded to its type."""
        low = self._low_rounded(start, start + len(target)) if self.has_low_terms else None
        target.copy_(self.high[start : start + len(target)])
        if low is not None:
            target.index_copy_(0, low[0], low[1].to(target.dtype))
        target.add_(0.0)  # -0.0 becomes 0.0

    def _low_rounded(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = self.pairs()
        index, value = pairs[:, 0].long(), pairs[:, 1]
        inside = (index >= start) & (index < end)
        places, inverse = index[inside].unique(return_inverse=True)
        terms, rest = [self.high[places]], value[inside]
        while len(rest):  # an element may have several; each round takes one of each
            first = _first_of_each(inverse)
            terms.append(torch.zeros_like(terms[0]).index_copy_(0, inverse[first], rest[first]))
            inverse, rest = inverse[~first], rest[~first]
        return places - start, _rounded_to_odd(terms)

    def _set_high(self, start: int, end: int, rows: torch.Tensor) -> list[torch.Tensor]:
        """Sets the elements start:end of `high` to the sums over `rows`; returns errors as `_add_high`."""
        total = self.high[start:end]
        if not rows.is_cuda and _rounds is not None:
            sums, added = total.numpy(), rows.numpy().astype(np.float64, copy=False)
            if not _rounds(lambda: np.add.reduce(added, axis=0, out=sums)):
                return []
        total.copy_(rows[0])
        return [pairs for row in rows[1:] for pairs in self._add_high(start, end, row)]

    def _add_high(self, start: int, end: int, more: torch.Tensor) -> list[torch.Tensor]:
        """Adds `more` to the elements start:end of `high`; returns errors as rows (index, value)."""
        total = self.high[start:end]
        if total.is_cuda or _rounds is None:
            before = total.clone()
            total.add_(more)
            error = _error(before, more.double(), total)
            return [_pairs_of(error, start)] if bool(error.any()) else []
        if len(self._before) < len(total):
            self._before = np.empty(min(CHUNK, len(self.high)))
        before, sums = self._before[: len(total)], total.numpy()
        added = more.numpy().astype(np.float64, copy=False)  # thrice as fast as to add numbers of two types
        np.copyto(before, sums)
        if not _rounds(lambda: np.add(sums, added, out=sums)):
            return []
        found: list[torch.Tensor] = []
        for first in range(0, len(sums), PART):
            part = slice(first, first + PART)
            if _rounds(lambda part=part: np.add(before[part], added[part])):
                error = _error(before[part], added[part], sums[part])
                (at,) = error.nonzero()
                found.append(torch.from_numpy(np.stack([at + float(start + first), error[at]], 1)))
        return found

    def _merge(self) -> None:
        """Turns the pairs into low terms of whole chunks."""
        pairs = torch.cat(self._pairs)
        self._pairs.clear()
        index, value = pairs[:, 0].long(), pairs[:, 1]
        chunks = index // CHUNK
        for chunk in chunks.unique().tolist():
            at, rest = index[chunks == chunk] - chunk * CHUNK, value[chunks == chunk]
            while len(rest):
                first = _first_of_each(at)
                term = torch.zeros_like(self.high[chunk * CHUNK : (chunk + 1) * CHUNK])
                self._add_term(chunk, term.index_copy_(0, at[first], rest[first]))
                at, rest = at[~first], rest[~first]

    def _add_term(self, chunk: int, added: torch.Tensor) -> None:
        """Adds `added` to the low terms of `chunk`."""
        terms = self._many.setdefault(chunk, [])
        for term in terms:
            before = term.clone()
            term.add_(added)
            added = _error(before, added, term)
            if not bool(added.any()):
                return
        terms.append(added)


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _pairs_of(terms: torch.Tensor, start: int) -> torch.Tensor:
    (at,) = terms.nonzero(as_tuple=True)
    return torch.stack([(at + start).double(), terms[at]], 1)


def _error(a: Any, b: Any, total: Any) -> Any:
    """a + b - total, exactly, where `total` is a + b rounded; 0 where that is not finite. Of tensors, or of arrays."""
    library = np if isinstance(a, np.ndarray) else torch
    with np.errstate(invalid="ignore"):
        rest = total - a
        error = (a - (total - rest)) + (b - rest)
    return library.where(library.isfinite(error), error, 0.0)


def _rounded_to_odd(terms: list[torch.Tensor]) -> torch.Tensor:
    """The sum of `terms`, of float64 and one shape, exactly or rounded to the neighbour whose last bit is 1."""
    terms, changed = [*terms], True
    while changed:
        changed = False
        for number in reversed(range(1, len(terms))):
            upper, lower = terms[number - 1], terms[number]
            total = upper + lower
            error = _error(upper, lower, total)
            changed = changed or not torch.equal(error, lower)
            terms[number - 1], terms[number] = total, error
    if len(terms) == 1:
        return terms[0]
    top, rest = terms[0], terms[1]
    bits = top.contiguous().view(torch.int64)
    outward = torch.where((rest > 0) == (top > 0), 1, -1)
    return (bits + torch.where((rest != 0) & (bits & 1 == 0), outward, 0)).view(torch.float64)


def _first_of_each(numbers: torch.Tensor) -> torch.Tensor:
    first = np.unique(numbers.cpu().numpy(), return_index=True)[1]
    mask = torch.zeros_like(numbers, dtype=torch.bool)
    mask[torch.from_numpy(first).to(numbers.device)] = True
    return mask


def _rounding_check() -> Callable[[Callable[[], object]], bool] | None:
    """A function that calls another and returns whether that rounded anything; None where the flag cannot be read."""
    bit = _INEXACT.get(platform.machine())
    try:
        library = ctypes.PyDLL(None)  # keeps Python's lock: what it calls returns at once
        clear, test = library.feclearexcept, library.fetestexcept
    except (OSError, TypeError, AttributeError):
        return None
    if bit is None:
        return None

    def rounds(operation: Callable[[], object]) -> bool:
        clear(bit)
        with np.errstate(invalid="ignore"):  # a gradient that overflowed is found by its norm
            operation()
        return bool(test(bit))

    one, small = np.ones(33), np.full(33, 2.0**-60, np.float32)
    works = rounds(lambda: np.add(one, small)) and not rounds(lambda: np.add(one, one))
    return rounds if works else None


_rounds = _rounding_check()
