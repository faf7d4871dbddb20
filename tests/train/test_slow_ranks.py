"""A rank that computes slowly is named in the run's lines and its folder, and one that waits is not."""

from __future__ import annotations

import json
from pathlib import Path

from evenly.launcher.agent import Launch, start_ranks
from evenly.report.analysis import shares_of, waits_of
from evenly.report.run import course_rows, read_run
from evenly.report.spans import read_recorded
from evenly.report.timeline import step_figures, step_of
from evenly.train.loop import run_job_file
from evenly.train.options import RunOptions

JOB = """
import os, time
import torch
import evenly

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x):
        time.sleep(0.25 if os.environ["RANK"] == "1" else 0)
        return self.layer(x)

def job():
    return evenly.Job(
        model=Model, loss=lambda model, x: evenly.Loss(model(x).sum(), len(x)), data=[torch.ones(3)] * 64,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), global_batch=8, microbatch=4, steps=60,
    )
"""


def test_a_rank_that_sleeps_in_its_forward_is_named(tmp_path: Path) -> None:
    path, out = tmp_path / "slow.py", tmp_path / "run"
    path.write_text(JOB)
    start_ranks(run_job_file, (path, {}, RunOptions(out=out), True), Launch(devices=2, log_dir=out / "logs"))
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["slow_rank"] for record in records if "slow_rank" in record] == [1]
    [text] = [text for name, text in course_rows(read_run(out)) if name == "slow rank"]
    assert text.startswith("rank 1: ")
    check_times(out)


def check_times(out: Path) -> None:
    """What ranks computed and waited is in the records, and a step of both in the timeline."""
    run, recorded = read_run(out), read_recorded(out)
    waits = waits_of(run)
    assert waits[0].waited_for == 1 and waits[0].waits_s > 0.2 > waits[0].busy_s and waits[1].waits_s == 0
    shares = shares_of(run)
    assert shares is not None and shares.waiting > 0.3 and 0.3 < shares.computing < 0.7
    assert run.plan["memory_limit_bytes"] > 2**20 and run.plan["settings"] == {}
    assert recorded is not None
    view = step_of(recorded, run.plan)
    assert view is not None and view.step in range(3, 8) and view.steps == 5 and {*view.ranks} == {0, 1}
    first, second = step_figures(view)
    assert second["passes_s"] > 0.25 > first["passes_s"] and first["waited_s"] > 0.2
