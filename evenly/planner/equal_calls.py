"""Rows of blocks that do the same: a model is run with two of each row, and the others repeat what the second does.

A row is found in the profile of the whole model: calls of blocks, one after the other, of which each computes the same
operations, holds and frees the same bytes in the same order, and uses parameters of the same shapes. That the shorter
model does what the whole one does is found out, too: once its profile, with the calls put back, has to be that of the
whole model. A model whose code goes by the number or the position of its blocks is not shortened by this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from evenly.planner.profile import MODEL, Interval, Parameter, Pass, Profile

KEPT = 2  # calls of a row: neighbours, which have to do the same
PASSES: tuple[Pass, ...] = ("forward", "backward")
_Intervals = dict[int, list[Interval]]  # by call


@dataclass(frozen=True)
class EqualCalls:
    """The calls of the whole model.

    blocks: the name of each call's block. sources: for each the number of the call in the shorter model that does the
    same. pairs: numbers in the shorter model of neighbours that have to do the same.
    parameters: of the whole model, in its order. buffer_bytes: of the buffers that the shorter one lacks.
    """

    blocks: Sequence[str]
    sources: Sequence[int]
    pairs: Sequence[tuple[int, int]]
    parameters: Mapping[str, Parameter]
    buffer_bytes: int = 0

    @cached_property
    def left_out(self) -> dict[str, str]:
        """Name of each block that the shorter model lacks -> that of the one that does the same."""
        kept = self._kept
        return {
            name: self.blocks[kept[source]]
            for number, (name, source) in enumerate(zip(self.blocks, self.sources, strict=True))
            if kept[source] != number
        }

    @cached_property
    def _kept(self) -> list[int]:
        return [self.sources.index(source) for source in range(max(self.sources) + 1)]

    def alike(self, name: str) -> str:
        """The name of the parameter in the shorter model that is as `name` in the whole one."""
        for left_out, kept in self.left_out.items():
            if name.startswith(f"{left_out}."):
                return kept + name.removeprefix(left_out)
        return name

    def whole(self, short: Profile) -> Profile | None:
        """The profile of the whole model from that of the shorter one; None where its neighbours differ."""
        if [one.block for one in short.calls] != [self.blocks[number] for number in self._kept]:
            return None
        groups = _by_call(short)
        if groups is None or any(_does(short, groups, a) != _does(short, groups, b) for a, b in self.pairs):
            return None
        places = [MODEL, *self.sources, len(short.calls)]
        numbers = [*range(MODEL, len(self.blocks) + 1)]
        at = [*zip(numbers, places, strict=True)]
        return replace(
            short,
            intervals=tuple(self._intervals(*groups)),
            calls=tuple(
                replace(short.calls[source], block=name) for name, source in zip(self.blocks, self.sources, strict=True)
            ),
            parameters={name: self._parameter(name, short) for name in self.parameters},
            buffer_bytes=short.buffer_bytes + self.buffer_bytes,
            used={
                number: frozenset(self._renamed(name, number) for name in short.used[place])
                for number, place in at
                if place in short.used
            },
            works={(one, n): short.works[one, p] for one in PASSES for n, p in at if (one, p) in short.works},
            branch_bytes={number: short.branch_bytes[place] for number, place in at if place in short.branch_bytes},
            collectives={
                (one, n): short.collectives[one, p] for one in PASSES for n, p in at if (one, p) in short.collectives
            },
        )

    def _parameter(self, name: str, short: Profile) -> Parameter:
        found = short.parameters.get(name)
        return found or replace(short.parameters[self.alike(name)], names=self.parameters[name].names)

    def _renamed(self, name: str, number: int) -> str:
        if not 0 <= number < len(self.blocks):
            return name
        source = self.blocks[self._kept[self.sources[number]]]
        return self.blocks[number] + name.removeprefix(source) if name.startswith(f"{source}.") else name

    def _intervals(self, forward: _Intervals, backward: _Intervals) -> Iterator[Interval]:
        yield from self._moved(forward[MODEL], MODEL, MODEL)
        for number, source in enumerate(self.sources):
            yield from self._moved(forward[source], source, number)
        yield from self._moved(forward[len(self._kept)], len(self._kept), len(self.blocks))
        for number, source in reversed([*enumerate(self.sources)]):
            yield from self._moved(backward[source], source, number)
        yield from self._moved(backward[MODEL], MODEL, MODEL)

    def _moved(self, intervals: Sequence[Interval], source: int, number: int) -> Iterator[Interval]:
        """What call `source` of the shorter model does, as call `number` of the whole one."""
        for one in intervals:
            event = one.event
            kept = {source: number, MODEL: MODEL, len(self._kept): len(self.blocks)}
            call = kept[event.call] if event.call in kept else self._kept[event.call]
            yield replace(one, event=replace(event, call=call, parameter=self._renamed(event.parameter, number)))


def find_equal_calls(whole: Profile) -> EqualCalls | None:
    """The rows of a model's profile; None where less than half of its calls can be left out."""
    groups, names = _by_call(whole), [one.block for one in whole.calls]
    if groups is None or len({*names}) < len(names):
        return None
    does = [(name.rpartition(".")[0], _does(whole, groups, number)) for number, name in enumerate(names)]
    sources: list[int] = []
    pairs: list[tuple[int, int]] = []
    for _, row in groupby(range(len(names)), does.__getitem__):
        count, first = sum(1 for _ in row), len({*sources})
        sources += [first + min(place, KEPT - 1) for place in range(count)]
        if count > KEPT:
            pairs.append((first, first + KEPT - 1))
    if not names or 2 * len({*sources}) > len(names):
        return None
    return EqualCalls(names, sources, pairs, whole.parameters)


def _does(profile: Profile, groups: tuple[_Intervals, _Intervals], number: int) -> list[Any]:
    call = profile.calls[number]
    inside = f"{call.block}."
    found: list[Any] = [call.input_bytes, call.output_bytes, profile.branch_bytes.get(number)]
    found.append({name.removeprefix(inside) for name in profile.used.get(number, ())})
    for one in PASSES:
        found += [profile.works.get((one, number)), profile.collectives.get((one, number))]
    for name, parameter in profile.parameters.items():
        if name.startswith(inside):
            found.append((name.removeprefix(inside), parameter.shape, parameter.dtype, parameter.trained))
    for interval in (*groups[0][number], *groups[1][number]):
        event = interval.event
        place = event.call - number if event.call >= 0 else MODEL
        found.append((interval.peak, interval.left, event.what, place, event.parameter.removeprefix(inside)))
    return found


def _by_call(profile: Profile) -> tuple[_Intervals, _Intervals] | None:
    """The intervals of each call's forward and backward, what comes before and after the calls apart (MODEL, number of
    calls); None where they do not follow each other.
    """
    last = len(profile.calls)
    forward: _Intervals = {number: [] for number in range(MODEL, last + 1)}
    backward: _Intervals = {number: [] for number in range(MODEL, last)}
    at = MODEL
    for one in profile.forward:
        call = one.event.call
        call = call if call >= 0 else MODEL if one.event.what == "begin" else last
        if call < at:
            return None
        at = call
        forward[at].append(one)
    at = last - 1
    for one in profile.backward:
        backward[at].append(one)
        if one.event.what == "end" and one.event.call >= 0:
            if one.event.call != at:
                return None
            at -= 1
    return forward, backward
