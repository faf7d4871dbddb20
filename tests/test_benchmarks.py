"""What nothing else here runs of benchmarks/: every script finds what it imports; a table of docs/guide.md."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kept_ranks import KeptRanks

sys.path.insert(0, str(Path(__file__).parents[1]))  # for benchmarks

from benchmarks.memory import zero

ROOT = Path(__file__).parents[1]
OF_RIVALS = ("accelerate_ddp", "accelerate_exact", "deepspeed_zero", "fabric", "hf_trainer", "lightning_trainer")
PEERS = "benchmarks/peers"  # on the path of what benchmarks/tensor/train.py imports


def test_every_script_finds_what_it_imports() -> None:
    """Those of other libraries are left out, which are installed for peers alone (benchmarks/peers/README.md)."""
    paths = [path.relative_to(ROOT) for path in sorted((ROOT / "benchmarks").rglob("*.py"))]
    scripts = [str(path) for path in paths if path.parent.name != "runners" or path.stem not in OF_RIVALS]
    assert len(scripts) > 100
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "import_scripts.py"), *scripts],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / PEERS), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("", 0), done.stderr


def held(stage: int) -> tuple[float, list[int], int]:
    """What the formula has, and the bytes of state at each moment; on each rank."""
    count, moments, at_peak = zero.held(stage, 2)
    return zero.formula(stage, count, 2), [*map(zero.of_state, moments)], zero.of_state(at_peak)


@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_hold_what_the_formulas_of_zero_say(ranks: KeptRanks, stage: int) -> None:
    for expected, (first, second, step), peak in ranks.run(held, stage, size=2):
        assert first < second <= peak + 2 * first
        assert max(second, step) == pytest.approx(expected, rel=0.01)
        assert (step < 0.9 * expected) == (stage == 1)
