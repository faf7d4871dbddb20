"""What `evenly bench comm` computes from times, and that it runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from evenly.cli.bench import bench_comm, parse_size, with_links
from evenly.comm.bench import (
    OPERATIONS,
    Bench,
    Fit,
    Measured,
    bus_factor,
    check_even,
    fit,
    group_shapes,
    hop_rounds,
    sizes_up_to,
)
from evenly.errors import UserError
from evenly.hardware.cluster import Cluster, Rates
from evenly.hardware.cluster_file import read_cluster
from evenly.hardware.network import place, seconds
from evenly.hardware.probe import slowest


def test_a_fit_finds_what_made_the_times() -> None:
    sizes = sizes_up_to(2**28)
    found = fit("all_reduce", 2, [(size, 8e-5 + 4e-10 * size) for size in sizes])
    assert found.alpha_s == pytest.approx(8e-5) and found.beta_s_per_byte == pytest.approx(4e-10)
    assert found.worst < 1e-9


def test_a_fit_weighs_relative_errors_and_has_no_negative_number() -> None:
    noisy = fit("send", 2, [(1, 1.0e-4), (4, 1.1e-4), (2**28, 0.5)])
    assert 1.0e-4 <= noisy.alpha_s <= 1.1e-4 and noisy.worst < 0.06
    assert fit("send", 2, [(1000, 1e-6), (2000, 4e-6)]).alpha_s == 0.0
    assert fit("send", 2, [(1000, 4e-6), (2000, 1e-6)]).beta_s_per_byte == 0.0


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert bus_factor("all_reduce", 4) == 1.5 and bus_factor("all_gather", 4) == 0.75
    assert bus_factor("broadcast", 4) == bus_factor("send", 4) == 1.0


def test_groups_within_nodes_and_between_them() -> None:
    assert group_shapes(1, 3) == [(3, 1)] and group_shapes(2, 1) == [(2, 1)]
    assert group_shapes(2, 2) == [(2, 1), (2, 2), (4, 1)]  # a node's two; one on each; all
    assert group_shapes(4, 1) == [(2, 1), (4, 1)] and group_shapes(3, 1) == [(3, 1)]
    for nodes, devices in ((2, 4), (8, 8), (6, 3)):
        cluster = Cluster(nodes, devices, "cpu")
        for ranks, stride in group_shapes(nodes, devices):
            assert nodes * devices % (ranks * stride) == 0
            assert place(ranks, stride, cluster).sharing in (1, stride)


@pytest.mark.parametrize("nodes", [3, 4, 5, 8])
def test_hops_of_a_round_share_no_node_and_all_make_a_ring(nodes: int) -> None:
    rounds = hop_rounds(nodes)
    assert sorted(hop for hops in rounds for hop in hops) == [(node, (node + 1) % nodes) for node in range(nodes)]
    for hops in rounds:
        ends = [node for hop in hops for node in hop]
        assert len(set(ends)) == len(ends)


def test_nodes_have_to_have_as_many_ranks() -> None:
    assert check_even([2, 2, 2, 2], 2) == 2
    for local_sizes in ([1, 2, 2], [2, 2, 2]):
        with pytest.raises(UserError, match="measure 2 nodes"):
            check_even(local_sizes, 2)


def measured(operation: str, ranks: int, nodes: int, seconds: float) -> tuple[list[Measured], Fit]:
    rows = [Measured(operation, ranks, nodes, size, 3, seconds * size, 1.0, 1.0) for size in (1000, 4000)]
    return rows, Fit(operation, ranks, nodes, 0.0, seconds, 0.0)


def test_links_are_kept_by_the_shape_of_their_group() -> None:
    shapes = [("send", 2, 1), ("send", 2, 2), ("all_reduce", 4, 2)]
    found = [measured(*shape, 1e-8 * number) for number, shape in enumerate(shapes, 1)]
    bench = Bench("gloo on cpu", 4, 2, [row for rows, _ in found for row in rows], [fit for _, fit in found])
    cluster = with_links(Cluster(2, 2, "cpu"), bench)
    assert set(cluster.links) == {("send", 2)} and set(cluster.between) == {("send", 2, 1), ("all_reduce", 2, 2)}
    assert cluster.between["all_reduce", 2, 2].points[1] == (4000, pytest.approx(1.2e-4))
    assert cluster.network_bytes_per_s == pytest.approx(1 / 2e-8 / 0.8)  # of tcp's share
    assert seconds("all_reduce", 4000, place(4, 1, cluster), cluster) == pytest.approx(1.2e-4)
    assert with_links(replace(cluster, backend="nccl"), bench) == cluster


def test_the_slowest_device_counts() -> None:
    fast = Rates(matmul={"float32": {64: 2.0, 128: 4.0}}, memory=7.0)
    slow = Rates(matmul={"float32": {64: 3.0}}, memory=5.0)
    assert slowest([fast, slow]) == Rates(matmul={"float32": {64: 2.0}}, memory=5.0)


def test_sizes() -> None:
    assert sizes_up_to(256 * 2**20)[-1] == 256 * 2**20 and sizes_up_to(5) == [1, 4]
    assert parse_size("256M") == 2**28 and parse_size("1KiB") == 1024 and parse_size("7") == 7
    for bad in ("", "M", "0", "-1", "1.5G", "3T"):
        with pytest.raises(UserError, match="no size"):
            parse_size(bad)


def test_every_operation_is_measured_shown_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "cluster.toml"
    bench_comm(devices=3, operations="all", most="4", out=tmp_path / "out", save=saved, json_only=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads((tmp_path / "out" / "comm.json").read_text())
    assert {row["operation"] for row in shown["measured"]} == set(OPERATIONS)
    assert all(row["seconds"] > 0 and row["rounds"] >= 3 for row in shown["measured"])
    page = (tmp_path / "out" / "comm.html").read_text()
    assert "alpha" in page and page.count("<figure class=chart ") == 2 and "https://cdn" not in page.split("<h1>")[0]
    cluster = read_cluster(saved)
    assert (cluster.devices, cluster.kind, cluster.backend) == (3, "cpu", "gloo")
    assert set(cluster.links) == {(operation, 3) for operation in OPERATIONS}


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(UserError, match="all_reduse") as caught:
        bench_comm(devices=2, operations="all_reduse", most="1K", out=None, save=None, json_only=True)
    assert "all_reduce" in caught.value.do
