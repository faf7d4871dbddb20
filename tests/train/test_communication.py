"""A run records how much of its communication was hidden: in its metrics, and operation by operation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evenly.launcher.agent import Launch, start_ranks
from evenly.plan import parse_plan
from evenly.report.analysis import communication_of
from evenly.report.run import read_run
from evenly.report.spans import read_recorded
from evenly.train.loop import run_job_file
from evenly.train.options import RunOptions

# The second stage of a pipeline is slow: the first has sent more than it takes.
JOB = """
import time
import torch
import evenly

class Slow(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)

def job():
    return evenly.Job(
        model=lambda: torch.nn.Sequential(*(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64), Slow(64, 64))),
        loss=lambda model, x: evenly.Loss(model(x).square().sum(), len(x)), data=[torch.ones(64)] * 64,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3), global_batch=16, microbatch=2, steps=8,
    )
"""


def recorded_run(plan: str, folder: Path) -> tuple[Path, dict[int, dict[str, dict[str, float]]]]:
    """The folder of a run on two ranks, and what its metrics say of communication, by step."""
    path, out = folder / "job.py", folder / "run"
    path.write_text(JOB)
    options = RunOptions(plan=parse_plan(plan), out=out)
    start_ranks(run_job_file, (path, {}, options, True), Launch(devices=2, log_dir=out / "logs"))
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return out, {record["step"]: record["communication"] for record in records if "communication" in record}


@pytest.mark.full_but("zero3-data", "tensor=2-tensor")
@pytest.mark.parametrize(("plan", "axis"), [("zero2", "data"), ("zero3", "data"), ("tensor=2", "tensor")])
def test_the_operations_of_an_axis_are_recorded(plan: str, axis: str, tmp_path: Path) -> None:
    out, found = recorded_run(plan, tmp_path)
    assert sorted(found) == [3, 4, 5, 6, 7] and all({*by_axis} == {axis} for by_axis in found.values())
    for seconds in (by_axis[axis] for by_axis in found.values()):
        assert 0 <= seconds["waited_s"] <= seconds["under_way_s"] and seconds["under_way_s"] > 0
        assert seconds["hidden"] == pytest.approx(1 - seconds["waited_s"] / seconds["under_way_s"])
    assert [one.axis for one in communication_of(read_run(out))] == [axis]
    recorded = read_recorded(out)
    assert recorded is not None
    operations = [one for steps in recorded.others.values() for one in steps[3] if one.kind == "operation"]
    assert operations and all(one.axis == axis and one.waited_s is not None for one in operations)
    gathers = {one.name for one in operations if "gather" in one.name}
    assert gathers == {"tensor": set(), "data": {"all_gather (parameters)"}}[axis] or plan == "zero2"


def test_sends_of_a_pipeline_are_under_way_while_the_next_microbatch_is_computed(tmp_path: Path) -> None:
    out, found = recorded_run("pipeline=2 schedule=gpipe", tmp_path)
    assert sorted(found) == [3, 4, 5, 6, 7] and all({*by_axis} == {"pipeline"} for by_axis in found.values())
    recorded = read_recorded(out)
    assert recorded is not None
    overlapping = 0
    for step, passes in recorded.steps[0].items():
        begins = [span.begin_s for span in passes if span.kind == "forward"]
        sends = [one for one in recorded.others[0][step] if one.name == "send" and one.axis == "pipeline"]
        overlapping += sum(one.begin_s < begin < one.end_s for one in sends for begin in begins)
    assert overlapping >= len(recorded.steps[0])
    lines = (out / "timeline" / "rank1.jsonl").read_text().splitlines()
    receives = [one for one in map(json.loads, lines) if one["kind"] == "recv_forward"]
    assert receives and all("arrived_s" in one for one in receives)


def test_nothing_is_timed_where_nothing_is_recorded(tmp_path: Path) -> None:
    """Of one rank, there is no communication."""
    path, out = tmp_path / "job.py", tmp_path / "run"
    path.write_text(JOB)
    start_ranks(run_job_file, (path, {}, RunOptions(out=out), True), Launch(devices=1, log_dir=out / "logs"))
    rows: list[Any] = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows and not any("communication" in row for row in rows)
