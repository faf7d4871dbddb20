"""What a job file finds in sys.argv: what follows `--`, in every process of every command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

JOB = """
import argparse, os, sys
import torch
import evenly

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.5)
parser.add_argument("--plan", default="none")  # a name that evenly has too
lr = parser.parse_args()
with open(os.environ["SEEN"], "a") as seen:
    seen.write(f"{sys.argv[0]} {lr.lr} {lr.plan}\\n")


def job():
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    return evenly.Job(
        model=lambda: torch.nn.Linear(4, 1), data=torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)),
        loss=lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda p: torch.optim.SGD(p, lr.lr), global_batch=4, steps=2,
    )
"""


def seen_by(folder: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    (job := folder / "job.py").write_text(JOB)
    (seen := folder / "seen").write_text("")
    command = [sys.executable, "-c", "from evenly.cli.main import main; main()", words[0], str(job), *words[1:]]
    environment = {**os.environ, "SEEN": str(seen), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    return done, {*seen.read_text().splitlines()}


def test_the_ranks_of_a_run_find_what_follows_and_so_does_one_that_goes_on(tmp_path: Path) -> None:
    run = ["run", "--plan", "ddp", "--devices", "2", "--out", "out"]
    done, seen = seen_by(tmp_path, *run, "--", "--lr", "0.1", "--plan", "mine")
    assert (done.returncode, seen) == (0, {f"{tmp_path / 'job.py'} 0.1 mine"}), done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["lr"] == 0.1
    done, seen = seen_by(tmp_path, *run, "--steps", "3", "--resume")
    assert (done.returncode, seen) == (0, {f"{tmp_path / 'job.py'} 0.1 mine"}), done.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    "words", [("verify", "--plans", "ddp", "--steps", "2"), ("plan", "--cluster", "2xH100"), ("plan", "--explain")]
)
def test_other_commands_hand_it_on(words: tuple[str, ...], tmp_path: Path) -> None:
    asked = [*words, "--only", "tensor=2"] if "--explain" in words else [*words]
    done, seen = seen_by(tmp_path, *asked, "--", "--lr", "0.1")
    assert seen == {f"{tmp_path / 'job.py'} 0.1 none"}, done.stderr


@pytest.mark.full
def test_without_dashes_they_are_refused(tmp_path: Path) -> None:
    done, seen = seen_by(tmp_path, "run", "0.1")
    assert done.returncode == 2 and not seen
    assert "arguments 0.1" in done.stderr and "put -- before them" in done.stderr
