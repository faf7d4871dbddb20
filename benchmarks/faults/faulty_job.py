"""The job under test: small, with uneven weights, dropout, a buffer and odd sizes. In it one fault is planted.

    evenly run faulty_job.py --set "fault=kill forward rank=1 step=5" --set marks=DIR

The fault fires once, where it says: on that rank, in that step, in that place. It leaves a file in `marks` with
the time; a process that starts and finds one plants nothing.
"""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import evenly
from benchmarks.faults.cases import CLOCKS, IN_A_SAVE, SAVE_EVERY, STEPS
from benchmarks.faults.damage import KINDS as DAMAGES
from benchmarks.faults.damage import damage_newest, fill, forbid
from evenly.checkpoint.folder import CheckpointFolder

SAMPLES, WIDTH = 53, 6
ANSWER_LIMIT_S = 20.0  # for the campaign to do what the job cannot
HOUR_S = 3600.0
REAL_TIME = time.time

SIGNALS = {"kill": signal.SIGKILL, "segfault": signal.SIGSEGV, "abort": signal.SIGABRT, "stop": signal.SIGSTOP}


class Fault:
    """What is planted in this process."""

    def __init__(self, text: str, marks: str) -> None:
        words = dict(word.split("=") for word in text.split() if "=" in word)
        self.kind, self.place = (text.split() or ["none", ""])[:2]
        self.rank, self.step = int(words.get("rank", -1)), int(words.get("step", 0))
        self.marks = Path(marks)
        here = int(os.environ.get("RANK", 0))
        everywhere = self.kind in CLOCKS and self.place == "machine"
        if self.kind in CLOCKS:
            self.place = "forward"
        self.mark = self.marks / f"fired-{here}.json"
        self.armed = (here == self.rank or everywhere) and bool(text) and not any(self.marks.glob("fired-*.json"))
        self.optimizers: list[weakref.ref[Any]] = []

    def now(self) -> int:
        """The step that this rank is in, from 1."""
        states = [state for one in self.optimizers if (o := one()) is not None for state in list(o.state.values())]
        return 1 + max((int(state["step"]) for state in states if "step" in state), default=0)

    def due(self, place: str, x: Tensor | None = None) -> bool:
        """Whether the fault is to fire here and now; notes that it does."""
        if not self.armed or place != self.place or isinstance(x, FakeTensor):
            return False
        if self.kind in DAMAGES and len(CheckpointFolder(self.marks.parent / "out").steps()) < 2:
            return False
        step = self.now()
        if step < self.step + (place in ("save", "commit")):  # what is saved is what the steps before have made
            return False
        if not self.mark.exists():
            fired = {"time_s": time.monotonic(), "rank": self.rank, "step": step, "pid": os.getpid()}
            part = self.mark.with_suffix(".part")
            part.write_text(json.dumps(fired))
            part.rename(self.mark)
        return True

    def at(self, place: str, x: Tensor | None = None) -> None:
        """Fires here, if it is due."""
        if self.due(place, x) and self.kind != "nan":
            self.armed = False
            self.fire()

    def fire(self) -> None:
        match self.kind:
            case "kill" | "segfault" | "abort" | "stop":
                os.kill(os.getpid(), SIGNALS[self.kind])
                time.sleep(0.2)  # a stop takes a moment to be delivered
            case "hang":
                while True:
                    time.sleep(1.0)
            case "sys.exit(0)":
                sys.exit(0)
            case "os._exit(0)":
                os._exit(0)
            case "os._exit(3)":
                os._exit(3)
            case "exception":
                raise ValueError("planted by the campaign")
            case "memory":
                torch.empty(1 << 52, dtype=torch.uint8)
            case "disk-error":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            case "disk-full":
                fill(self.marks.parent / "out")
            case "read-only":
                forbid(self.marks.parent / "out" / "checkpoints")
            case "folder-gone":
                out = self.marks.parent / "out"
                while subprocess.run(["rm", "-rf", out], check=False).returncode:  # the run has written meanwhile
                    pass
            case "clock-forward":
                time.time = lambda: REAL_TIME() + HOUR_S
            case "clock-back":
                time.time = lambda: REAL_TIME() - HOUR_S
            case "node-gone" | "cut-5s" | "cut":
                self.ask()
            case torn:
                self.await_saves()
                damage_newest(self.marks.parent / "out", torn)
                os.kill(os.getpid(), signal.SIGKILL)

    def await_saves(self) -> None:
        """Lets a checkpoint that is being written become the newest."""
        checkpoints, until = self.marks.parent / "out" / "checkpoints", time.monotonic() + ANSWER_LIMIT_S
        while any(checkpoints.glob(".partial-*")) and time.monotonic() < until:
            time.sleep(0.01)

    def ask(self) -> None:
        """Waits for what the campaign does from outside."""
        until = time.monotonic() + ANSWER_LIMIT_S
        while not (self.marks / "done").exists() and time.monotonic() < until:
            time.sleep(0.01)

    def poison(self, place: str, x: Tensor) -> Tensor:
        """`x`, with a number that is none if that is what is due."""
        return x * math.nan if self.kind == "nan" and self.due(place, x) else x

    def spoil(self, parameters: Sequence[Tensor]) -> None:
        """An update that makes numbers that are none."""
        if self.kind == "nan" and self.due("optimizer"):
            self.armed = False
            for parameter in parameters:
                parameter.mul_(math.nan)


