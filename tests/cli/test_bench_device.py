"""`evenly bench device` measures, shows and saves beside what the file holds; `bench comm` leaves the rates there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evenly.cli.bench import _saved_before, bench_device, with_links
from evenly.comm.bench import Bench, Fit, Hop, Measured
from evenly.errors import UserError
from evenly.hardware import probe
from evenly.hardware.cluster import Cluster, Link, Rates
from evenly.hardware.cluster_file import read_cluster, write_cluster


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "SIZES", {"cpu": (32, 64)})
    monkeypatch.setattr(probe, "COPIED_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(probe, "WINDOW_S", 0.002)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def test_rates_are_measured_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    assert bench_device(save=tmp_path / "c.toml", json_only=True) == 0
    shown = json.loads(capsys.readouterr().out)
    cluster = read_cluster(tmp_path / "c.toml")
    assert shown["kind"] == cluster.kind == "cpu" and cluster.nodes == 1
    assert shown["memory"] == cluster.rates.memory and cluster.rates.memory > 1e6
    assert set(cluster.rates.matmul) == {"float32", "float64", "bfloat16"}
    assert all(set(rates) == {32, 64} and min(rates.values()) > 1e5 for rates in cluster.rates.matmul.values())
    assert torch.get_num_threads() == threads


def test_rates_are_shown_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    bench_device(save=None, json_only=False)
    out = capsys.readouterr().out
    assert "TFLOP/s" in out and "float64" in out and "GB/s" in out


def test_rates_are_saved_beside_links(tmp_path: Path) -> None:
    before = Cluster(2, 4, "cpu", "gloo", {("send", 2): Link(1e-5, 1e-9)}, network="tcp")
    write_cluster(tmp_path / "c.toml", before)
    bench_device(save=tmp_path / "c.toml", json_only=True)
    after = read_cluster(tmp_path / "c.toml")
    assert (after.nodes, after.devices, after.links, after.network) == (2, 4, before.links, "tcp")
    assert after.rates.matmul


def test_links_are_saved_beside_links_of_the_same_backend_and_rates() -> None:
    measured = [Measured("send", 4, 1, 16, 3, 2e-5, 1.0, 1.0)]
    bench = Bench("gloo on cpu", 4, 1, measured, [Fit("send", 4, 1, 2e-5, 1e-9, 0.0)])
    new = {("send", 4): Link(2e-5, 1e-9, ((16, 2e-5),))}
    before = Cluster(1, 4, "cpu", "gloo", {("send", 2): Link(1e-5, 1e-9)}, rates=Rates(memory=1e10))
    assert with_links(before, bench).links == {**before.links, **new}
    assert with_links(before, replace(bench, link="nccl on cuda")).links == new
    assert with_links(before, bench).rates == before.rates
    ring = [Hop(node, (node + 1) % 3, [(1, 1e-3), (1024, 1e-3 + 1e-6)]) for node in range(3)]
    with_hops = with_links(before, replace(bench, hops=ring))
    assert with_hops.hops[2, 0].seconds(1) == 1e-3 and len(with_hops.hops) == 3
    assert with_links(with_hops, bench).hops == with_hops.hops
    assert not with_links(with_hops, replace(bench, link="nccl on cuda")).hops


def test_a_file_of_one_node_is_completed_to_several_and_one_of_others_refused(tmp_path: Path) -> None:
    write_cluster(tmp_path / "c.toml", Cluster(1, 2, "cpu", rates=Rates(memory=1e10)))
    assert _saved_before(tmp_path / "c.toml", 2, 4) == Cluster(4, 2, "cpu", rates=Rates(memory=1e10))
    with pytest.raises(UserError, match="it is of 1 x 2 devices, and these are 4 x 1"):
        _saved_before(tmp_path / "c.toml", 1, 4)


def test_a_file_of_other_devices_is_not_mixed_with_these(tmp_path: Path) -> None:
    write_cluster(tmp_path / "c.toml", Cluster(1, 8, "H100-80"))
    with pytest.raises(UserError, match=r"it is of H100-80, this machine has cpu"):
        bench_device(save=tmp_path / "c.toml", json_only=True)


def test_a_size_that_takes_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LONGEST_S", 0.0)
    assert all(set(rates) == {32} for rates in probe.probe("cpu").matmul.values())


def test_a_core_that_is_lent_in_turns_counts_as_what_it_does_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def act() -> None:
        clock[0] += 0.001
        if round(clock[0] * 1000) % 10 == 5:  # gone for as long as it was there
            clock[0] += 0.005

    monkeypatch.setattr(probe, "WINDOW_S", 0.1)
    monkeypatch.setattr(probe.time, "perf_counter", lambda: clock[0])
    assert probe.seconds_each(act, "cpu") == pytest.approx(0.002, rel=0.05)
