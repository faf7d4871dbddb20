"""The same question around what was asked: with less memory, on fewer and more devices, with other batches. No torch.

A *grid* has the numbers of devices and the batches that are half or a quarter, twice or four times what was asked.
Its cells are searched from the asked one outwards until the time is up; what is left out then is named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import log2

from evenly.errors import EvenlyError, UserError
from evenly.hardware.cluster import MOST_DEVICES, Cluster
from evenly.planner.prediction import Prediction
from evenly.planner.request import CostSource, PlanRequest
from evenly.planner.search import search

WITHIN_S = 30.0
POWERS = (-2, -1, 0, 1, 2)
FURTHER = 24  # plans of the asked question
FEW = 8  # of each other cell
LESS_MEMORY = (0.75, 0.5, 0.375, 0.25)


@dataclass(frozen=True, kw_only=True)
class GridCell:
    """The answer for so many devices and such a batch; `refused` says why there is none, and is else empty.

    plans: fastest first, of those that leave the reserve, then fuller ones, then those for less memory.
    """

    devices: int
    batch: int
    cluster: str
    plans: Sequence[Prediction] = ()
    refused: str = ""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """All cells by (devices, batch).

    asked: which of them was asked for. left_out: cells for which there was no time.
    alone: of "devices" and "batch" why there is only the asked one.
    """

    asked: tuple[int, int]
    cells: Mapping[tuple[int, int], GridCell]
    left_out: Sequence[tuple[int, int]] = ()
    alone: Mapping[str, str]


def grid_of(
    request: PlanRequest,
    devices: int,
    *,
    source_of: Callable[[int], CostSource] | None,
    within_s: float = WITHIN_S,
    now_s: Callable[[], float] = time.monotonic,
) -> Grid:
    """Answers around `request`, whose best plan takes so many `devices`.

    source_of: what is planned for with another batch; None where the batch is not to be changed.
    """
    request, begin_s = replace(request, step_s=None), now_s()
    counts, why = device_counts(request, devices)
    alone = {"devices": why} if len(counts) == 1 else {}
    batches = [request.batch] if source_of is None else halved_and_doubled(request.batch)
    asked = (devices, request.batch)
    ordered = sorted(product(counts, batches), key=lambda one: (_distance(one, asked), one))
    cells: dict[tuple[int, int], GridCell] = {}
    for count, batch in ordered:
        if cells and now_s() - begin_s >= within_s:
            break
        scaled = on_devices(replace(request, batch=batch), count)
        if batch != request.batch and source_of is not None:
            try:
                scaled = replace(scaled, source=source_of(batch))
            except EvenlyError as problem:  # a job with fewer samples
                refused = GridCell(devices=count, batch=batch, cluster=str(scaled.cluster), refused=problem.found)
                cells[count, batch] = refused
                continue
        less = LESS_MEMORY if (count, batch) == asked else ()
        cells[count, batch] = _searched(scaled, count, less, more_time=lambda: now_s() - begin_s < within_s / 3)
    return Grid(asked=asked, cells=cells, left_out=[one for one in ordered if one not in cells], alone=alone)


def _distance(one: tuple[int, int], asked: tuple[int, int]) -> float:
    return sum(abs(log2(a / b)) for a, b in zip(one, asked, strict=True))


def halved_and_doubled(number: int) -> list[int]:
    """`number`, and what is left of it halved and doubled up to twice, ascending; whole numbers alone."""
    return sorted({int(number * 2**power) for power in POWERS if number * 2**power % 1 == 0})


def device_counts(request: PlanRequest, devices: int) -> tuple[list[int], str]:
    """Numbers of devices around `devices`: whole nodes, or a part that divides one; and why there are no further ones.

    More than the cluster has are whole nodes like its own, if its links are those of a data sheet and no most was set.
    """
    if request.only.ranks:
        return [devices], f"--only states {request.only.ranks} devices"
    node, most = request.cluster.devices, request.max_devices or MOST_DEVICES
    if request.cluster.backend:
        most = min(most, request.cluster.size)
    found = [
        count
        for count in halved_and_doubled(devices)
        if count <= most and (node % count == 0 or count % node == 0 or count == devices)
    ]
    return found, "no other number of whole nodes is near" if len(found) == 1 else ""


def on_devices(request: PlanRequest, count: int) -> PlanRequest:
    """The request on `count` devices: some of the cluster's own, or more nodes of their kind."""
    if count <= request.cluster.size:
        return replace(request, max_devices=count)
    return replace(request, cluster=grown(request.cluster, count), max_devices=None)


def grown(cluster: Cluster, count: int) -> Cluster:
    """A cluster of more devices: first a node is filled, as its kind is sold; then there are more nodes, like any."""
    cluster = replace(cluster, hops={})
    full = cluster.device.node
    if cluster.nodes == 1 and cluster.devices < count <= full and cluster.device.kind != "cpu":
        return replace(cluster, devices=count)
    each = full if cluster.nodes == 1 and cluster.devices < full and count % full == 0 else cluster.devices
    return replace(cluster, nodes=count // each, devices=each)


def _searched(request: PlanRequest, count: int, less: Sequence[float], *, more_time: Callable[[], bool]) -> GridCell:
    """less: shares of the memory for which the fastest plans are sought as well, while there is `more_time`."""
    cell = GridCell(devices=count, batch=request.batch, cluster=str(request.cluster))
    try:
        found = search(replace(request, top=FURTHER if less else FEW))
    except EvenlyError as problem:
        return replace(cell, refused=problem.found)
    if not found.plans:
        return replace(cell, plans=[found.nearest] if found.nearest else [], refused=found.change or "nothing fits")
    plans = [*found.plans, *found.fuller]
    for share in less:
        plans += _within(request, share) if more_time() else ()
    unique = dict[str, Prediction]()
    for one in plans:
        unique.setdefault(str(one.plan), one)
    return replace(cell, plans=[*unique.values()])


def _within(request: PlanRequest, share: float) -> Iterator[Prediction]:
    """The fastest plans for so much of the memory, as plans for all of it."""
    try:
        found = search(replace(request, top=3, memory_bytes=share * request.limit_bytes))
    except UserError:
        return
    for one in found.plans:
        yield replace(one, limit_bytes=request.limit_bytes, reserve_bytes=request.reserve_bytes)


# --- the frontier --------------------------------------------------------------------------------------


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Places of the points than which no other is better in one number and no worse in the other, by the first."""
    best, found = float("inf"), list[int]()
    for at in sorted(range(len(points)), key=points.__getitem__):
        if points[at][1] < best:
            best = points[at][1]
            found.append(at)
    return found
