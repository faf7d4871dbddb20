"""Which parameters are reduced together (buckets) and which are gathered together (units of ZeRO 3).

Decided from names and sizes alone, by the engine of a model's parameters and by the planner of a profile's. Pure.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

# Small enough that the first is sent early in the last backward, large enough that latency does not count: the
# sizes that torch's DistributedDataParallel arrived at.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
IN_FLIGHT = 3  # buckets at a time whose parts are between ranks, under zero and where sums are exact; bounds memory
SMALL_BYTES = (
    4 << 20
)  # blocks this small are gathered with the root: a unit of their own costs more latency than memory
WHOLE_BYTES = (
    16 << 20
)  # units this small stay gathered between forward and backward: that costs less than another gather


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


def needs_tail_bucket(last_bytes: int, *, widened: bool) -> bool:
    """Whether flags and numbers get a bucket of their own, rather than the last one in float64.

    widened: whether the last bucket is in float64 anyway. A small bucket is converted instead.
    """
    return not widened and last_bytes > FIRST_BUCKET_BYTES


@dataclass(frozen=True)
class UnitMembers:
    """The parameters, by number, of a unit; whole: whether they stay gathered until the backward."""

    block: str
    members: tuple[int, ...]
    whole: bool


def unit_members(parameters: Sequence[tuple[Sequence[str], int]], blocks: Iterable[str]) -> list[UnitMembers]:
    """A unit for each of the `blocks` that is large and shares no parameter with modules outside it.

    parameters: (all names, bytes) of each.
    """
    found: list[tuple[str, tuple[int, ...], int]] = []
    for block in blocks:
        inside = [[name.startswith(f"{block}.") for name in names] for names, _ in parameters]
        members = tuple(number for number, names in enumerate(inside) if any(names))
        if members and all(all(inside[number]) for number in members):
            found.append((block, members, sum(parameters[number][1] for number in members)))
    large = are_units([size for _, _, size in found])
    units = [one for one, is_large in zip(found, large, strict=True) if is_large]
    whole = stay_gathered([size for _, _, size in units])
    return [UnitMembers(block, members, stays) for (block, members, _), stays in zip(units, whole, strict=True)]


def are_units(sizes: Sequence[int]) -> list[bool]:
    """Which blocks of these bytes become units: all but the smallest, up to `SMALL_BYTES` together."""
    room, large = SMALL_BYTES, [True] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda at: sizes[at]):
        room -= sizes[number]
        large[number] = room < 0
    return large


def stay_gathered(sizes: Sequence[int]) -> list[bool]:
    """Which units of these bytes, in order, stay gathered until the backward: the last, up to `WHOLE_BYTES`."""
    room, whole = WHOLE_BYTES, [False] * len(sizes)
    for number in reversed(range(len(sizes))):
        room -= sizes[number]
        whole[number] = room >= 0
    return whole


def deal_out(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """name -> rank, so that the sums of their sizes are about even: the largest first, each to the least loaded."""
    loads, owners = [0] * ranks, dict[str, int]()
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = rank = loads.index(min(loads))
        loads[rank] += sizes[name]
    return owners
