"""Memory of evenly's own plans: what a rank holds from the begin of a step to its end, and at most.

Nothing is fitted: the intervals of a profile (`planner.profile`) are put one behind the other as the engines run the
microbatches, and what the engines hold besides them is added and taken away where they do. A *meter* follows the sum.

Causes are those of `MemoryByCause`, with the sums in a wider type apart from the gradients made of them, as the tracker
counts them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import torch

from evenly.parallel.data.buckets import is_small
from evenly.parallel.data.grouping import IN_FLIGHT, bucket_members, needs_tail_bucket
from evenly.parallel.data.row_layout import RowLayout
from evenly.parallel.data.squares import SQUARED_AT_ONCE, squared_together
from evenly.planner.prediction import MemoryByCause
from evenly.planner.profile import Interval, Parameter

Cause = Literal[
    "parameters", "gradients", "sums", "optimizer", "activations", "gathered", "buffers", "temporaries", "context"
]
FLOAT64_BYTES = 8  # bytes of float64


@dataclass(eq=False)
class Meter:
    """Bytes by cause, and as they were when they were most."""

    now: dict[Cause, int] = field(default_factory=dict[Cause, int])
    total: int = 0
    peak: int = 0
    at_peak: dict[Cause, int] = field(default_factory=dict[Cause, int])

    def add(self, cause: Cause, size: int) -> None:
        """Takes `size` more bytes, or gives some back."""
        self.now[cause] = self.now.get(cause, 0) + size
        self.total += size
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.now)

    def for_a_while(self, cause: Cause, size: int) -> None:
        """Takes `size` bytes and gives them back."""
        self.add(cause, size)
        self.add(cause, -size)

    def interval(self, interval: Interval) -> None:
        """Plays an interval."""
        total = self.total + interval.peak.total
        if total > self.peak:
            self.peak, self.at_peak = total, dict(self.now)
            for cause, size in _both(interval.peak.activations, interval.peak.temporaries):
                self.at_peak[cause] = self.at_peak.get(cause, 0) + size
        for cause, size in _both(interval.left.activations, interval.left.temporaries):
            self.now[cause] = self.now.get(cause, 0) + size
        self.total += interval.left.total

    @property
    def by_cause(self) -> MemoryByCause:
        found: dict[str, float] = {cause: float(size) for cause, size in self.at_peak.items()}
        found["gradients"] = found.get("gradients", 0.0) + found.pop("sums", 0.0)
        return MemoryByCause(**found)


def _both(activations: int, temporaries: int) -> tuple[tuple[Cause, int], tuple[Cause, int]]:
    return ("activations", activations), ("temporaries", temporaries)


# ------------------------------------------------------------------------------------------------- adding gradients


class Sums(ABC):
    """What one way of adding up gradients holds, besides what the passes do; the calls are those of a step."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def begin(self, runs: int) -> None:  # noqa: B027
        """A step begins, of so many backward passes on this rank."""

    def expect_last(self) -> None:  # noqa: B027
        """The next backward pass is the last."""

    def entered(self, call: int) -> None:  # noqa: B027
        """The forward pass of a call begins; -1 stands for the model's."""

    def left(self, call: int) -> None:  # noqa: B027
        """It ends."""

    def turned(self, call: int) -> None:  # noqa: B027
        """The backward pass of a call begins."""

    def returned(self, call: int) -> None:  # noqa: B027
        """It ends; -1 stands for the model's."""

    def accumulated(self, name: str) -> None:  # noqa: B027
        """A parameter's gradient is computed."""

    def freed(self, name: str) -> None:  # noqa: B027
        """The backward pass has let go of it."""

    def finish_backward(self) -> None:  # noqa: B027
        """A backward pass is over."""

    @abstractmethod
    def finish_reduce(self) -> None:
        """Sums over ranks, divided."""

    @abstractmethod
    def norm_lengths(self, *, apart: bool) -> list[int]:
        """Elements of each tensor that the norm is taken of, in order; apart: parameter by parameter."""

    def all_gather_parameters(self) -> None:  # noqa: B027
        """After the update."""


