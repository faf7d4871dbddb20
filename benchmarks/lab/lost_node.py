"""A run over four nodes of a lab loses one, whose cable is pulled, and gets it back; its numbers are one device's.

python -m benchmarks.lab.lost_node          a minute or two; ends in what was said, and how far the numbers are off

The run has `--nodes 2:4`. Once it has begun, nothing comes through to node 3: the others end the round, and go on
without it, from the newest checkpoint. Then its cable is back, and node 3 is started again: the others take it in at
the next checkpoint. All weights, in float64, are held against a run of one device that nothing disturbed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from benchmarks.lab.commands import start
from benchmarks.lab.lab import ROOT, Lab, guarded
from evenly.checkpoint.folder import CheckpointFolder

LIMIT_S = 600.0
EVENLY = [sys.executable, "-m", "evenly"]
LOST = 3
STEPS = 90
JOB = f"""
import os
import time
import torch
import evenly

def job() -> evenly.Job:
    def loss(model, x):
        if model.training:
            time.sleep(0.5 if os.path.exists("slowly") else 0.01)  # until the node is back
        return evenly.Loss((model(x).sum(1) - x.sum(1)).square().sum(), len(x))

    return evenly.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(5, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 3)),
        loss=loss,
        data=[torch.linspace(-1, 1, 5) * (i + 1) / 53 for i in range(53)],
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        global_batch=24,
        microbatch=2,
        steps={STEPS},
        save_every=3,
        precision="float64",
    )
"""


class Disturbed:
    """The run, in `folder`: a launcher on each node, with what it says in a file."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.launchers: dict[int, subprocess.Popen[str]] = {}
        for node in range(lab.nodes):
            self.begin(node)

    def begin(self, node: int) -> None:
        """Starts the launcher of a node."""
        place = ["--nodes", "2:4", "--node-rank", "{node}", "--devices", "1", "--rendezvous", "node0:29500"]
        words = [*EVENLY, "run", "job.py", "--out", "disturbed", *place]
        there = ["sh", "-c", f'cd {self.folder} && exec "$@" >> said{node} 2>&1', "sh"]
        self.launchers[node] = start(self.lab, node, [*there, *words])

    def said(self, node: int) -> str:
        """What the launchers of a node have said so far."""
        path = self.folder / f"said{node}"
        return path.read_text() if path.exists() else ""

    @property
    def step(self) -> int:
        """Of its newest checkpoint."""
        return max(CheckpointFolder(self.folder / "disturbed").steps(), default=0)

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Waits; says when it has come. Raises `TimeoutError`."""
        began_s = time.monotonic()
        while not condition():
            if time.monotonic() - began_s > LIMIT_S or (self.launchers[0].poll() is not None and not condition()):
                raise TimeoutError(f"{what}: {[self.said(node) for node in self.launchers]}")
            time.sleep(0.2)
        print(f"{time.monotonic() - began_s:5.1f} s until {what}, step {self.step}", flush=True)


def main() -> int:
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "EVENLY_SECRET": "of a lab"}
    signal.signal(signal.SIGTERM, _leave)  # the lab is taken away on the way out
    with tempfile.TemporaryDirectory(prefix="lost-node-") as name:
        folder = Path(name)
        (folder / "job.py").write_text(JOB)
        with guarded(Lab(name="lost", nodes=4, bandwidth="200mbit")) as lab:
            worlds = _disturbed(Disturbed(lab, folder))
        _evenly(folder, "run", "job.py", "--devices", "1", "--plan", "single", "--out", "whole")
        off = _difference(folder)
    print(f"worlds of its steps: {worlds}; tensors within {off:.1e} of one device's")
    return 0 if off < 1e-9 and worlds == [4, 3, 4] else 1


def _leave(signum: int, _: FrameType | None) -> None:
    sys.exit(128 + signum)


def _disturbed(run: Disturbed) -> list[int]:
    """Has the run lose a node and get it back; the sizes of its worlds, one after the other."""
    run.until("the run is under way", lambda: run.step >= 6)
    (run.folder / "slowly").touch()
    run.lab.pull_out(LOST)
    run.until("the others go on without it", lambda: "nodes 0, 1, 2 take part" in run.said(0))
    run.until("the launcher that was cut off ends", lambda: run.launchers[LOST].poll() is not None)
    at = run.step
    run.until("they have a checkpoint more", lambda: run.step > at)
    run.lab.plug_back(LOST)
    run.begin(LOST)
    run.until("it is taken in again", lambda: run.said(0).count("nodes 0, 1, 2, 3 take part") == 2)
    (run.folder / "slowly").unlink()
    codes = {node: one.wait(LIMIT_S) for node, one in run.launchers.items()}
    print("\n".join(f"    node 0: {line}" for line in run.said(0).splitlines()), f"exit codes {codes}", sep="\n")
    lines = (run.folder / "disturbed" / "metrics.jsonl").read_text().splitlines()
    worlds = [len(row["memory_bytes"]) for row in map(json.loads, lines) if "memory_bytes" in row]
    return [world for place, world in enumerate(worlds) if place == 0 or worlds[place - 1] != world]


def _evenly(folder: Path, *words: object) -> None:
    subprocess.run([*EVENLY, *map(str, words)], cwd=folder, check=True, capture_output=True)


def _difference(folder: Path) -> float:
    """The largest relative difference between tensors of the two runs."""
    from safetensors.torch import load_file

    for run in ("disturbed", "whole"):
        _evenly(folder, "export", run, "--to", f"{run}-weights")
    one, other = (load_file(folder / f"{run}-weights" / "model.safetensors") for run in ("disturbed", "whole"))
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max() / other[name].abs().max()) for name in other)


if __name__ == "__main__":
    sys.exit(main())
