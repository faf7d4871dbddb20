"""How fast ranks talk: time of each operation over sizes, bandwidths, and the two numbers that a planner needs.

Sizes and bandwidths are those of nccl-tests (doc/PERFORMANCE.md there): the *size* of an operation is that of its
largest buffer on one rank; *algorithm bandwidth* is size / time; *bus bandwidth* multiplies it by what must cross a
link per byte of size, so that it compares with the link's own, whatever the operation and the number of ranks.

*alpha* and *beta* fit time = alpha + beta x size: what an operation costs at any size, s, and per byte, s/byte
(Hockney, 1994). Relative errors are made least, so that small sizes count as much as large ones.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from evenly.comm.collectives import gather_values, sum_at_once
from evenly.comm.connect import connect, disconnect
from evenly.comm.groups import Group
from evenly.comm.operations import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
)
from evenly.comm.ring import ring_all_reduce
from evenly.comm.shared_memory import share_memory
from evenly.comm.transport import even_sizes
from evenly.errors import UserError
from evenly.hardware.cluster import Rates
from evenly.hardware.probe import probe
from evenly.launcher.environment import find_here

TIME_PER_SIZE_S = 0.25
ROUNDS_AT_ONCE, MOST_ROUNDS = 3, 200
WARM_ROUNDS = 1
LONGEST_ROUND_S = 1.5  # a size that would take longer is left out, and all beyond
GROWTH = 4  # from a size to the next


@dataclass(frozen=True)
class Measured:
    """One operation at one size. seconds: median over rounds of the slowest rank. Bandwidths in bytes per second.

    nodes: over which the ranks are spread, as many on each; all groups like it act at the same time.
    """

    operation: str
    ranks: int
    nodes: int
    size_bytes: int
    rounds: int
    seconds: float
    algorithm_bandwidth: float
    bus_bandwidth: float


@dataclass(frozen=True)
class Fit:
    """time = alpha_s + beta_s_per_byte x size. worst: largest relative error of a measured size."""

    operation: str
    ranks: int
    nodes: int
    alpha_s: float
    beta_s_per_byte: float
    worst: float


@dataclass(frozen=True)
class Hop:
    """Sends from a node to the next on a ring of all nodes, by all ranks of the node at once.

    points: (size in bytes, seconds), from small sizes to large; of the slowest of the node's ranks.
    """

    node: int
    other: int
    points: list[tuple[int, float]]


@dataclass(frozen=True)
class Bench:
    """What was measured, and on what. `link` is the backend with the kind of device; `hops` of three nodes or more."""

    link: str
    ranks: int
    nodes: int
    measured: list[Measured]
    fits: list[Fit]
    hops: list[Hop] = field(default_factory=list[Hop])


def sizes_up_to(most_bytes: int) -> list[int]:
    """1 byte, then four times as much each, up to `most_bytes`."""
    return [GROWTH**power for power in range(40) if GROWTH**power <= most_bytes]


def group_shapes(nodes: int, devices: int) -> list[tuple[int, int]]:
    """(ranks, stride) of the groups to measure on nodes of so many devices: rank 0, stride, 2 x stride, ...

    On one node all ranks. On several, all and pairs of nodes with any number of ranks on each that divides `devices`,
    and each such number within a node.
    """
    if nodes == 1:
        return [(devices, 1)]
    counts = [count for count in range(1, devices + 1) if devices % count == 0]
    spans = [n for n in sorted({2, nodes}) if nodes % n == 0]
    return [(count, 1) for count in counts if count > 1] + [(n * c, devices // c) for n in spans for c in counts]


def bus_factor(operation: str, ranks: int) -> float:
    """Bus bandwidth / algorithm bandwidth."""
    if operation in ("all_reduce", "sum", "ring_all_reduce"):
        return 2 * (ranks - 1) / ranks
    shared = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
    return (ranks - 1) / ranks if operation in shared else 1.0


def fit(operation: str, ranks: int, points: Iterable[tuple[int, float]], *, nodes: int = 1) -> Fit:
    """The fit of (size, seconds) pairs, of which there must be at least two; neither number is negative."""
    sizes, seconds = (np.array(values, dtype=np.float64) for values in zip(*points, strict=True))
    # Least squares of (alpha + beta x size) / seconds - 1.
    matrix = np.stack([1 / seconds, sizes / seconds], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(matrix, np.ones_like(seconds), rcond=None)
    if alpha < 0:
        column = matrix[:, 1]
        alpha, beta = 0.0, column.sum() / (column @ column)
    elif beta < 0:
        column = matrix[:, 0]
        alpha, beta = column.sum() / (column @ column), 0.0
    errors = np.abs(alpha + beta * sizes - seconds) / seconds
    return Fit(operation, ranks, nodes, float(alpha), float(beta), float(errors.max()))


def measure(operations: Sequence[str], most_bytes: int) -> Bench:
    """Measures on the ranks of this run; every rank calls it and gets the same."""
    world = connect(find_here())
    try:
        every: Group = world.group("data")
        devices = check_even(gather_values(world.local_size, every), world.nodes)
        measured: list[Measured] = []
        fits: list[Fit] = []
        for ranks, stride in group_shapes(world.nodes, devices):
            sizes = {"apart": every.size // (ranks * stride), "measured": ranks, "between": stride}
            group = every if ranks == every.size else every.mesh(sizes)["measured"]
            nodes = ranks // min(ranks, devices // stride)
            if world.nodes == 1:  # as the tensor axis has it
                group.shared = share_memory(group)
            for name in operations:
                found = [*_measured(name, most_bytes, group, every, nodes)]
                measured += found
                if len(found) > 1:
                    fits.append(fit(name, ranks, [(one.size_bytes, one.seconds) for one in found], nodes=nodes))
        hops = _hops(most_bytes, world.nodes, devices, every) if world.nodes > 2 and "send" in operations else []
        return Bench(
            f"{world.backend} on {world.device.partition(':')[0]}", every.size, world.nodes, measured, fits, hops
        )
    finally:
        disconnect(world)


def check_even(local_sizes: Sequence[int], nodes: int) -> int:
    """Ranks of each node. Raises `UserError` where nodes differ in them. local_sizes: of its node, for each rank."""
    devices = local_sizes[0]
    if set(local_sizes) != {devices} or devices * nodes != len(local_sizes):
        found = f"nodes have {', '.join(map(str, sorted(set(local_sizes))))} ranks"
        raise UserError(f"measure {nodes} nodes", found, "give each the same number: --devices N")
    return devices


def measure_devices(kind: str) -> list[Rates]:
    """What the device of each rank reaches while those of all others work too; every rank gets the same.

    kind: "cpu" or "cuda".
    """
    world = connect(find_here())
    try:
        every: Group = world.group("data")
        barrier(every)
        return gather_values(probe(kind, local=world.local_rank), every)
    finally:
        disconnect(world)


def _measured(operation: str, most_bytes: int, group: Group, every: Group, nodes: int) -> Iterator[Measured]:
    for size in sizes_up_to(most_bytes):
        found = _measure(operation, size, group, every, nodes)
        yield found
        if found.seconds * GROWTH > LONGEST_ROUND_S:
            return


def hop_rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """(node, next node) on a ring of three nodes or more, so that none is in two hops of a round."""
    even, odd = ([(node, node + 1) for node in range(first, nodes - 1, 2)] for first in (0, 1))
    last = (nodes - 1, 0)
    return [even, [*odd, last]] if nodes % 2 == 0 else [even, odd, [last]]


def _hops(most_bytes: int, nodes: int, devices: int, every: Group) -> list[Hop]:
    return [hop for hops in hop_rounds(nodes) for hop in _round_of_hops(hops, most_bytes, devices, every)]


def _round_of_hops(hops: Sequence[tuple[int, int]], most_bytes: int, devices: int, every: Group) -> list[Hop]:
    """Of hops that do not disturb each other, at the same time; as long as the slowest takes `LONGEST_ROUND_S`."""
    points: dict[tuple[int, int], list[tuple[int, float]]] = {hop: [] for hop in hops}
    for size in sizes_up_to(most_bytes):
        mine = statistics.median(_times_s(_hop(size, dict(hops), devices, every), every))
        of_ranks = gather_values(mine, every)
        for node, other in hops:
            ends = (*range(node * devices, (node + 1) * devices), *range(other * devices, (other + 1) * devices))
            points[node, other].append((size, max(of_ranks[rank] for rank in ends)))
        if max(of_ranks) * GROWTH > LONGEST_ROUND_S:
            break
    return [Hop(node, other, found) for (node, other), found in points.items()]


def _hop(size_bytes: int, hops: Mapping[int, int], devices: int, every: Group) -> Callable[[], object]:
    node, place = divmod(every.position, devices)
    tensor = _buffer(size_bytes, every)
    if node in hops:
        return lambda: send(tensor, hops[node] * devices + place, every)
    before = {other: one for one, other in hops.items()}
    return (lambda: recv(tensor, before[node] * devices + place, every)) if node in before else lambda: None


def _measure(operation: str, size_bytes: int, group: Group, every: Group, nodes: int) -> Measured:
    times_s = _times_s(OPERATIONS[operation](size_bytes, group), every)
    each_slowest = all_reduce(torch.tensor(times_s, dtype=torch.float64, device=every.device), every, "max")
    seconds = statistics.median(each_slowest.tolist())
    bandwidth, factor = size_bytes / seconds, bus_factor(operation, group.size)
    return Measured(operation, group.size, nodes, size_bytes, len(times_s), seconds, bandwidth, bandwidth * factor)


def _times_s(act: Callable[[], object], every: Group) -> list[float]:
    for _ in range(WARM_ROUNDS):
        _timed(act, every)
    times_s: list[float] = []
    until_s = time.perf_counter() + TIME_PER_SIZE_S
    more = True
    while more:
        times_s += [_timed(act, every) for _ in range(ROUNDS_AT_ONCE)]
        decision = len(times_s) < MOST_ROUNDS and time.perf_counter() < until_s
        more = bool(broadcast(torch.tensor([decision], device=every.device), 0, every).item())  # rank 0's
    return times_s


def _timed(act: Callable[[], object], group: Group) -> float:
    barrier(group)
    _finish_device(group)
    began_s = time.perf_counter()
    act()
    _finish_device(group)
    return time.perf_counter() - began_s


def _finish_device(group: Group) -> None:
    if group.device.type == "cuda":
        torch.cuda.synchronize()


# --------------------------------------------------------------------- one maker per operation: buffers, then the act
def _buffer(size_bytes: int, group: Group) -> torch.Tensor:
    """A tensor of that size: float32 where it fits, bytes below."""
    if size_bytes % 4:
        return torch.zeros(size_bytes, dtype=torch.uint8, device=group.device)
    return torch.zeros(size_bytes // 4, device=group.device)


def _whole(act: Callable[[torch.Tensor, Group], object]) -> Callable[[int, Group], Callable[[], object]]:
    def make(size_bytes: int, group: Group) -> Callable[[], object]:
        tensor = _buffer(size_bytes, group)
        return lambda: act(tensor, group)

    return make


@dataclass(frozen=True)
class _Cut:
    """A tensor, the sizes of the pieces that ranks have of it, and this rank's."""

    whole: torch.Tensor
    sizes: list[int]
    piece: torch.Tensor


