"""Which parameters are reduced together (buckets) and which are gathered together (units of ZeRO 3).

Decided from names and sizes alone, by the engine of a model's parameters and by the planner of a profile's. Pure.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

# Small enough that the first is sent early in the last backward, large enough that latency does not count: the
# sizes that torch's DistributedDataParallel arrived at.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
SMALL_BYTES = 4 << 20  # so much is gathered with the root: cut apart it saves less than it costs to begin gathering
WHOLE_BYTES = 16 << 20  # so much stays whole between forward and backward: to gather it again costs more than it holds


def bucket_members(parameters: Iterable[tuple[Hashable, int]]) -> list[list[int]]:
    """Numbers of the parameters in each bucket, in the order in which a backward finishes them.

    parameters: (kind, bytes) of each, in the order of their definition; a bucket is of one kind.
    """
    buckets: list[list[int]] = []
    room, kind = 0, None
    for number, (own_kind, size) in reversed([*enumerate(parameters)]):
        if not buckets or kind != own_kind or (room < size and buckets[-1]):
            room, kind = BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES, own_kind
            buckets.append([])
        buckets[-1].append(number)
        room -= size
    return buckets


def tail_stands_alone(last_bytes: int, *, widened: bool) -> bool:
    """Whether a bucket for the flags and numbers alone follows the last one, which is not of float64 unless `widened`.

    A small bucket is rather widened than followed by another.
    """
    return not widened and last_bytes > FIRST_BUCKET_BYTES


@dataclass(frozen=True)
class UnitMembers:
    """The parameters, by number, that are gathered with a block; whole: whether they stay so until the backward."""

    block: str
    members: tuple[int, ...]
    whole: bool


def unit_members(parameters: Sequence[tuple[Sequence[str], int]], blocks: Iterable[str]) -> list[UnitMembers]:
    """A unit for each of the `blocks` that is large and shares no parameter with anything outside; the rest is the
    root's.

    parameters: (all names, bytes) of each.
    """
    found: list[tuple[str, tuple[int, ...], int]] = []
    for block in blocks:
        inside = [[name.startswith(f"{block}.") for name in names] for names, _ in parameters]
        members = tuple(number for number, names in enumerate(inside) if any(names))
        if members and all(all(inside[number]) for number in members):
            found.append((block, members, sum(parameters[number][1] for number in members)))
    large = large_ones([size for _, _, size in found])
    kept = [one for one, is_large in zip(found, large, strict=True) if is_large]
    whole = replicated_ones([size for _, _, size in kept])
    return [UnitMembers(block, members, stays) for (block, members, _), stays in zip(kept, whole, strict=True)]


def large_ones(sizes: Sequence[int]) -> list[bool]:
    """Which blocks of these bytes are worth a unit each: the smallest, as many as are small together, are not."""
    room, large = SMALL_BYTES, [True] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda at: sizes[at]):
        room -= sizes[number]
        large[number] = room < 0
    return large


def replicated_ones(sizes: Sequence[int]) -> list[bool]:
    """Which units of these bytes, in their order, stay whole from the forward on: what the backward begins with."""
    room, whole = WHOLE_BYTES, [False] * len(sizes)
    for number in reversed(range(len(sizes))):
        room -= sizes[number]
        whole[number] = room >= 0
    return whole
