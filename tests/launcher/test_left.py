"""A rank that ends before the run does is a failure, whatever its exit code."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

import evenly
from evenly.errors import RunError
from evenly.launcher.agent import FailedRank, Launch, start_ranks
from evenly.launcher.environment import find_here
from evenly.train.loop import run_job_file, run_script
from evenly.train.options import RunOptions

JOB = """
import os, sys
import torch
import evenly

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if os.environ["RANK"] == str({rank}) and index >= 0:
            {leave}
        return torch.ones(3)

def job():
    return evenly.Job(
        model=lambda: torch.nn.Linear(3, 2), loss=lambda model, x: evenly.Loss(model(x).sum(), len(x)), data=Data(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), global_batch=8, microbatch=2, steps=3,
    )
"""


def leave_at_once(rank: int, how: str) -> None:
    """Rank `rank` leaves, the others wait for it."""
    if find_here().rank == rank:
        {"_exit": lambda: os._exit(0), "abort": os.abort, "sys.exit": sys.exit}[how]()
    with evenly.start(job_of_ones(), plan="ddp") as run:
        for batch in run.batches():
            run.step(batch)


def job_of_ones() -> evenly.Job:
    return evenly.Job(
        model=lambda: torch.nn.Linear(3, 2),
        loss=lambda model, x: evenly.Loss(model(x).sum(), len(x)),
        data=[torch.ones(3) for _ in range(64)],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        global_batch=8,
        microbatch=2,
        steps=3,
    )


@pytest.mark.full_but("1-0", "2-1")
@pytest.mark.parametrize(("devices", "rank"), [(1, 0), (2, 1), (3, 0)])
def test_a_rank_that_is_gone_is_named(devices: int, rank: int) -> None:
    with pytest.raises(FailedRank, match="ended with exit code 0 before the run had ended") as caught:
        start_ranks(leave_at_once, (rank, "_exit"), Launch(devices=devices))
    assert caught.value.rank == rank and caught.value.exit_code == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_gone_is_named_and_not_the_one_that_has_lost_it(rank: int, tmp_path: Path) -> None:
    path = tmp_path / "leaving.py"
    path.write_text(JOB.format(rank=rank, leave="os._exit(0)"))
    with pytest.raises(FailedRank, match="ended with exit code 0 before the run had ended") as caught:
        start_ranks(run_job_file, (path, {}, RunOptions(), True), Launch(devices=2))
    assert caught.value.rank == rank


def test_a_rank_that_aborts_is_not_taken_for_one_that_leaves_where_the_agent_looks_late() -> None:
    with pytest.raises(FailedRank, match="killed by SIGABRT") as caught:
        start_ranks(leave_at_once, (1, "abort"), Launch(devices=2, look_every_s=4.0))
    assert caught.value.rank == 1


def test_a_sample_that_one_rank_cannot_read_is_named_with_that_rank(tmp_path: Path) -> None:
    path = tmp_path / "unread.py"
    path.write_text(JOB.format(rank=1, leave='raise OSError("stale file handle")'))
    with pytest.raises(FailedRank, match=r"reading sample .*stale file handle") as caught:
        start_ranks(run_job_file, (path, {}, RunOptions(), True), Launch(devices=2))
    assert caught.value.rank == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_returns_before_it_joins_is_named(rank: int) -> None:
    with pytest.raises(FailedRank, match=f"returned before it had joined the run of rank {1 - rank}"):
        start_ranks(leave_at_once, (rank, "sys.exit"), Launch(devices=2))


@pytest.mark.full_but("1-sys.exit(3)-3", "2-sys.exit(0)-0")
@pytest.mark.parametrize(("leave", "code"), [("sys.exit(0)", "0"), ("sys.exit()", "None"), ("sys.exit(3)", "3")])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_job_that_calls_exit_is_named(leave: str, code: str, devices: int, tmp_path: Path) -> None:
    path = tmp_path / "leaving.py"
    path.write_text(JOB.format(rank=devices - 1, leave=leave))
    with pytest.raises(FailedRank, match=rf"sys\.exit\({code}\).*leaving\.py:11") as caught:
        start_ranks(run_job_file, (path, {}, RunOptions(), True), Launch(devices=devices))
    assert caught.value.rank == devices - 1


def test_a_job_file_that_exits_is_named(tmp_path: Path) -> None:
    path = tmp_path / "leaving.py"
    path.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(FailedRank, match=r"sys\.exit\(0\) before the run had begun \(leaving\.py:2\)"):
        start_ranks(run_job_file, (path, {}, RunOptions(), True), Launch(devices=1))


def test_a_script_may_exit_when_its_run_is_over(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    ending = (
        "import sys\nwith evenly.start(job(), plan='ddp') as run:\n    for batch in run.batches(): run.step(batch)\n"
    )
    path.write_text(JOB.format(rank=-1, leave="pass") + ending + "sys.exit(0)\n")
    assert start_ranks(run_script, (path, True), Launch(devices=2)) == {0: None, 1: None}


def test_a_loop_of_ones_own_that_exits_is_an_error() -> None:
    with (
        pytest.raises(RunError, match=r"sys\.exit\(0\) after step 1"),
        evenly.start(job_of_ones(), plan="single") as run,
    ):
        for batch in run.batches():
            run.step(batch)
            sys.exit(0)