def _cut(act: Callable[[_Cut, Group], object]) -> Callable[[int, Group], Callable[[], object]]:
    def make(size_bytes: int, group: Group) -> Callable[[], object]:
        whole = _buffer(size_bytes, group)
        sizes = even_sizes(len(whole), group.size)
        cut = _Cut(whole, sizes, whole.split(sizes)[group.position].clone())
        return lambda: act(cut, group)

    return make


def _send_and_recv(size_bytes: int, group: Group) -> Callable[[], object]:
    """From the first rank to the last; the others look on."""
    tensor, last = _buffer(size_bytes, group), group.size - 1
    if group.position == 0 and last:
        return lambda: send(tensor, last, group)
    return lambda: recv(tensor, 0, group) if group.position == last and last else None


OPERATIONS: dict[str, Callable[[int, Group], Callable[[], object]]] = {
    "send": _send_and_recv,
    "broadcast": _whole(lambda tensor, group: broadcast(tensor, 0, group)),
    "reduce": _whole(lambda tensor, group: reduce(tensor, 0, group)),
    "scatter": _cut(lambda cut, g: scatter(None if g.position else cut.whole, 0, g, sizes=cut.sizes)),
    "gather": _cut(lambda cut, group: gather(cut.piece, 0, group, sizes=cut.sizes)),
    "all_reduce": _whole(lambda tensor, group: all_reduce(tensor, group)),
    "sum": _whole(sum_at_once),
    "ring_all_reduce": _whole(ring_all_reduce),
    "all_gather": _cut(lambda cut, group: all_gather(cut.piece, group, sizes=cut.sizes)),
    "reduce_scatter": _cut(lambda cut, group: reduce_scatter(cut.whole, group, sizes=cut.sizes)),
    "all_to_all": _cut(lambda cut, g: all_to_all(cut.whole, g, sizes=cut.sizes, received=[len(cut.piece)] * g.size)),
}
