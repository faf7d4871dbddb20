"""The table of regrets: what auto loses, by turns, and how far predictions are off; labs and jobs that exist."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks is no installed package

from benchmarks.lab.pairs import JOBS, LABS, PAIRS
from benchmarks.lab.regret_table import ratios, regret, table, typical

ROOT = Path(__file__).parents[2]


def row(asked: str, turn: int, step_s: float, predicted_s: float = 1.0, plan: str = "") -> dict[str, Any]:
    known = {"step_s": step_s, "predicted_s": predicted_s, "plan": plan or asked}
    return {"pair": "gpt2 on 2x1-50", "asked": asked, "turn": turn, **known}


ROWS = [
    *(row("data=2", turn, taken, 1.5) for turn, taken in enumerate((2.0, 1.0, 4.0))),
    *(row("tensor=2", turn, taken, 3.0) for turn, taken in enumerate((3.0, 1.5, 5.0))),
    {"pair": "gpt2 on 2x1-50", "asked": "pipeline=2", "turn": 0, "refused": "no"},
]


def test_plans_are_compared_within_turns() -> None:
    auto = [row("auto", turn, taken, 1.0, "data=2 zero=1") for turn, taken in enumerate((2.2, 1.1, 4.0))]
    assert typical(ROWS) == {"data=2": 2.0, "tensor=2": 3.0}
    assert regret([*ROWS, *auto]) == pytest.approx(1.1) and regret(ROWS) is None
    assert ratios(ROWS) == {"data=2": 0.75, "tensor=2": 1.0}


def test_auto_loses_nothing_where_it_took_the_fastest_plan_or_is_the_fastest() -> None:
    assert regret([*ROWS, row("auto", 0, 9.9, 1.0, "data=2")]) == 1.0
    assert regret([*ROWS, row("auto", 0, 0.5, 1.0, "other")]) == 1.0


def test_the_table() -> None:
    lines = table([*ROWS, row("auto", 1, 1.5, 3.0, "tensor=2")]).splitlines()
    assert lines[2] == ("| gpt2 on 2x1-50 | tensor=2 | 1.500 | tensor=2 | 1.500 | 1.00 | data=2 0.75, tensor=2 1.00 |")
    assert "1 pairs: auto takes 1.00 of the fastest in the median, 1.00 at worst." in lines
    assert "2 plans: predicted over measured is off by 12.5% in the median, 25.0% at the 90th percentile." in lines
    assert table([]).count("|") == table(ROWS[-1:]).count("|")


def test_pairs_are_of_jobs_and_labs_that_exist() -> None:
    assert len(PAIRS) >= 12 and len(set(map(str, PAIRS))) == len(PAIRS)
    assert {pair.job for pair in PAIRS} == set(JOBS) and {pair.lab for pair in PAIRS} == set(LABS)
    assert all((ROOT / "examples" / f"{name}.py").exists() for name, _ in JOBS.values())
