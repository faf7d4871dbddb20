"""Ranks that stand still end the run with a sentence that says which, and where."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_left import JOB

from evenly.launcher.agent import FailedRank, Launch, start_ranks
from evenly.train import run
from evenly.train.loop import run_job_file
from evenly.train.options import RunOptions

LIMIT_S = 3.0
STOP = "__import__('time').sleep(2); os.kill(os.getpid(), 19)"  # once its place has been recorded


def run_with_data_worker(path: Path) -> None:
    """As on a GPU."""
    run.worker_count = lambda **_: 1
    run_job_file(path, {}, RunOptions(), True)


def job_that(does: str, rank: int, folder: Path) -> Path:
    path = folder / "standing.py"
    path.write_text(JOB.format(rank=rank, leave=does))
    return path


@pytest.mark.parametrize("does", ["while True: len(range(9))", "import time; time.sleep(600)"])
def test_a_loop_in_the_dataset_of_the_only_rank_is_named(does: str, tmp_path: Path) -> None:
    path = job_that(does, 0, tmp_path)
    with pytest.raises(FailedRank, match=r"not got on for \d+ s: it is in __getitem__ \(standing.py:11"):
        start_ranks(run_job_file, (path, {}, RunOptions(), True), Launch(devices=1, stall_limit_s=LIMIT_S))


def test_a_loop_in_a_data_worker_is_named(tmp_path: Path) -> None:
    path = job_that("while torch.utils.data.get_worker_info(): pass", 0, tmp_path)
    with pytest.raises(FailedRank, match=r"data worker in __getitem__ \(standing.py:11\)"):
        start_ranks(run_with_data_worker, (path,), Launch(devices=1, stall_limit_s=LIMIT_S))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_stopped_rank_is_named(devices: int, tmp_path: Path) -> None:
    path = job_that(STOP, devices - 1, tmp_path)
    words = rf"rank {devices - 1}'s process is stopped \(SIGSTOP or the like\).*__getitem__ \(standing.py:11"
    with pytest.raises(FailedRank, match=words) as caught:
        start_ranks(run_job_file, (path, {}, RunOptions(), True), Launch(devices=devices, stall_limit_s=LIMIT_S))
    assert caught.value.rank == devices - 1
