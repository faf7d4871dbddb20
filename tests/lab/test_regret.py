"""The table of regrets: what auto loses, and how far predictions are off; labs and jobs that exist."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks is no installed package

from benchmarks.lab.pairs import JOBS, LABS, PAIRS
from benchmarks.lab.regret_table import ratios, regret, table, typical
from evenly.jobfile import load_job

ROOT = Path(__file__).parents[2]


PAIR = "gpt2 on 2x1-50"


def row(plan: str, turn: int, *steps_s: float) -> dict[str, Any]:
    return {"pair": PAIR, "plan": plan, "turn": turn, "steps_s": steps_s}


def predicted(auto: str) -> dict[str, dict[str, Any]]:
    return {
        "zero=0": {"plan": "data=2", "predicted_s": 1.5},
        "tensor=2": {"plan": "tensor=2", "predicted_s": 3.0},
        "pipeline=2": {"refused": "no"},
        "auto": {"plan": auto, "predicted_s": 1.0},
    }


ROWS = [
    *(row("data=2", turn, taken) for turn, taken in enumerate((2.0, 1.0, 4.0))),
    *(row("tensor=2", turn, taken) for turn, taken in enumerate((3.0, 1.5, 5.0))),
    {"pair": PAIR, "plan": "pipeline=2", "turn": 0, "refused": "no"},
]


def test_a_step_is_the_median_of_its_runs_and_a_plan_the_mean_of_its_steps() -> None:
    more = [row("data=2 zero=1", turn, *taken) for turn, taken in enumerate([(2.0, 4.0), (9.0, 4.4), (2.2, 1.0)])]
    assert typical(ROWS) == {"data=2": 2.0, "tensor=2": 3.0}
    assert typical(more) == {"data=2 zero=1": pytest.approx(3.1)}
    assert regret("data=2 zero=1", [*ROWS, *more]) == pytest.approx(1.55) and regret("data=2 zero=1", ROWS) is None
    assert ratios(predicted("data=2"), ROWS) == {"zero=0": 0.75, "tensor=2": 1.0}


def test_auto_loses_nothing_where_it_takes_the_fastest_plan() -> None:
    assert regret("data=2", ROWS) == 1.0 and regret("tensor=2", ROWS) == 1.5


def test_a_run_in_which_auto_took_another_plan_is_none_of_the_predicted_one() -> None:
    assert typical([*ROWS, row("tensor=2", 0, 9.0) | {"taken": "data=2"}]) == typical(ROWS)


def test_the_table() -> None:
    lines = table({PAIR: predicted("tensor=2")}, ROWS).splitlines()
    assert lines[2] == "| gpt2 on 2x1-50 | data=2 | 2.000 | tensor=2 | 3.000 | 1.50 | zero=0 0.75, tensor=2 1.00 |"
    assert "1 pairs: auto takes 1.50 of the fastest in the median, 1.50 at worst." in lines
    assert "2 plans: predicted over measured is off by 12.5% in the median, 25.0% at the 90th percentile." in lines
    assert table({}, ROWS).count("|") == table({PAIR: predicted("data=2")}, ROWS[-1:]).count("|")


def test_what_is_run_in_labs_is_the_example_without_its_evaluations() -> None:
    path = ROOT / "benchmarks" / "lab" / "training_only.py"
    whole = load_job(ROOT / "examples" / "gpt2.py", {"layers": 1})
    trained = load_job(path, {"example": "gpt2", "layers": 1})
    assert whole.eval_sets and not trained.eval_sets
    assert (trained.name, trained.global_batch, trained.microbatch) == (
        whole.name,
        whole.global_batch,
        whole.microbatch,
    )


def test_pairs_are_of_jobs_and_labs_that_exist() -> None:
    assert len(PAIRS) >= 12 and len(set(map(str, PAIRS))) == len(PAIRS)
    assert {pair.job for pair in PAIRS} == set(JOBS) and {pair.lab for pair in PAIRS} == set(LABS)
    assert all((ROOT / "examples" / f"{name}.py").exists() for name, _ in JOBS.values())
