"""How long collectives take, from the links of a cluster: alpha + beta x size over rings, trees and switches. Pure.

*steps* are the messages that follow one another in a ring, *hops* those in a tree, and *near* ones stay within a domain
(devices joined by the fast link) while *far* ones cross between domains. Sizes are those of nccl-tests: the largest
buffer on one rank, so the whole tensor of an all_gather and of a reduce_scatter.

Latencies are added up as NCCL does (src/graph/tuning.cc); what moves is bounded by the fast link and by the network
cards, whichever is slower; and where NCCL has the choice between algorithms, the fastest counts. Beyond NCCL's own
model, a pipeline that has to fill takes part of its `fill` in proportion to what moves: x fill / (x + fill).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import ceil, log2

from evenly.hardware.cluster import Cluster, Link
from evenly.hardware.links import Fabric

TREE_SHARE = 0.9  # of a ring's rate that a tree reaches within a node: NCCL, src/graph/tuning.cc


@dataclass(frozen=True, slots=True)
class LinkedRanks:
    """Ranks that talk with each other.

    ranks:    how many. per_node: how many of them share a domain (`Cluster.domain`: a node, or a rack joined as one).
    sharing:  how many such groups talk at the same time from one domain, over the same network cards; itself included.
    """

    ranks: int
    per_node: int
    sharing: int = 1

    @property
    def domains(self) -> int:
        """Domains over which the group is spread."""
        return -(-self.ranks // self.per_node)


def place(ranks: int, stride: int, cluster: Cluster) -> LinkedRanks:
    """The group of ranks 0, stride, 2 stride, ..., with all like it on the same devices talking at the same time."""
    per_node = max(1, min(ranks, cluster.domain // stride))
    return LinkedRanks(ranks, per_node, sharing=max(1, min(stride, cluster.domain // per_node)))


def seconds(operation: str, size_bytes: float, group: LinkedRanks, cluster: Cluster) -> float:
    """Predicted time of one operation, s; 0 for a group of one rank.

    operation: all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, or send (between two ranks); sum: an
    all_reduce of the tensor axis, which CPUs of one machine make in shared memory. `all_reduce_seconds` knows types.
    Links measured for this operation and this group win. Raises `KeyError` for an operation not named above.
    """
    if group.ranks < 2 or size_bytes <= 0:
        return 0.0
    link = measured_link(operation, group, cluster) if cluster.links or cluster.between else None
    if link is None and operation == "sum":
        return seconds("all_reduce", size_bytes, group, cluster)
    if link is not None:
        return link.seconds(size_bytes)
    return OPERATIONS[operation](size_bytes, group, cluster.fabric)


# Time of gloo's all-reduce per byte, of that in float32, by which links are measured: two ranks on one machine, 64 KiB
# to 16 MiB, medians of 20 to 60 sums in turns (bfloat16 1.18 to 1.40, float16 1.28 to 1.81; load 3 on two cores).
NARROW_ON_CPUS = {"bfloat16": 1.3, "float16": 1.6}


def all_reduce_seconds(
    size_bytes: float, dtype: str, group: LinkedRanks, cluster: Cluster, *, at_once: bool = False
) -> float:
    """Predicted time of an all-reduce of numbers of type `dtype`, s. at_once: one of the tensor axis, a `sum`.

    Types of 16 bits have no sum in shared memory on CPUs.
    """
    slower = NARROW_ON_CPUS.get(dtype) if cluster.device.kind == "cpu" else None
    if slower is not None:
        return slower * seconds("all_reduce", size_bytes, group, cluster)
    return seconds("sum" if at_once else "all_reduce", size_bytes, group, cluster)


def send_seconds(size_bytes: float, node: int, other: int, group: LinkedRanks, cluster: Cluster) -> float:
    """Predicted time of a send from one node to another, s: `seconds`, unless nodes were measured each by itself.

    A send takes as long as the slower of its two nodes, and a node as long as the faster of its two measured hops: the
    other may be slow for its neighbour's sake.
    """
    if not cluster.hops or cluster.domain > cluster.devices:
        return seconds("send", size_bytes, group, cluster)
    if (node, other) in cluster.hops:
        return cluster.hops[node, other].seconds(size_bytes)
    return max(_of_node(size_bytes, one, cluster) for one in (node, other))


def share_of_slowest(size_bytes: float, nodes: Collection[int], cluster: Cluster) -> float:
    """How much of a collective's time over the slowest nodes it takes over these, by what sends between nodes take."""
    if not cluster.hops or cluster.domain > cluster.devices:
        return 1.0
    own = [_of_node(size_bytes, node, cluster) for node in range(cluster.nodes)]
    return max(own[node] for node in nodes) / max(own) if max(own) else 1.0


def _of_node(size_bytes: float, node: int, cluster: Cluster) -> float:
    return min(link.seconds(size_bytes) for ends, link in cluster.hops.items() if node in ends)


def measured_link(operation: str, group: LinkedRanks, cluster: Cluster) -> Link | None:
    """The link measured for such a group, within a node or over nodes; None where none was."""
    if cluster.domain == cluster.devices and group.ranks == group.domains * group.per_node:
        found = cluster.between.get((operation, group.domains, group.per_node))
        if found is not None:
            return found
    near = group.per_node == group.ranks
    whole = group.ranks == cluster.size and group.per_node == cluster.domain
    return cluster.links.get((operation, group.ranks)) if near or whole else None


