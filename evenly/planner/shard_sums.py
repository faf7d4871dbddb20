"""The memory of gradients and parameters where `fully_shard` shards them: units gathered, resharded and reduced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evenly.planner.memory import FLOAT64_BYTES, Meter, Sums, piece_elements
from evenly.planner.profile import Parameter


@dataclass(frozen=True)
class Unit:
    """What is gathered together (`parallel.data.shards`); the calls are those of its block, none of the root.

    whole: whether it stays so from its forward to its backward.
    """

    parameters: Sequence[Parameter]
    calls: frozenset[int] = frozenset()
    whole: bool = False


class ShardSums(Sums):
    """Parameters are cut too (`parallel.data.shards`), and whole while they compute."""

    def __init__(
        self,
        meter: Meter,
        units: Sequence[Unit],
        *,
        ranks: int,
        accumulate_float64: bool,
        on_host: bool,
        split_backward: bool,
    ) -> None:
        """units: the root first. ranks: of the shard group. on_host: whether shards live there.

        split_backward: whether gradients of parameters come later than those of inputs; units stay whole until then.
        """
        super().__init__(meter)
        self._units, self._on_host = units, on_host
        self._padded = [
            sum(piece_elements(one, ranks) * one.dtype.itemsize for one in unit.parameters) for unit in units
        ]
        self._trained = [sum(piece_elements(one, ranks) for one in unit.parameters if one.trained) for unit in units]
        self._ranks, self._accumulate_float64 = ranks, accumulate_float64
        self._sizes = [unit.parameters[0].dtype.itemsize if unit.parameters else FLOAT64_BYTES for unit in units]
        self._unit_of = {call: n for n, unit in enumerate(units) for call in unit.calls}
        self._home = {one.names[0]: n for n, unit in enumerate(units) for one in unit.parameters}
        self._bytes = {one.names[0]: one.bytes for unit in units for one in unit.parameters}
        self._gathered: set[int] = set()
        self._sent_for: set[int] = set()  # all-gathers begun
        self._grads: dict[int, int] = {}
        self._used: list[int] = []  # units by their forward passes
        self._partial: set[int] = set()
        self._reducing = 0
        self._reduced = 0  # kept until the end of the last backward pass
        self._last = False
        self._in_parts = split_backward
        self._full_gradients: set[str] = set()  # parameters with a whole gradient
        self._waiting: list[int] = []  # units whose gradients are reduced at the end of the step

    def begin(self, runs: int) -> None:
        self._last = False

    def expect_last(self) -> None:
        self._last = True

    # ------------------------------------------------------------------------------------------------ gathering
    def entered(self, call: int) -> None:
        unit = self._unit_of.get(call, 0)
        if call < 0:
            self._used.clear()
        if call >= 0 and unit == 0:
            return
        if unit not in self._gathered and self._padded[unit]:
            self._send_for(unit)
            self._whole(unit)
        if unit + 1 < len(self._units) and unit + 1 not in self._gathered:
            self._send_for(unit + 1)

    def left(self, call: int) -> None:
        unit = self._unit_of.get(call, 0)
        if call < 0:
            self._used.append(0)
        elif unit and not self._in_parts:
            self._used.append(unit)
            if not self._units[unit].whole:
                self._reshard(unit)

    def turned(self, call: int) -> None:
        unit = self._unit_of.get(call, 0)
        if call >= 0 and unit == 0:
            return
        if unit not in self._gathered and self._padded[unit]:
            self._send_for(unit)
            self._whole(unit)
        if self._used and self._used[-1] == unit:
            self._used.pop()
            if self._used and self._used[-1] not in self._gathered:
                self._send_for(self._used[-1])

    def _send_for(self, unit: int) -> None:
        if unit not in self._sent_for:
            self._sent_for.add(unit)
            self.meter.add("buffers", self._message(unit))

    def _message(self, unit: int) -> int:
        """What the shards of all ranks are received in; of one rank they are copied."""
        return self._ranks * self._padded[unit] if self._ranks > 1 else 0

    def _whole(self, unit: int) -> None:
        self._gathered.add(unit)
        self.meter.add("gathered", self._ranks * self._padded[unit])
        self._forget(unit)

    def _forget(self, unit: int) -> None:
        if unit in self._sent_for:
            self._sent_for.discard(unit)
            self.meter.add("buffers", -self._message(unit))

    def _reshard(self, unit: int) -> None:
        if unit in self._gathered:
            self._gathered.discard(unit)
            self.meter.add("gathered", -self._ranks * self._padded[unit])

    # -------------------------------------------------------------------------------------------------- reducing
    def freed(self, name: str) -> None:
        unit = self._home[name]
        if self._in_parts:
            self._keep(unit, name)
            return
        self._grads[unit] = self._grads.get(unit, 0) + self._bytes[name]
        self.meter.add("gradients", self._bytes[name])

    def _keep(self, unit: int, name: str) -> None:
        if name not in self._full_gradients:
            self._full_gradients.add(name)
            size = (
                self._bytes[name]
                // self._sizes[unit]
                * (FLOAT64_BYTES if self._accumulate_float64 else self._sizes[unit])
            )
            self._grads[unit] = self._grads.get(unit, 0) + size
            self.meter.add("gradients", size)
            if unit not in self._waiting:
                self._waiting.append(unit)

    def returned(self, call: int) -> None:
        unit = self._unit_of.get(call, 0)
        if self._in_parts or (call >= 0 and unit == 0):
            return
        self._reshard(unit)
        self._reduce(unit)
        if call < 0:
            for ahead in [*self._sent_for]:  # and not run
                self._forget(ahead)
        if call < 0 and self._last:
            self.meter.add("sums", -self._reduced)
            self.meter.add("buffers", -self._reducing)
            self._reduced = self._reducing = 0

    def _reduce(self, unit: int) -> None:
        if not self._trained[unit]:
            return
        self.meter.add("buffers", -self._reducing)
        added_in = FLOAT64_BYTES if self._accumulate_float64 else self._sizes[unit]
        row = self._trained[unit] * added_in
        sent_in = added_in if self._in_parts or self._ranks == 1 else self._sizes[unit]
        self._reducing = self._ranks * self._trained[unit] * sent_in
        self.meter.add("buffers", self._reducing)
        self.meter.add("gradients", -self._grads.pop(unit, 0))
        self.meter.add("sums", row)
        self.meter.for_a_while("buffers", self._reducing)  # what the others send; of one rank a quotient
        if not self._last:
            if unit in self._partial:
                self.meter.add("sums", -row)
            self._partial.add(unit)
            return
        self._finish(unit, row, added_in)

    def _finish(self, unit: int, row: int, added_in: int) -> None:
        if added_in != self._sizes[unit] and not self._on_host:
            self.meter.add("gradients", self._trained[unit] * self._sizes[unit])
            self._reduced += row
        elif self._on_host:
            self._reduced += row
        else:
            self.meter.add("sums", -row)
            self.meter.add("gradients", row)
        if unit in self._partial:
            self._partial.discard(unit)
            self.meter.add("sums", -row)

    def finish_reduce(self) -> None:
        if self._in_parts:
            for unit in self._waiting:
                self._reshard(unit)
                self._last = True
                self._reduce(unit)
            self._waiting.clear()
            self.meter.add("sums", -self._reduced)
            self.meter.add("buffers", -self._reducing)
            self._reduced = self._reducing = 0

    def norm_lengths(self, *, apart: bool) -> list[int]:
        if self._on_host:
            return []
        return [piece_elements(one, self._ranks) for unit in self._units for one in unit.parameters if one.trained]
