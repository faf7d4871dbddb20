"""Runs in which memory lacks at one place, each next to one that nothing disturbs.

    python benchmarks/faults/no_room.py --json benchmarks/results/no_room.json

Under each plan a rank (or all) raises for want of memory in its first start; in two cases it meets a limit: on what its
process may allocate, in a step with long samples. Prints a line a case, and as JSON: exit code, the plans in their
order, where each went on from, and the largest difference of a tensor of the last checkpoint to one device's, relative
to the tensor's largest number.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evenly.checkpoint.folder import CheckpointFolder
from evenly.checkpoint.store import CheckpointStore
from evenly.observe.attempts import ended_attempts, plans_started
from evenly.observe.run_folder import RunFolder

STEPS = 6
JOB = """
import os, resource
from pathlib import Path
import torch
from torch import nn
import evenly

COUNT = {}


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 32, bias=not norm), nn.Linear(32, 16), nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(32) if norm else nn.Identity()

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.norm(self.up(x)))))


class Rows(torch.utils.data.Dataset):
    def __init__(self, long, strike):
        self.long, self.strike = long, strike

    def __len__(self):
        return 144

    def __getitem__(self, i):
        if i > 60:
            self.strike("data")
        rows = self.long if self.long and 24 <= i < 48 else 4
        return torch.sin(torch.arange(16 * rows, dtype=torch.float64).reshape(rows, 16) * (i + 1) / 7)


class Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strike):
        ctx.strike = strike
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.strike("backward")
        return gradient, None


def job(out="", place="", where="", norm=True, save_every=100, limit=0, long=0, evaluates=False) -> evenly.Job:
    mine = where == "" or os.environ.get("RANK", "0") == where[4:]
    starts = Path(out) / "attempts.jsonl"
    if limit and mine:
        now = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (now + limit * 2**20, resource.RLIM_INFINITY))

    def strike(here):
        if here == place and mine and starts.exists() and starts.read_text().count("plan") == 1:
            raise MemoryError

    def late(name, at):
        COUNT[name] = COUNT.get(name, 0) + 1
        return COUNT[name] >= at

    def loss(model, x):
        x = x.flatten(0, 1)
        y = model(x)
        if type(x) is torch.Tensor and torch.is_grad_enabled() and late("loss", 8):
            strike("forward")
            y = Back.apply(y, strike) if place == "backward" else y
        if not torch.is_grad_enabled() and not model.training:
            strike("evaluation")
        return evenly.Loss((y.sum(1) - x.mean(1)).square().sum(), len(x))

    class Optimizer(torch.optim.AdamW):
        def step(self, closure=None):
            if late("update", 3):
                strike("update")
            super().step(closure)
            if late("after", 3):
                strike("after update")

    def model():
        strike("model")
        return nn.Sequential(*(Block(norm) for _ in range(4)))

    changed = place in ("update", "after update")
    return evenly.Job(
        model=model,
        loss=loss,
        data=Rows(long, strike),
        eval_data=Rows(0, lambda here: None) if evaluates else None,
        optimizer=lambda parameters: (Optimizer if changed else torch.optim.AdamW)(parameters, lr=1e-3),
        global_batch=24,
        microbatch=4,
        steps=6,
        save_every=save_every,
        eval_every=2 if evaluates else None,
        clip_norm=0.5,
        shuffle=False,
        precision="float64",
    )
"""


@dataclass(frozen=True)
class Case:
    """Where memory lacks. settings: of the job, of which those in `numbers` are the undisturbed run's too."""

    plan: str
    devices: int
    settings: str

    @property
    def numbers(self) -> str:
        return " ".join(word for word in self.settings.split() if word.startswith(("norm=", "long=")))


PLACES = ("forward", "backward", "update", "after update", "evaluation evaluates=True", "data", "model")
SPLIT = ("zero1", "zero3", "data=1 tensor=2", "data=1 pipeline=2")
CASES = [
    *(Case("ddp", 2, f"place={place}") for place in PLACES),
    *(Case("single", 1, f"place={place}") for place in ("forward", "backward")),
    Case("ddp", 3, "place=backward where=rank1"),
    *(Case(plan, 2, f"place=backward where=rank1 save_every=1 norm={'=' not in plan}") for plan in SPLIT),
    Case("data=2 pipeline=2", 4, "place=forward where=rank3 norm=False"),
    Case("data=2 tensor=2", 4, "place=update where=rank0 norm=False save_every=1"),
    Case("ddp", 2, "limit=450 long=24576"),
    Case("ddp", 3, "limit=450 long=24576 where=rank1"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there too")
    parser.add_argument("--only", default="", help="cases with this text in plan or settings")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="no-room-") as name:
        folder = Path(name)
        (folder / "job.py").write_text(JOB)
        for number, case in enumerate(one for one in CASES if asked.only in f"{one.plan} {one.settings}"):
            rows.append(row(folder, case, number))
            print(json.dumps(rows[-1]), flush=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(not all(row["exit_code"] == 0 and row["largest_difference"] < 1e-9 for row in rows))


def row(folder: Path, case: Case, number: int) -> dict[str, Any]:
    """Runs a case and, once for its numbers, one device undisturbed; what came of it."""
    alone = folder / f"alone {case.numbers}"
    if not alone.exists():
        run(folder, alone, "single", 1, case.numbers)
    out, began_s = folder / f"out{number}", time.monotonic()
    code = run(folder, out, case.plan, case.devices, case.settings)
    ended = ended_attempts(RunFolder(out))
    return {
        "plan": case.plan,
        "devices": case.devices,
        "settings": case.settings,
        "exit_code": code,
        "seconds": round(time.monotonic() - began_s, 1),
        "plans": plans_started(RunFolder(out)),
        "failed_in": [one.step for one in ended],
        "went_on_from": [one.from_step for one in ended],
        "largest_difference": difference(alone, out),
    }


def run(folder: Path, out: Path, plan: str, devices: int, settings: str) -> int:
    """The exit code of `evenly run`."""
    command = [sys.executable, "-m", "evenly", "run", "job.py", "--plan", plan, "--devices", str(devices)]
    words = settings.replace("after update", "after_update").split()
    sets = [
        word for one in (f"out={out.name}", *words) for word in ("--set", one.replace("after_update", "after update"))
    ]
    done = subprocess.run([*command, "--out", out.name, *sets], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    return done.returncode


def difference(one: Path, other: Path) -> float:
    """The largest of a tensor of two checkpoints, relative to its largest number; infinite where one has others."""
    if STEPS not in CheckpointFolder(other).steps():
        return float("inf")
    a, b = tensors(one), tensors(other)
    if a.keys() != b.keys():
        return float("inf")
    return max(float((a[name] - b[name]).abs().max() / a[name].abs().max().clamp(min=1e-30)) for name in a)


def tensors(out: Path) -> dict[str, torch.Tensor]:
    checkpoint = CheckpointStore(out).load(STEPS)
    into = {name: torch.empty(form.shape, dtype=getattr(torch, form.dtype)) for name, form in checkpoint.forms.items()}
    checkpoint.read(into)
    return {name: tensor.double() for name, tensor in into.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
