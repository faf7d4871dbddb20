"""A real Ray of two nodes loses one in the middle of a run, which ends where one device ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from evenly.checkpoint.store import CheckpointStore
from evenly.train.loop import run_job
from evenly.train.options import RunOptions

pytestmark = pytest.mark.full  # a real Ray of two nodes

ROOT = Path(__file__).parents[2]
LIMIT_S = 1200.0  # on slow cores each start of the two workers takes minutes


def state(out: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole."""
    checkpoint = CheckpointStore(out).load(step)
    into = {name: torch.empty(form.shape, dtype=getattr(torch, form.dtype)) for name, form in checkpoint.forms.items()}
    checkpoint.read(into)
    return into


def test_a_node_that_is_lost(tmp_path: Path) -> None:
    from lost_node import WAITS_AT, job  # which imports Ray

    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3", "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}
    command = [sys.executable, str(Path(__file__).with_name("lost_node.py")), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert "is gone, perhaps with its node" in done.stderr, done.stderr
    assert f"restart 1 in 1 s, from step {WAITS_AT - 1}\n" in done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["world"], summary["first_step"], summary["steps"]) == (1, WAITS_AT, 9)
    alone = job()
    run_job(alone, RunOptions(out=tmp_path / "alone", quiet=True))
    expected, found = state(tmp_path / "alone", 9), state(tmp_path / "out", 9)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12, msg=name)
    assert [p.pid for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())] == []
