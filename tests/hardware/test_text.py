"""Clusters as text: what is read, what it becomes, what is refused and how."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from evenly.errors import UserError
from evenly.hardware.cluster import Cluster
from evenly.hardware.cluster_file import write_cluster
from evenly.hardware.cluster_text import parse_cluster


@pytest.mark.parametrize(
    ("text", "nodes", "devices", "kind"),
    [
        ("H100", 1, 1, "H100-80"),
        ("8xH100", 1, 8, "H100-80"),
        ("4x8xA100-80", 4, 8, "A100-80"),
        (" 4 x 8 x a100-40 ", 4, 8, "A100-40"),
        ("64xH100", 8, 8, "H100-80"),
        ("2048x8xH100", 2048, 8, "H100-80"),
        ("72xGB200", 18, 4, "GB200"),
        ("1x16xV100-32", 1, 16, "V100-32"),
        ("2xMI300X", 1, 2, "MI300X"),
        ("4xcpu", 1, 4, "cpu"),
        ("2xRTX 3090", 1, 2, "RTX-3090"),
        ("2x8xH100:memory=96GB, power=500W", 2, 8, "H100-80:memory=96GB,power=500W"),
        ("16xTPU-v5e", 2, 8, "TPU-v5e"),
    ],
)
def test_what_is_read(text: str, nodes: int, devices: int, kind: str) -> None:
    cluster = parse_cluster(text)
    assert (cluster.nodes, cluster.devices, cluster.kind) == (nodes, devices, kind)
    assert parse_cluster(str(cluster)) == cluster


def test_the_network_is_gigabits_per_device() -> None:
    cluster = parse_cluster("4x8xH100@100")
    assert cluster.network_bytes_per_s == 12.5e9 and cluster.network is None
    assert parse_cluster("4x8xH100@12.5tcp").network == "tcp"
    assert parse_cluster("4x8xH100").network_bytes_per_s is None
    assert parse_cluster("4x8xH100").fabric == parse_cluster("4x8xH100@400").fabric


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no device"),
        ("8x", "names no device"),
        ("0xH100", "a count of 0"),
        ("4x0xH100", "a count of 0"),
        ("2x4x8xH100", "more than two numbers"),
        ("H100x8", "numbers stand before"),
        ("12xH100", "do not fill nodes of 8"),
        ("8xH100@fast", "no number of Gb/s"),
        ("8xH100@0", "no number of Gb/s"),
        ("8xH100@400smoke", "none of the networks"),
        ("8xH100@", "no number of Gb/s"),
        ("a few of them", "no such kind"),
        ("8xA1000", "no such kind"),
    ],
)
def test_impossible_text_is_refused_with_what_is_accepted(text: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_cluster(text)
    assert words in caught.value.found and ("8xH100" in caught.value.do or "H100-80" in caught.value.do)


def test_a_file_is_read(tmp_path: Path) -> None:
    cluster = Cluster(2, 8, "H100", network_bytes_per_s=25e9, network="efa", cards=4, in_network=False)
    write_cluster(tmp_path / "c.toml", cluster)
    assert parse_cluster(str(tmp_path / "c.toml")) == cluster


def test_a_file_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    write_cluster(tmp_path / "c.toml", Cluster(1, 2, "cuda", "nccl"))
    with pytest.raises(UserError, match="'cuda'"):
        parse_cluster(str(tmp_path / "c.toml"))


def test_local_is_what_a_run_would_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    cluster = parse_cluster("local")
    assert cluster.nodes == 1 and cluster.kind == "cpu" and 1 <= cluster.devices <= 8
    whole = cluster.device.memory_bytes * cluster.devices
    assert whole == pytest.approx(psutil.virtual_memory().total, rel=1e-6)


def test_an_unknown_gpu_of_this_machine_is_refused_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    class Facts:
        name = "NVIDIA H100 80GB HBM9"
        total_memory = 79 * 2**30

    monkeypatch.setattr("evenly.hardware.cluster_text.may_have_gpus", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Facts)
    with pytest.raises(UserError, match="H100 80GB HBM9") as caught:
        parse_cluster("local")
    assert "did you mean H100-80" in caught.value.do


def test_local_finds_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    class Facts:
        name = "NVIDIA H100 80GB HBM3"
        total_memory = 79 * 2**30

    monkeypatch.setattr("evenly.hardware.cluster_text.may_have_gpus", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Facts)
    cluster = parse_cluster("local")
    assert (cluster.devices, cluster.kind, cluster.device.memory_bytes) == (4, "H100-80", 79 * 2**30)
