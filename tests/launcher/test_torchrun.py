"""Ranks that torchrun starts again find each other again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
