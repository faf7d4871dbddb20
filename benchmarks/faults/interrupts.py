"""Ctrl-C twice, the second while the run is about to end: how each of many runs ends.

    python benchmarks/faults/interrupts.py --runs 100

Both signals go to the whole process group of a run on two ranks, as a terminal sends them: the first at a random
moment, the second up to 0.3 s after the checkpoint that the first asked for is complete. Prints, as one JSON object,
how many ended clean: with exit code 130, within 5 s of the second signal, with a sound checkpoint and no process left;
what the others did; and the longest that a run took to end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from evenly.checkpoint.folder import CheckpointFolder

LIMIT_S, START_LIMIT_S = 5.0, 120.0
MARK = "EVENLY_INTERRUPTED_RUN"
JOB = """
import time
import torch
from torch import nn
import evenly


def loss(model, x):
    time.sleep(0.01)
    return evenly.Loss(model(x).square().sum(), len(x))


def job(steps: int = 100_000) -> evenly.Job:
    return evenly.Job(
        model=lambda: nn.Linear(5, 3),
        loss=loss,
        data=[torch.ones(5) * index for index in range(50)],
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
        global_batch=4,
        microbatch=2,
        steps=steps,
        save_every=1_000_000,
    )
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    draw, clean, longest_s, others = random.Random(asked.seed), 0, 0.0, list[str]()
    for number in range(asked.runs):
        with tempfile.TemporaryDirectory(prefix="interrupts-") as name:
            took_s, wrong = interrupted(Path(name), draw)
        clean, longest_s = clean + (not wrong), max(longest_s, took_s)
        others += [f"run {number}: {', '.join(wrong)}"] if wrong else []
        print(f"{number + 1}/{asked.runs} {took_s:.2f} s {', '.join(wrong) or 'clean'}", file=sys.stderr, flush=True)
    found: dict[str, Any] = {"runs": asked.runs, "clean": clean, "longest_s": round(longest_s, 2), "others": others}
    print(json.dumps(found, indent=1))


def interrupted(folder: Path, draw: random.Random) -> tuple[float, list[str]]:
    """Seconds from the second signal to the end of a run in `folder`, and what was wrong with it."""
    (folder / "job.py").write_text(JOB)
    command = [sys.executable, "-m", "evenly", "run", "job.py", "--plan", "ddp", "--devices", "2", "--out", "out"]
    environment = {**os.environ, MARK: str(folder)}
    with (folder / "said").open("w") as said:
        run = subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=said, start_new_session=True)
    checkpoints, metrics = CheckpointFolder(folder / "out"), folder / "out" / "metrics.jsonl"
    if not until(lambda: metrics.exists() and '"step"' in metrics.read_text(), START_LIMIT_S):
        run.kill()
        return 0.0, ["it did not start: " + (folder / "said").read_text()[-300:]]
    time.sleep(draw.uniform(0, 0.5))
    os.killpg(run.pid, signal.SIGINT)
    until(lambda: checkpoints.steps() or run.poll() is not None, LIMIT_S)
    time.sleep(draw.uniform(0, 0.3))
    if run.poll() is None:
        os.killpg(run.pid, signal.SIGINT)
    began_s, wrong = time.monotonic(), list[str]()
    try:
        run.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        wrong.append(f"no end within {LIMIT_S:.0f} s")
    took_s = time.monotonic() - began_s
    if not wrong and run.returncode != 130:
        wrong.append(f"exit code {run.returncode}")
    if not until(lambda: not left(folder), max(1.0, LIMIT_S - took_s)):
        wrong.append(f"{len(left(folder))} processes left")
        for process in left(folder):
            process.kill()
    if checkpoints.newest_sound() is None or len(checkpoints.steps()) != 1:
        wrong.append("no sound checkpoint")
    return took_s, wrong


def until(condition: Any, limit_s: float) -> bool:
    """Whether `condition` became true within `limit_s`."""
    end_s = time.monotonic() + limit_s
    while not (found := condition()) and time.monotonic() < end_s:
        time.sleep(0.005)
    return bool(found)


def left(folder: Path) -> list[psutil.Process]:
    """Processes of the run in `folder`."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


if __name__ == "__main__":
    main()
