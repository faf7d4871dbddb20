"""Profiles by the number of samples: what a pass computes and holds lies on a line, which three measured ones show.

Bytes that are held at most are the largest of several sums, each of which grows evenly with the samples. Such a maximum
bends upwards only, so that it is a line between two numbers of samples wherever a third between them lies on it. What
lies outside of those that were measured is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from evenly.model.parts import OpCost
from evenly.planner.profile import Profile, between

ROUNDING = 1e-9  # of floating-point operations and bytes that are interpolated


@dataclass
class SampleLine:
    """The profiles of microbatches that differ in the number of their samples only; measured: by that number."""

    measured: dict[int, Profile] = field(default_factory=dict[int, Profile])
    _straight: set[tuple[int, int, bool]] = field(default_factory=set[tuple[int, int, bool]])  # with a third in between
    _derived: dict[tuple[int, bool], Profile] = field(default_factory=dict[tuple[int, bool], Profile])

    def at(self, samples: int, elements: int, measure: Callable[[], Profile], *, held: bool = True) -> Profile:
        """The profile of so many samples, which have `elements` in all; measured where it does not follow.

        held: whether the bytes that it holds count; else it may be right in the operations alone.
        """
        if (found := self.measured.get(samples) or self._derived.get((samples, held))) is not None:
            return found
        for low, high, of_held in self._straight:
            if of_held == held and low < samples < high:
                found = between(self.measured[low], self.measured[high], elements)
                return self._derived.setdefault((samples, held), found)
        found = self.measured[samples] = measure()
        self._look_for_lines(samples)
        return found

    def _look_for_lines(self, latest: int) -> None:
        """Notes between which measured ones the profiles lie on a line."""
        for low, middle, high in combinations(sorted(self.measured), 3):
            if latest in (low, middle, high):
                few, found, many = self.measured[low], self.measured[middle], self.measured[high]
                if _computes_between(few, found, many):
                    self._straight.add((low, high, False))
                    if _holds_between(few, found, many):
                        self._straight.add((low, high, True))


def _computes_between(few: Profile, found: Profile, many: Profile) -> bool:
    """Whether the operations of `found` lie on a line between those of the others, and come in the same order."""
    if [one.event for one in few.intervals] != [one.event for one in many.intervals]:
        return False
    expected = between(few, many, found.elements)
    same = ("calls", "output_bytes", "collectives", "used", "parameters", "buffer_bytes")
    return all(getattr(found, name) == getattr(expected, name) for name in same) and (
        found.works.keys() == expected.works.keys() == few.works.keys()
        and all(_alike(found.works[key], expected.works[key]) for key in found.works)
    )


def _holds_between(few: Profile, found: Profile, many: Profile) -> bool:
    """Whether the bytes that `found` holds do."""
    expected = between(few, many, found.elements)
    return found.intervals == expected.intervals and found.branch_bytes == expected.branch_bytes


def _alike(found: Sequence[OpCost], expected: Sequence[OpCost]) -> bool:
    return len(found) == len(expected) and all(
        (one.kind, one.times, one.rows, one.inner, one.columns, one.dtype)
        == (other.kind, other.times, other.rows, other.inner, other.columns, other.dtype)
        and math.isclose(one.flops, other.flops, rel_tol=ROUNDING)
        and math.isclose(one.moved_bytes, other.moved_bytes, rel_tol=ROUNDING)
        for one, other in zip(found, expected, strict=True)
    )
