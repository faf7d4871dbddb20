"""The campaign of faults: its cases as data, how it judges, and twenty of them run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks is no installed package

from benchmarks.faults.__main__ import read_rows
from benchmarks.faults.cases import FEW, OF_THE_LOSS, PLACES, PLANS, Case, cases, few, named_rightly
from benchmarks.faults.damage import HARMLESS, KINDS, damage_newest
from benchmarks.faults.row import _steps_done_again, difference
from benchmarks.faults.summary import WORDS, figures, page, summary
from evenly.checkpoint.folder import CheckpointFolder
from evenly.checkpoint.store import CheckpointStore, Snapshot

ROOT = Path(__file__).parents[2]
LIMIT_S = 900.0  # of a machine that may stand still: it takes less than a minute

EVERY = cases(1000)


def test_a_thousand_cases_are_the_same_each_time_and_leave_nothing_out() -> None:
    assert cases(1000) == EVERY and cases(1000, seed=1) != EVERY and cases(10) == EVERY[:10]
    assert [case.number for case in EVERY] == list(range(1000))
    drawn = Counter((case.fault, case.place, case.plan) for case in EVERY)
    small = [plan for plan, ranks in PLANS.items() if ranks == 2]
    assert not [(f, place, plan) for f, places in PLACES.items() for place in places for plan in small
                if drawn[f, place, plan] < 2]  # fmt: skip
    assert {case.fault for case in EVERY if case.plan == "3d"} == set(PLACES) == set(WORDS)
    assert all(case.rank in OF_THE_LOSS.get(case.plan, range(8)) for case in EVERY if case.place == "loss")


def test_the_twenty_are_of_all_plans() -> None:
    assert [case.fault for case in few(EVERY)] == list(FEW) and len(FEW) == 20
    assert {case.plan for case in few(EVERY)} == set(PLANS)


def case_of(fault: str, place: str) -> Case:
    return Case(0, fault, place, "ddp", 2, 1, 5, "resume")


@pytest.mark.parametrize(
    ("fault", "place", "right", "wrong"),
    [
        ("kill", "loss", "rank 1 failed: it was killed by SIGKILL", "rank 0 failed: it was killed by SIGKILL"),
        ("kill", "loss", "rank 1 failed: it was killed by SIGKILL", "rank 1 failed: it lost another rank"),
        ("abort", "loss", "rank 1 failed: killed by SIGABRT", "rank 1 failed: it ended with exit code 0"),
        ("stop", "loss", "rank 1's process is stopped (SIGSTOP or", "rank 1 did not reach all_reduce #3"),
        ("hang", "loss", "rank 1 has not got on: in loss (faulty_job.py:3", "rank 1 did not reach all_reduce #3"),
        ("os._exit(0)", "loss", "rank 1 failed: it ended with exit code 0 before the run had ended", "rank 1 failed"),
        ("truncated", "before", "the checkpoint of step 6 is not sound (a): going on from step 3", "going on"),
        ("port-taken", "before", "port 2300 is taken", "the address is in use"),
    ],
)
def test_a_message_has_to_name_rank_and_cause(fault: str, place: str, right: str, wrong: str) -> None:
    assert named_rightly(case_of(fault, place), right) and not named_rightly(case_of(fault, place), wrong)


def test_a_difference_is_seen_and_so_are_numbers_that_are_none() -> None:
    one = {"a": np.array([1.0, -4.0]), "b": np.zeros(0)}
    assert difference(one, one) == 0.0
    assert difference({**one, "a": np.array([1.0, -4.0 + 4e-8])}, one) == pytest.approx(1e-8)
    others = [{"a": one["a"]}, {**one, "a": np.ones(3)}, {**one, "a": np.array([math.nan, -4.0])}]
    assert [difference(other, one) for other in others] == [math.inf] * 3


def test_steps_that_were_done_again_are_counted(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "loss": 1.0, "weight": 2.0}) for step in (1, 2, 3, 4, 3, 4, 5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 9, "lo']))
    assert _steps_done_again(tmp_path / "metrics.jsonl") == 2
    assert _steps_done_again(tmp_path / "none.jsonl") is None


@pytest.mark.parametrize("kind", KINDS)
def test_each_damage_makes_the_newest_checkpoint_unsound_or_leaves_it(kind: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (3, 6):
        store.save(Snapshot(step, {"a": torch.arange(100.0)}, {}))
    store.close()
    damage_newest(tmp_path, kind)
    assert CheckpointFolder(tmp_path).newest_sound() == (6 if kind in HARMLESS else 3)


def test_a_summary_shows_what_fell_short() -> None:
    row = {
        "case": 1,
        "fault": "kill",
        "place": "loss",
        "plan": "ddp",
        "commit": "abc",
        "skipped": "",
        "left": [],
        "noticed_s": 1.0,
        "named": True,
        "lost": 2,
        "difference": 1e-12,
        "short": [],
    }
    bad = row | {"case": 2, "noticed_s": 4.0, "named": False, "difference": 0.5, "short": ["the numbers differ by 0.5"]}
    found = summary([row, bad, row | {"skipped": "not root"}], asked=5)
    assert (found["run"], found["all"]["short"], found["all"]["wrong_numbers"]) == (2, 1, 1)
    assert found["short"] == [bad] and found["skipped"] == {"not root": 1}
    assert figures([row, bad])["noticed_median_s"] == 2.5 and figures([])["noticed_median_s"] is None
    text = page(found, [])
    assert (
        "2 of 5 rows; 1 skipped: not root" in text and "| 2 | kill | loss | ddp | the numbers differ by 0.5 |" in text
    )


@pytest.mark.full
def test_twenty_faults_end_in_the_numbers_of_a_run_that_nothing_disturbs(tmp_path: Path) -> None:
    rows, path = tmp_path / "rows.jsonl", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults", "--few", "--rows", rows], cwd=tmp_path, timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    found = read_rows(rows)
    assert sorted(found) == sorted(case.number for case in few(EVERY)), ended.stdout + ended.stderr
    assert {number: row["short"] for number, row in found.items() if row["short"]} == {}, ended.stdout
    compared = [row for row in found.values() if row["fault"] != "all-damaged" and not row["skipped"]]
    assert all(row["difference"] is not None for row in compared)