# ------------------------------------------------------------------------------------------------ what moves, and where


def near_rate(fabric: Fabric, ranks: int) -> float:
    return fabric.ring_rate * (ranks - 1) / fabric.peers if fabric.peers else fabric.ring_rate


def far_rate(fabric: Fabric, group: LinkedRanks) -> float:
    """Bytes/s that the ranks of a group in one domain send out of it together."""
    return min(group.per_node * fabric.card_rate, fabric.domain_rate / group.sharing)


def _moved(near_bytes: float, far_bytes: float, group: LinkedRanks, fabric: Fabric) -> float:
    near = near_bytes / near_rate(fabric, group.per_node) if group.per_node > 1 else 0.0
    return near if group.domains == 1 else max(near, far_bytes / far_rate(fabric, group))


def _filling(moved_s: float, fill_s: float) -> float:
    return moved_s * fill_s / (moved_s + fill_s) if moved_s else 0.0


# ----------------------------------------------------------------------------------------------------------- algorithms


def ring(size_bytes: float, group: LinkedRanks, fabric: Fabric, rounds: int) -> float:
    """Over a ring of all ranks, once (all_gather, reduce_scatter) or twice (all_reduce)."""
    steps = rounds * (group.ranks - 1)
    far = rounds * (group.domains - 1)
    sent = size_bytes * steps / group.ranks
    moved_s = _moved(sent, sent, group, fabric)
    full = (steps - far) * fabric.hop_s + far * fabric.far_hop_s + moved_s + _filling(moved_s, steps * fabric.fill_s)
    quick = (steps - far) * fabric.quick_hop_s + far * fabric.far_quick_hop_s + moved_s / fabric.quick_share
    return fabric.base_s + min(full, quick)


def tree(size_bytes: float, group: LinkedRanks, fabric: Fabric) -> float:
    """An all_reduce up and down two trees over the domains, with a chain in each."""
    near, far = group.per_node - 1, ceil(log2(group.domains))
    moved_s = _moved(2 * size_bytes / TREE_SHARE, _through_trees(size_bytes, group), group, fabric)
    hops_s = 2 * (near * fabric.tree_hop_s + far * fabric.far_tree_hop_s)
    return fabric.base_s + hops_s + moved_s + _filling(moved_s, 2 * (near + far) * fabric.fill_s)


def in_network(size_bytes: float, group: LinkedRanks, fabric: Fabric) -> float:
    ranks, domains = group.per_node, group.domains
    near_s = size_bytes * (1 + 1 / ranks) / fabric.in_network_rate
    near_s = max(near_s, 2 * size_bytes * (ranks - 1) / ranks / fabric.in_network_most)
    moved_s = near_s if domains == 1 else max(near_s, _through_trees(size_bytes, group) / far_rate(fabric, group))
    hops_s = 2 * ceil(log2(domains)) * fabric.far_tree_hop_s
    return fabric.in_network_s + hops_s + moved_s + _filling(moved_s, fabric.in_network_fill_s)


def _through_trees(size_bytes: float, group: LinkedRanks) -> float:
    """Bytes that a domain sends: up and down in each of two trees; of two domains, one is always at the top."""
    return size_bytes if group.domains == 2 else 2 * size_bytes


# ----------------------------------------------------------------------------------------------------------- operations


def _all_reduce(size_bytes: float, group: LinkedRanks, fabric: Fabric) -> float:
    fastest = ring(size_bytes, group, fabric, 2)
    if group.domains > 1:
        fastest = min(fastest, tree(size_bytes, group, fabric))
    if fabric.in_network_rate and group.per_node > 2:
        fastest = min(fastest, in_network(size_bytes, group, fabric))
    return fastest


def _once_around(size_bytes: float, group: LinkedRanks, fabric: Fabric) -> float:
    return ring(size_bytes, group, fabric, 1)


def _broadcast(size_bytes: float, group: LinkedRanks, fabric: Fabric) -> float:
    far = group.domains - 1
    hops_s = (group.ranks - 1 - far) * fabric.hop_s + far * fabric.far_hop_s
    moved_s = _moved(size_bytes, size_bytes, group, fabric)
    return fabric.base_s + hops_s + moved_s + _filling(moved_s, (group.ranks - 1) * fabric.fill_s)


def _all_to_all(size_bytes: float, group: LinkedRanks, fabric: Fabric) -> float:
    """Every rank sends to every other; all of a domain send at once."""
    near, far = group.per_node - 1, group.ranks - group.per_node
    piece = size_bytes / group.ranks
    hops_s = near * fabric.quick_hop_s + far * fabric.far_quick_hop_s
    moved_s = _moved(piece * near, piece * far * group.per_node, group, fabric)
    return fabric.base_s + hops_s + moved_s + _filling(moved_s, fabric.fill_s)


def _send(size_bytes: float, group: LinkedRanks, fabric: Fabric) -> float:
    moved_s = _moved(size_bytes, size_bytes, group, fabric)
    hop_s = fabric.hop_s if group.domains == 1 else fabric.far_hop_s
    return fabric.base_s + hop_s + moved_s + _filling(moved_s, fabric.fill_s)


OPERATIONS: dict[str, Callable[[float, LinkedRanks, Fabric], float]] = {
    "all_reduce": _all_reduce,
    "all_gather": _once_around,
    "reduce_scatter": _once_around,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "send": _send,
}
