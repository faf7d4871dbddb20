"""The runner of benchmarks/gpu: what one step does, the others do not notice. .ci/run runs all steps on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as runner


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


def test_all_limits_on_a_gpu_add_up_to_less_than_ten_minutes() -> None:
    assert sum(step.limit_s for step in runner.STEPS.values()) < 600
