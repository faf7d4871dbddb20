"""Cluster files: written and read back, refused by field."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenly.errors import UserError
from evenly.hardware.cluster import Cluster, Link, Rates
from evenly.hardware.cluster_file import read_cluster, write_cluster

CLUSTER = Cluster(1, 2, "cpu", "gloo", {("all_reduce", 2): Link(8.1e-5, 4.2e-10), ("send", 2): Link(0.0, 1 / 3)})

FULL = Cluster(
    4,
    8,
    "H20",
    backend="nccl",
    links={("send", 8): Link(1e-5, 1e-11, ((1, 2e-5), (4, 3e-5)))},
    between={("send", 2, 1): Link(1e-4, 1e-9), ("all_reduce", 4, 8): Link(1e-3, 1e-8, ((16, 1e-3),))},
    hops={(node, (node + 1) % 4): Link(1e-4, (1 + node) * 1e-9, ((1, 1e-4), (1024, 2e-4))) for node in range(4)},
    rates=Rates(matmul={"bfloat16": {1024: 1e14, 8192: 1.4e14}, "float32": {64: 3.5e13}}, memory=3.1e12, small=8e5),
    own={"memory_gib": 95.1, "link": "nvlink4", "tflops": {"float32": 44, "bfloat16": 148}},
    network_bytes_per_s=50e9,
    network="efa",
    cards=4,
    in_network=False,
)

# As `evenly bench comm` of version 0.1 wrote them.
OLD = """# Measured by `evenly bench comm`.
nodes = 1
devices = 8
kind = "cuda"
backend = "nccl"

[links.all_reduce.8]
alpha_s = 2.5e-05
beta_s_per_byte = 3.6e-12
"""


def test_files_of_older_versions_are_read(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(OLD)
    cluster = read_cluster(tmp_path / "c.toml")
    assert (cluster.devices, cluster.kind, cluster.backend, cluster.in_network) == (8, "cuda", "nccl", True)
    assert cluster.links == {("all_reduce", 8): Link(2.5e-5, 3.6e-12)} and cluster.rates == Rates()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("network = 'smoke'", "no such one"),
        ("network_gbit_per_s = 'fast'", "network_gbit_per_s is 'fast'"),
        ("cards = 0", "cards is 0"),
        ("in_network = 1", "in_network is 1"),
        ("rates = 3", "rates is 3"),
        ("[links.send.0-1]\nalpha_s = 1\nbeta_s_per_byte = 1", "links.send.0-1 names no neighbours of 1 nodes"),
        ("[links.all_reduce.0-1]\nalpha_s = 1\nbeta_s_per_byte = 1", "links.all_reduce.0-1 does not end in a number"),
        ("[rates]\nmemory = -1", "rates.memory is -1"),
        ("[rates.matmul.float32]\nlarge = 1e9", "rates.matmul.float32 has large"),
        ("[rates.matmul.float32]\n64 = 'x'", "rates.matmul.float32.64 is 'x'"),
        ("device = 3", "device is 3"),
        ("[links.send.2x1x1]\nalpha_s = 1\nbeta_s_per_byte = 0", "a number of ranks"),
        ("[links.send.2]\nalpha_s = 1\nbeta_s_per_byte = 0\npoints = 3", "links.send.2.points is 3"),
        ("[links.send.2]\nalpha_s = 1\nbeta_s_per_byte = 0\npoints = [[4, 1], [2, 1]]", "from small sizes to large"),
        ("[links.send.2]\nalpha_s = 1\nbeta_s_per_byte = 0\npoints = [[4, -1]]", "points is [[4, -1]]"),
    ],
)
def test_what_a_file_may_hold_besides_is_refused_by_field(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "c.toml").write_text(f"nodes = 1\ndevices = 2\nkind = 'cpu'\n{line}\n")
    with pytest.raises(UserError) as caught:
        read_cluster(tmp_path / "c.toml")
    assert words in str(caught.value)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write_cluster(tmp_path / "c.toml", CLUSTER)
    assert read_cluster(tmp_path / "c.toml") == CLUSTER
    write_cluster(tmp_path / "f.toml", FULL)
    assert read_cluster(tmp_path / "f.toml") == FULL
    assert CLUSTER.links["all_reduce", 2].seconds(1e6) == pytest.approx(8.1e-5 + 4.2e-4)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("nodes = 1", "nodes = 0", "nodes is 0"),
        ("devices = 2", "devices = true", "devices is True"),
        ('kind = "cpu"', "kind = 3", "kind is 3"),
        ("alpha_s = 8.1e-05", "alpha_s = -1", "links.all_reduce.2.alpha_s is -1"),
        ("alpha_s = 8.1e-05", "alpha_s = inf", "links.all_reduce.2.alpha_s is inf"),
        ("[links.all_reduce.2]", "[links.all_reduce.two]", "a number of ranks"),
        ("[links.all_reduce.2]", "[links.all_reduce]", "a number of ranks"),
        ("nodes = 1", "nodes =", "Invalid value"),
    ],
)
def test_a_file_that_is_no_cluster_is_refused_by_field(tmp_path: Path, old: str, new: str, words: str) -> None:
    write_cluster(tmp_path / "c.toml", CLUSTER)
    text = (tmp_path / "c.toml").read_text()
    assert old in text
    (tmp_path / "c.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(UserError, match="read the cluster") as caught:
        read_cluster(tmp_path / "c.toml")
    assert words in str(caught.value)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="evenly bench comm"):
        read_cluster(tmp_path / "missing.toml")
    with pytest.raises(UserError, match="save the cluster"):
        write_cluster(tmp_path / "no" / "c.toml", CLUSTER)


def test_a_ring_of_hops_is_whole_or_not_there(tmp_path: Path) -> None:
    ring = "nodes = 3\ndevices = 1\nkind = 'cpu'\n"
    hops = [f"[links.send.{ends}]\nalpha_s = 1e-4\nbeta_s_per_byte = 1e-9\n" for ends in ("0-1", "1-2", "2-0")]
    (tmp_path / "c.toml").write_text(ring + "".join(hops))
    assert set(read_cluster(tmp_path / "c.toml").hops) == {(0, 1), (1, 2), (2, 0)}
    (tmp_path / "c.toml").write_text(ring + "".join(hops[:2]))
    with pytest.raises(UserError, match="2 of 3 links from a node to the next"):
        read_cluster(tmp_path / "c.toml")