class Points(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.fault.at("dataset")
        time.sleep(0.003)
        x = torch.sin(torch.arange(1, WIDTH + 1, dtype=torch.float64) * (index + 1))
        return self.fault.poison("dataset", x), torch.tensor(1.0 + index % 3, dtype=torch.float64)


class Block(nn.Module):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault
        self.up, self.down, self.drop = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        self.fault.at("forward", x)
        y = x + self.drop(self.down(torch.tanh(self.up(x))))
        y = self.fault.poison("forward", y)
        if self.fault.armed and self.fault.place == "backward" and y.requires_grad:
            y.register_hook(self.backward)
        return y

    def backward(self, gradient: Tensor) -> Tensor:
        self.fault.at("backward", gradient)
        return self.fault.poison("backward", gradient)


class Model(nn.Module):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(fault) for _ in range(4))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.norm(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def job(fault: str = "", marks: str = "marks", width: int = 0, seed: int = 0) -> evenly.Job:
    """width: of another job's head, whose checkpoints are foreign to this one."""
    planted = Fault(fault, marks)

    def model() -> nn.Module:
        planted.at("start")
        made = Model(planted)
        if width:
            made.head = nn.Linear(WIDTH, width)
        return made

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> evenly.Loss:
        x, weight = batch
        planted.at("loss", x)
        error = (model(x).sum(1) - x.sum(1)).square()
        return evenly.Loss(planted.poison("loss", (error * weight).sum()), weight.sum())

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(parameters, lr=1e-2)
        planted.optimizers.append(weakref.ref(made))
        return made

    if planted.armed and planted.place in IN_A_SAVE:
        plant_in_saves(planted)
    if planted.armed and planted.place == "optimizer":
        plant_in_updates(planted)
    return evenly.Job(
        model=model,
        loss=loss,
        data=Points(planted),
        optimizer=optimizer,
        global_batch=10,
        microbatch=3,
        steps=STEPS,
        save_every=SAVE_EVERY,
        precision="float64",
        seed=seed,
    )


def plant_in_saves(fault: Fault) -> None:
    """Where files are written: once one is (`save`), and before a folder gets its name (`commit`)."""
    sync, rename = os.fsync, Path.rename

    def fsync(file: Any) -> None:
        fault.at("save")
        sync(file)

    def renamed(self: Path, target: Any) -> Path:
        if self.name.startswith(".partial-"):
            fault.at("commit")
        return rename(self, target)

    os.fsync, Path.rename = fsync, renamed  # type: ignore[method-assign, assignment]


def plant_in_updates(fault: Fault) -> None:
    """In the function by which the optimizer, which has to be torch's as it is, updates parameters."""
    from torch.optim import adam

    update = adam.adam

    def updated(parameters: Sequence[Tensor], *args: Any, **settings: Any) -> None:
        fault.at("optimizer")
        update(parameters, *args, **settings)
        fault.spoil(parameters)

    adam.adam = updated
