from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from evenly.comm import doctor
from evenly.comm.doctor import Finding, Outcome, examine, torch_version
from evenly.launcher.agent import FailedRank
from evenly.launcher.allocator import cgroup_limit_bytes


def named(findings: list[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


def test_every_question_is_answered() -> None:
    findings = examine({}, probe=False)
    names = [finding.name for finding in findings]
    for name in ("python", "torch", "devices", "backends", "cores", "memory", "disk", "loopback", "port", "rank"):
        assert name in names or (name == "devices" and "cuda:0" in names)
    assert len(set(names)) == len(names)
    assert named(findings, "rank").value == "rank 0 of 1, node 0 of 1 (plain)"
    json.dumps([asdict(finding) for finding in findings])


def test_every_fault_comes_with_advice() -> None:
    environ = {
        "RANK": "0",
        "OMP_NUM_THREADS": "100000",
        "CUDA_VISIBLE_DEVICES": "",
        "NCCL_DEBUG": "INFO",
        "HTTPS_PROXY": "http://user:secret@proxy",
        "CUDA_LAUNCH_BLOCKING": "1",
    }
    findings = examine(environ, probe=False)
    assert named(findings, "rank").verdict == "problem"
    assert "WORLD_SIZE not set" in named(findings, "rank").value
    assert named(findings, "OMP_NUM_THREADS").verdict == "problem"
    assert named(findings, "CUDA_VISIBLE_DEVICES").verdict == "note"
    assert named(findings, "overrides").value == "NCCL_DEBUG"
    assert named(findings, "CUDA_LAUNCH_BLOCKING").verdict == "note"
    assert "secret" not in str(findings)
    assert all(finding.advice for finding in findings if finding.verdict != "ok")


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("2.10.0", "problem"), ("2.11.0", "ok"), ("2.15.1+cu128", "ok"), ("2.16.0", "problem"), ("3.0", "problem")],
)
def test_torch_versions(version: str, verdict: str) -> None:
    assert torch_version(version, version).verdict == verdict


def test_a_host_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(host: str) -> str:
        raise OSError(host)

    monkeypatch.setattr(doctor.socket, "gethostbyname", fails)
    alone = next(iter(doctor._hostname({})))
    assert alone.verdict == "note"
    assert "GLOO_SOCKET_IFNAME" in alone.advice
    assert "eth1" in next(iter(doctor._hostname({"GLOO_SOCKET_IFNAME": "eth1"}))).advice


def test_memory_limit_of_the_control_group(tmp_path: Path) -> None:
    assert cgroup_limit_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroup_limit_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("1048576\n")
    assert cgroup_limit_bytes(tmp_path) == 1048576


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert next(iter(doctor._disk(tmp_path))).verdict == "problem"


def test_every_operation_is_really_tried_between_ranks() -> None:
    findings = list(doctor._ranks(3))
    assert [finding.verdict for finding in findings] == ["ok", "ok"], findings
    assert "all_reduce of 4 MiB in" in findings[0].value
    assert findings[1].value.startswith("10 of 10 work: send and recv, broadcast")


def test_an_operation_that_fails_is_named_with_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = Outcome(0.1, ""), Outcome(0.1, "its result is wrong")
    results = {0: {"all_reduce": good, "gather": good}, 1: {"all_reduce": good, "gather": bad}}
    monkeypatch.setattr(doctor, "start_ranks", lambda *_: results)
    *_, counted, finding = doctor._ranks(2)
    assert counted.value == "1 of 2 work: all_reduce, gather"
    assert (finding.name, finding.value, finding.verdict) == ("gather", "rank 1: its result is wrong", "problem")


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 2), (1, 1), (8, 2)])
def test_one_gpu_has_one_rank_to_try_by_default(gpus: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(doctor, "local_gpus", lambda: gpus)
    monkeypatch.setattr(doctor, "_ranks", lambda world: asked.append(world) or ())
    examine({})
    examine({}, world=5)
    assert asked == [ranks, 5]


def test_ranks_that_cannot_talk_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise FailedRank("rank 1 failed", "no route", "", rank=1)

    monkeypatch.setattr(doctor, "start_ranks", fails)
    finding = next(iter(doctor._ranks(2)))
    assert (finding.verdict, finding.value) == ("problem", "rank 1 failed: no route")
    assert finding.advice
