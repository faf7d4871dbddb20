"""Ranks that torchrun starts: again after a failure, and their end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
import torch
import evenly

def job():
    return evenly.Job(
        model=lambda: torch.nn.Linear(3, 2), loss=lambda model, x: evenly.Loss(model(x).sum(), len(x)),
        data=[torch.ones(3) for _ in range(64)], optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        global_batch=8, microbatch=2, steps=3,
    )

attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
with evenly.start(job(), plan="ddp") as run:
    for batch in run.batches():
        run.step(batch)
        if attempt < 2 and rank == 1:
            os._exit(1)
if rank == 0:
    print("attempt", attempt, "did", run.steps_done)
"""


@pytest.mark.full
def test_ranks_that_are_started_again_find_each_other(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2", "--rdzv-backend", "c10d"]
    done = subprocess.run(
        [sys.executable, *command, "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", "script.py"],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "attempt 2 did 3" in done.stdout


ABORTS = """
import atexit, os, sys, types
import torch
import evenly

class Aborts:
    def __del__(self, abort=os.abort):
        abort()

sys.modules["aborts"] = types.ModuleType("aborts")
sys.modules["aborts"].held = Aborts()  # until the interpreter ends, after all that is done at exit
atexit.register(print, "goodbye of the job")

def job():
    return evenly.Job(
        model=lambda: torch.nn.Linear(3, 2), loss=lambda model, x: evenly.Loss(model(x).sum(), len(x)),
        data=[torch.ones(3) for _ in range(64)], optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        global_batch=8, microbatch=2, steps=3,
    )
"""


def test_a_rank_that_has_done_its_run_ends_well_whatever_the_interpreter_does_then(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(ABORTS)
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", "-m", "evenly", "run", "job.py"]
    done = subprocess.run(
        [sys.executable, *command, "--out", "out"],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("goodbye of the job") == 2 and "3 steps on 2 ranks" in done.stdout
