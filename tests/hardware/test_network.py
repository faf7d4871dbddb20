"""Predicted times of collectives: near what was published, monotone, and measured links win."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from evenly.hardware.cluster import Cluster, Link
from evenly.hardware.cluster_text import parse_cluster
from evenly.hardware.devices import device_names
from evenly.hardware.network import OPERATIONS, LinkedRanks, place, seconds, send_seconds, share_of_slowest

SIZES = [2**power for power in range(10, 36)]
ONE, FOUR = parse_cluster("8xH100"), parse_cluster("4x8xH100")
NODE, ALL = LinkedRanks(8, 8), LinkedRanks(32, 8)


def bus_bandwidth(operation: str, size: int, group: LinkedRanks, cluster: Cluster) -> float:
    """As nccl-tests define it, GB/s."""
    rounds = 2 if operation == "all_reduce" else 1
    return rounds * (group.ranks - 1) / group.ranks * size / seconds(operation, size, group, cluster) / 1e9


@pytest.mark.parametrize(
    ("text", "operation", "ranks", "per_node", "size", "measured"),
    [
        ("8xA100-80", "all_reduce", 8, 8, 2**30, 229.0),
        ("8xA100-80", "all_reduce", 8, 8, 2**26, 171.5),
        ("8xH100", "all_reduce", 8, 8, 2**30, 466.3),
        ("8xH100", "all_reduce", 8, 8, 2**24, 237.2),
        ("8xH200", "all_reduce", 4, 4, 2**33, 363.3),
        ("8xH200", "all_reduce", 6, 6, 2**33, 435.6),
        ("8xH200", "all_gather", 8, 8, 2**34, 361.4),
        ("8xH200", "reduce_scatter", 8, 8, 2**34, 362.9),
        ("8xB200", "all_reduce", 8, 8, 2**33, 838.0),
        ("4x8xB200@400efa", "all_reduce", 32, 8, 2**30, 362.0),
        ("4x8xA100-80@200", "all_reduce", 32, 8, 2**34, 192.0),
        ("8xMI300X", "all_reduce", 8, 8, 2**32, 312.9),
        ("8xMI300X", "all_reduce", 2, 2, 2**32, 47.7),
        ("4x8xH100@400", "all_reduce", 4, 1, 2**34, 48.0),
    ],
)
def test_bus_bandwidths_are_near_those_published(
    text: str, operation: str, ranks: int, per_node: int, size: int, measured: float
) -> None:
    predicted = bus_bandwidth(operation, size, LinkedRanks(ranks, per_node), parse_cluster(text))
    assert predicted == pytest.approx(measured, rel=0.08)


def test_a_reduction_in_the_switches_is_faster_and_can_be_forbidden() -> None:
    ring = bus_bandwidth("all_reduce", 2**33, NODE, replace(ONE, in_network=False))
    assert ring == pytest.approx(365.6, rel=0.02)  # H200 with NCCL_NVLS_ENABLE=0
    assert bus_bandwidth("all_reduce", 2**33, NODE, ONE) > 1.25 * ring


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("group", [NODE, ALL, LinkedRanks(2, 1), LinkedRanks(4, 1, sharing=8)])
def test_more_takes_longer(operation: str, group: LinkedRanks) -> None:
    times = [seconds(operation, size, group, FOUR) for size in SIZES]
    assert all(less < more for less, more in pairwise(times))


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
@pytest.mark.parametrize("size", [2**16, 2**24, 2**30])
def test_more_nodes_take_longer(operation: str, size: int) -> None:
    nodes = [parse_cluster(f"{count}x8xA100") for count in (1, 2, 4, 8, 16, 64)]
    times = [seconds(operation, size, LinkedRanks(cluster.size, 8), cluster) for cluster in nodes]
    assert all(less <= more for less, more in pairwise(times))


@pytest.mark.parametrize("size", SIZES)
def test_an_all_reduce_takes_no_longer_than_its_two_halves(size: int) -> None:
    for group, cluster in ((NODE, ONE), (ALL, FOUR)):
        halves = seconds("reduce_scatter", size, group, cluster) + seconds("all_gather", size, group, cluster)
        assert 0.2 * halves < seconds("all_reduce", size, group, cluster) <= 1.01 * halves


def test_trees_carry_small_sizes_over_many_nodes() -> None:
    many = parse_cluster("128x8xA100")
    everyone = LinkedRanks(many.size, 8)
    halves = 2 * seconds("all_gather", 2**16, everyone, many)
    assert seconds("all_reduce", 2**16, everyone, many) < 0.25 * halves


def test_groups_that_share_the_cards_wait_for_each_other() -> None:
    alone, shared = LinkedRanks(8, 2), LinkedRanks(8, 2, sharing=4)
    narrow = replace(FOUR, cards=2)  # 2 cards for 8 devices, each of 1600 Gb/s
    assert seconds("all_gather", 2**30, shared, FOUR) == seconds("all_gather", 2**30, alone, FOUR)
    assert seconds("all_gather", 2**30, shared, narrow) > 1.5 * seconds("all_gather", 2**30, alone, narrow)


def test_a_group_alone_may_use_a_whole_card() -> None:
    one_each = parse_cluster("4x8xV100-32@50")
    half = replace(one_each, cards=4)
    group = LinkedRanks(4, 1)
    assert seconds("all_gather", 2**30, group, one_each) > 1.8 * seconds("all_gather", 2**30, group, half)


def test_groups_are_placed_by_their_stride() -> None:
    assert place(8, 1, FOUR) == LinkedRanks(8, 8, sharing=1)
    assert place(32, 1, FOUR) == LinkedRanks(32, 8, sharing=1)
    assert place(4, 8, FOUR) == LinkedRanks(4, 1, sharing=8)
    assert place(2, 4, FOUR) == LinkedRanks(2, 2, sharing=4)
    assert place(16, 2, FOUR) == LinkedRanks(16, 4, sharing=2)
    assert place(2, 16, FOUR) == LinkedRanks(2, 1, sharing=8)


def test_trays_of_a_rack_are_one_domain() -> None:
    rack, four_racks = parse_cluster("18x4xGB200"), parse_cluster("32x4xGB200")
    assert (rack.domain, four_racks.domain) == (72, 64)
    assert bus_bandwidth("all_gather", 2**33, place(64, 1, four_racks), four_racks) > 600
    assert bus_bandwidth("all_gather", 2**33, place(128, 1, four_racks), four_racks) > 600
    assert bus_bandwidth("all_gather", 2**33, place(2, 64, four_racks), four_racks) < 50


def test_nodes_of_fewer_devices_than_are_sold_are_domains_of_their_own() -> None:
    assert [parse_cluster(text).domain for text in ("2x4xA100", "8x1xH100", "3x8xH100")] == [4, 1, 8]
    assert parse_cluster("1x16xV100").domain == 16


def test_a_mesh_gives_few_devices_a_part_of_its_wires() -> None:
    cluster = parse_cluster("8xV100")
    whole, pair = (bus_bandwidth("all_reduce", 2**33, LinkedRanks(n, n), cluster) for n in (8, 2))
    assert pair == pytest.approx(whole / 7, rel=0.05)
    joined = parse_cluster("1x16xV100-32")  # a DGX-2, with switches
    assert bus_bandwidth("all_reduce", 2**33, LinkedRanks(2, 2), joined) == pytest.approx(whole, rel=0.05)


def test_a_message_takes_the_fast_link_or_a_card() -> None:
    near, far = seconds("send", 2**30, LinkedRanks(2, 2), FOUR), seconds("send", 2**30, LinkedRanks(2, 1), FOUR)
    assert 2**30 / near == pytest.approx(365e9, rel=0.02) and 2**30 / far == pytest.approx(47.75e9, rel=0.02)


def test_one_rank_and_no_bytes_take_no_time() -> None:
    assert seconds("all_reduce", 2**20, LinkedRanks(1, 1), ONE) == 0.0
    assert seconds("all_gather", 0, NODE, ONE) == 0.0


def test_a_measured_link_wins_where_it_fits() -> None:
    links = {("all_reduce", 8): Link(1.0, 1e-6), ("all_reduce", 32): Link(2.0, 0.0)}
    measured = replace(FOUR, links=links)
    assert seconds("all_reduce", 1e6, NODE, measured) == 2.0
    assert seconds("all_reduce", 1e6, ALL, measured) == 2.0
    for group in (LinkedRanks(8, 2, sharing=4), LinkedRanks(4, 4)):  # spread over nodes; of another size
        assert seconds("all_reduce", 1e6, group, measured) == seconds("all_reduce", 1e6, group, FOUR)
    assert seconds("all_gather", 1e6, NODE, measured) == seconds("all_gather", 1e6, NODE, FOUR)


def test_links_between_nodes_count_for_groups_of_their_shape() -> None:
    between = {
        ("all_reduce", 4, 8): Link(1.0, 0.0),
        ("all_reduce", 4, 2): Link(2.0, 0.0),
        ("send", 2, 1): Link(3.0, 0.0),
    }
    measured = replace(FOUR, between=between)
    assert seconds("all_reduce", 1e6, ALL, measured) == 1.0
    assert seconds("all_reduce", 1e6, place(8, 4, measured), measured) == 2.0
    assert seconds("send", 1e6, LinkedRanks(2, 1, sharing=8), measured) == 3.0
    for group in (NODE, LinkedRanks(2, 2), place(4, 8, measured)):
        assert seconds("all_reduce", 1e6, group, measured) == seconds("all_reduce", 1e6, group, FOUR)


def test_measured_sizes_count_more_than_the_line_through_them() -> None:
    link = Link(1.0, 1.0, ((4, 1e-3), (16, 1e-3), (64, 4e-3)))
    found = [link.seconds(size) for size in (1, 4, 10, 16, 40, 64, 128)]
    assert found == pytest.approx([1e-3, 1e-3, 1e-3, 1e-3, 2.5e-3, 4e-3, 8e-3])
    assert Link(1.0, 0.5).seconds(4) == 3.0


@pytest.mark.parametrize("name", device_names())
def test_every_kind_talks(name: str) -> None:
    cluster = Cluster(4, 4, name)
    for operation in OPERATIONS:
        for group in (place(4, 1, cluster), place(16, 1, cluster), place(4, 4, cluster)):
            assert 0 < seconds(operation, 2**20, group, cluster) < 1.0


def test_a_send_takes_as_long_as_the_slower_node() -> None:
    slow = 3  # its hops to both neighbours are slow, and these are not
    hops = {(node, (node + 1) % 4): Link(0.0, 4.0 if slow in (node, (node + 1) % 4) else 1.0) for node in range(4)}
    measured, one = replace(FOUR, hops=hops), LinkedRanks(2, 1)
    assert send_seconds(8.0, 0, 1, one, measured) == send_seconds(8.0, 0, 2, one, measured) == 8.0
    assert send_seconds(8.0, 2, 3, one, measured) == send_seconds(8.0, 1, 3, one, measured) == 32.0
    assert send_seconds(8.0, 0, 1, one, FOUR) == seconds("send", 8.0, one, FOUR)


def test_a_collective_takes_a_share_of_its_time_over_the_slowest_nodes() -> None:
    hops = {(node, (node + 1) % 4): Link(0.0, 4.0 if 3 in (node, (node + 1) % 4) else 1.0) for node in range(4)}
    measured = replace(FOUR, hops=hops)
    assert [share_of_slowest(8.0, nodes, measured) for nodes in ([0, 1], [1, 3], [3])] == [0.25, 1.0, 1.0]
    assert share_of_slowest(8.0, [0, 1], FOUR) == 1.0  # whose links are all alike
    assert share_of_slowest(0.0, [0, 1], measured) == 1.0  # of nothing to reduce, which takes no time anywhere
