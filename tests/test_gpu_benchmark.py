"""The runner of benchmarks/gpu: what one step does, the others do not notice. make test-all runs it on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as runner
from benchmarks.gpu.models import case_of
from benchmarks.gpu.speed import predicted
from evenly.hardware.cluster_text import parse_cluster
from evenly.planner.speeds import own_library

RESULTS = runner.ROOT / "benchmarks" / "results" / "gpu-nvidia-h200.json"


@pytest.mark.skipif(torch.cuda.is_available(), reason="fails only without a GPU")
def test_a_step_that_fails_is_recorded_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path), "--only", "environment", "doctor"])
    monkeypatch.setitem(runner.STEPS, "doctor", runner.STEPS["doctor"]._replace(limit_s=0))
    assert runner.main() == 1
    [file] = tmp_path.glob("gpu-*.json")
    steps = json.loads(file.read_text())["steps"]
    assert steps["environment"]["failed"] and "Error" in steps["environment"]["error"]
    assert steps["doctor"]["failed"] and "it took too long" in steps["doctor"]["error"]
    assert capsys.readouterr().out.count("FAILED") == 2


def test_what_a_step_finds_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--cpu", "--out", str(tmp_path), "--only", "environment"])
    assert runner.main() == 0
    found = json.loads((tmp_path / "gpu-cpu.json").read_text())["steps"]["environment"]
    assert found["packages"]["torch"] == torch.__version__ and not found["failed"]


def test_a_llama_is_predicted_as_an_h200_trained_it() -> None:
    measured = json.loads(RESULTS.read_text())["steps"]["llama"]["contenders"]["evenly"]
    found = predicted(case_of("llama", cpu=False), parse_cluster("1xH200"))
    assert abs(found["step_s"] / measured["step_s"] - 1) < 0.1
    driver = own_library("bfloat16", bitwise=False, on_cpu=False).holdings.rest
    assert abs((found["peak_bytes"] - driver) / measured["peak_bytes"] - 1) < 0.005


def test_all_limits_on_a_gpu_add_up_to_less_than_ten_minutes() -> None:
    assert sum(step.limit_s for step in runner.STEPS.values()) < 600
