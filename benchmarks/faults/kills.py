"""One run whose ranks are killed again and again, under `--restarts`, next to one that nothing disturbs.

    python benchmarks/faults/kills.py --kills 50 --plan zero3
    python benchmarks/faults/kills.py --kills 50 --plan ddp --snapshot 1 --save-every 1000

Prints, as one JSON object: kills, the steps that were done again in all and at most after one kill, processes left, and
the largest difference of a tensor of the last checkpoint to the undisturbed run's.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

JOB = """
import time
import torch
from torch import nn
import evenly


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 53

    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.linspace(-1, 1, 5, dtype=torch.float64) * (index + 1) / 53


def job(steps: int = 100, save_every: int = 10) -> evenly.Job:
    return evenly.Job(
        model=lambda: nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.2), nn.Tanh(), nn.Linear(7, 3)),
        loss=lambda model, x: evenly.Loss((model(x).sum(1) - x.sum(1)).square().sum(), len(x)),
        data=Points(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        global_batch=10,
        microbatch=3,
        steps=steps,
        save_every=save_every,
        precision="float64",
    )
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--plan", default="ddp")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--snapshot", type=int, default=0, help="steps between copies in memory; 0 for none")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        print(json.dumps(campaign(asked, Path(name)), indent=1))


def campaign(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs the job undisturbed and with kills; what came of it."""
    (folder / "job.py").write_text(JOB)
    command = [sys.executable, "-m", "evenly", "run", "job.py", "--plan", asked.plan, "--devices", str(asked.devices)]
    command += ["--set", f"steps={asked.steps}", "--set", f"save_every={asked.save_every}"]
    subprocess.run([*command, "--out", "alone"], cwd=folder, check=True, capture_output=True)
    memory = ["--snapshot", str(asked.snapshot)] if asked.snapshot else []
    disturbed = [*command, "--out", "out", *memory, "--restarts", str(asked.kills + 1)]
    with (folder / "said.txt").open("w") as said:
        process = subprocess.Popen(disturbed, cwd=folder, stdout=said, stderr=said)
        kills = kill_again_and_again(process, folder / "out", asked.kills, random.Random(asked.seed))
        code = process.wait()
    done = [line["step"] for line in lines(folder / "out" / "metrics.jsonl") if "loss" in line]
    lost = [before + 1 - after for before, after in pairwise(done) if after <= before]
    return {
        "plan": asked.plan,
        "snapshot": asked.snapshot,
        "save_every": asked.save_every,
        "kills": kills,
        "exit_code": code,
        "restarts": (folder / "said.txt").read_text().count("evenly: restart "),
        "steps_done_again": sum(lost),
        "most_after_one_kill": max(lost, default=0),
        "processes_left": len(ranks(folder / "out")),
        "largest_difference": difference(folder / "alone", folder / "out", asked.steps),
    }


def kill_again_and_again(process: subprocess.Popen[bytes], out: Path, most: int, draw: random.Random) -> int:
    """Kills a rank drawn from those that live, so many times at most, each time after some steps more."""
    kills, seen, due = 0, 0, 3
    while process.poll() is None and kills < most:
        time.sleep(0.02)
        steps = len(lines(out / "metrics.jsonl"))
        if steps - seen >= due and (alive := ranks(out)):
            os.kill(draw.choice(alive), signal.SIGKILL)
            kills, seen, due = kills + 1, steps, draw.randrange(3, 30)
    return kills


def ranks(out: Path) -> list[int]:
    """Processes of the newest start that live."""
    started = [[line for line in lines(path) if line["event"] == "started"] for path in (out / "events").glob("*")]
    pids = [of_rank[-1]["pid"] for of_rank in started if of_rank]
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def lines(path: Path) -> list[dict[str, Any]]:
    """The records in a file, without a last line that is being written."""
    found = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in found if line.endswith("\n") and line.startswith("{") and line.endswith("}\n")]


def difference(one: Path, other: Path, step: int) -> float:
    """The largest difference of a tensor of two checkpoints of `step`; infinite where one has others."""
    a, b = ({n: t for f in sorted((out / "checkpoints" / f"step-{step:08d}").glob("*.safetensors"))
             for n, t in load_file(f).items()} for out in (one, other))  # fmt: skip
    if a.keys() != b.keys() or not a:
        return float("inf")
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