def in_buckets(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    """What is reduced together, in the order of the backward pass."""
    trained = [one for one in parameters if one.trained]
    return [[trained[number] for number in bucket] for bucket in bucket_members((p.dtype, p.bytes) for p in trained)]


class FullSums(Sums):
    """Every rank has all gradients (`parallel.data.gradients`)."""

    def __init__(
        self, meter: Meter, parameters: Sequence[Parameter], *, accumulate_float64: bool, numbers: int, ranks: int
    ) -> None:
        """numbers: that are summed with the gradients. ranks: over which they are."""
        super().__init__(meter)
        self._exact, self._ranks = accumulate_float64, ranks
        self._lengths: list[int] = []
        self._elements: list[int] = []
        buckets = in_buckets(parameters)
        last = buckets[-1] if buckets else []
        widened = not accumulate_float64 and (not last or last[0].dtype is torch.float64)
        if ranks > 1 and needs_tail_bucket(sum(one.bytes for one in last), widened=widened):
            buckets.append([])
        for number, bucket in enumerate(buckets):
            self._hold(bucket, accumulate_float64=accumulate_float64 or (ranks > 1 and number == len(buckets) - 1))
            self._elements += [one.elements for one in bucket]
        self._tail = sum(len(bucket) for bucket in buckets) + numbers
        meter.add("sums", 2 * self._tail * FLOAT64_BYTES if ranks > 1 else 0)

    def _hold(self, bucket: Sequence[Parameter], *, accumulate_float64: bool) -> None:
        length = sum(one.elements for one in bucket)
        self._lengths.append(length)
        size = bucket[0].dtype.itemsize if bucket else FLOAT64_BYTES
        self.meter.add("gradients", length * size)
        if accumulate_float64 and size != FLOAT64_BYTES:
            self.meter.add("sums", length * FLOAT64_BYTES)

    def finish_reduce(self) -> None:
        if self._exact and self._ranks > 1:  # parts of the other ranks: of buckets in flight, and all of the last
            *others, last = self._lengths
            received = sum(others[-IN_FLIGHT:]) + self._ranks * (last + self._tail)
            self.meter.for_a_while("buffers", received * FLOAT64_BYTES)

    def norm_lengths(self, *, apart: bool) -> list[int]:
        return self._elements if apart else self._lengths


class LocalSums(Sums):
    """Autograd adds up the gradients by itself (`parallel.data.local_gradients`): most are there from the first on."""

    def __init__(self, meter: Meter, parameters: Sequence[Parameter], *, on_cpu: bool) -> None:
        super().__init__(meter)
        buckets = in_buckets(one for one in parameters if on_cpu and is_small(one.elements))
        self._lengths = [sum(one.elements for one in bucket) for bucket in buckets]
        self._small = [one.elements for bucket in buckets for one in bucket]
        others = (one for one in parameters if one.trained and not (on_cpu and is_small(one.elements)))
        self._others = {one.names[0]: one for one in others}
        self._there: set[str] = set()
        meter.add("gradients", sum(one.bytes for bucket in buckets for one in bucket))

    def freed(self, name: str) -> None:
        if name in self._others and name not in self._there:
            self._there.add(name)
            self.meter.add("gradients", self._others[name].bytes)

    def finish_reduce(self) -> None:
        """Nothing is sent."""

    def norm_lengths(self, *, apart: bool) -> list[int]:
        others = [one.elements for one in self._others.values()]
        return (self._small if apart else self._lengths) + others


class ShardedSums(Sums):
    """Every rank keeps the gradients of its pieces (`parallel.data.partition`)."""

    def __init__(
        self,
        meter: Meter,
        parameters: Sequence[Parameter],
        *,
        zero: int,
        ranks: int,
        accumulate_float64: bool,
        rounds: int,
    ) -> None:
        super().__init__(meter)
        self._zero, self._ranks, self._rounds = zero, ranks, rounds
        self._parameters = {one.names[0]: one for one in parameters}
        self._buckets = in_buckets(one for one in parameters if one.shape)
        self._bucket_of = {one.names[0]: n for n, bucket in enumerate(self._buckets) for one in bucket}
        self._lengths = [sum(piece_elements(one, ranks) for one in bucket) for bucket in self._buckets]
        self._sizes = [bucket[0].dtype.itemsize if bucket else FLOAT64_BYTES for bucket in self._buckets]
        self._added_in = [FLOAT64_BYTES if accumulate_float64 else size for size in self._sizes]
        self._messages = [
            ranks * length * (size if zero == 2 else added_in)
            for length, size, added_in in zip(self._lengths, self._sizes, self._added_in, strict=True)
        ]
        self._waiting: list[int] = []
        self._totals: dict[str, int] = {}
        self._sending, self._sent = False, 0
        self._flying: deque[int] = deque()
        self._summed: set[int] = set()

    def begin(self, runs: int) -> None:
        self._left = self._rounds if self._zero == 2 else 1
        self._begin_round(sending=self._zero == 2)

    def _begin_round(self, *, sending: bool) -> None:
        self._sending, self._sent = sending, 0
        self._waiting = [len(bucket) for bucket in self._buckets]

    def expect_last(self) -> None:
        self._sending = True

    def _total_size(self, name: str) -> int:
        parameter = self._parameters[name]
        return parameter.bytes if self._zero == 2 else parameter.elements * self._added_in[self._bucket_of[name]]

    def accumulated(self, name: str) -> None:
        if name in self._bucket_of and name not in self._totals and self._widens(name):
            self._totals[name] = self._total_size(name)
            self.meter.add("sums", self._totals[name])

    def _widens(self, name: str) -> bool:
        bucket = self._bucket_of[name]
        return self._zero == 1 and self._added_in[bucket] != self._sizes[bucket]

    def freed(self, name: str) -> None:
        if name not in self._bucket_of:
            return
        if name not in self._totals:
            self._totals[name] = self._total_size(name)
            self.meter.add("sums", self._totals[name])
        if self._sending:
            self._waiting[self._bucket_of[name]] -= 1
            ready = self._sent
            while ready < len(self._buckets) and self._waiting[ready] <= 0:
                ready += 1
            self._send_with(name, ready)

    def _send_with(self, name: str, end: int) -> None:
        """Sends while the gradient that came last is still there, besides its total or as that."""
        widened = self._widens(name)
        size = self._parameters[name].bytes if widened or end > self._bucket_of[name] >= self._sent else 0
        self.meter.add("temporaries", size if widened else 0)
        if not widened and size:
            self.meter.add("sums", -self._totals[name])
            self._totals[name] = 0
            self.meter.add("temporaries", size)
        self._send_until(end)
        self.meter.add("temporaries", -size)

    def _send_until(self, end: int) -> None:
        for number in range(self._sent, end):
            if len(self._flying) == IN_FLIGHT:
                self._land()
            self.meter.add("buffers", self._messages[number])
            for one in self._buckets[number]:
                self.meter.add("sums", -self._totals.pop(one.names[0], 0))
            if number not in self._summed:
                self._summed.add(number)
                self.meter.add("sums", self._lengths[number] * self._added_in[number])
            self.meter.add("buffers", self._messages[number])  # what the others send
            self._flying.append(number)
        self._sent = max(self._sent, end)

    def _land(self) -> None:
        self.meter.add("buffers", -2 * self._messages[self._flying.popleft()])

    def finish_backward(self) -> None:
        if self._sending:
            self._finish_round()

    def _finish_round(self) -> None:
        self._send_until(len(self._buckets))
        self._left -= 1
        self._begin_round(sending=self._left > 0)

    def finish_reduce(self) -> None:
        while self._left > 0:
            self._finish_round()
        while self._flying:
            self._land()
        for length, size, added_in in zip(self._lengths, self._sizes, self._added_in, strict=True):
            if size != added_in:
                self.meter.add("gradients", length * size)
                self.meter.add("sums", -length * added_in)

    def norm_lengths(self, *, apart: bool) -> list[int]:
        pieces = [piece_elements(one, self._ranks) for bucket in self._buckets for one in bucket]
        return pieces if apart else self._lengths

    def all_gather_parameters(self) -> None:
        rows = [length * size * (1 + self._ranks) for length, size in zip(self._lengths, self._sizes, strict=True)]
        for both in pairwise([0, *rows]):
            self.meter.for_a_while("buffers", sum(both))


def piece_elements(parameter: Parameter, ranks: int) -> int:
    """Elements of a piece as it is filled up."""
    return RowLayout.of(parameter.shape, ranks).length if parameter.shape else 0


def piece_shape(parameter: Parameter, ranks: int, position: int | None) -> Sequence[int]:
    """Shape of the piece that the rank at `position` steps; None: of all."""
    if not parameter.shape or position is None:
        return parameter.shape
    rows = RowLayout.of(parameter.shape, ranks).own(position)
    return (rows.stop - rows.start, *parameter.shape[1:])


# ------------------------------------------------------------------------------------------------------------ a step


def play(meter: Meter, sums: Sums, intervals: Iterable[Interval]) -> None:
    """Adds the intervals of a pass, with what the sums of gradients do at their events."""
    for one in intervals:
        meter.interval(one)
        event = one.event
        if event.what == "gradient":
            sums.accumulated(event.parameter)
        elif event.what == "freed":
            sums.freed(event.parameter)
        elif event.stage == "forward" and event.what:
            (sums.entered if event.what == "begin" else sums.left)(event.call)
        elif event.what:
            (sums.turned if event.what == "begin" else sums.returned)(event.call)


def norm_bytes(lengths: Iterable[int], itemsize: int) -> int:
    """What squaring gradients takes for a while: a chunk in float64, and what was joined for it."""
    given, widened = [*lengths], 0 if itemsize == FLOAT64_BYTES else FLOAT64_BYTES
    groups = squared_together(given)
    return max(
        ((itemsize * (len(one) > 1) + widened) * min(sum(given[n] for n in one), SQUARED_AT_ONCE) for one in groups),
        default=0,
    )
