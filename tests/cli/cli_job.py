"""The job that the tests of the command line run; `fault` makes it go wrong in one way."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

import evenly


class Points(torch.utils.data.Dataset):
    def __init__(self, fault: str) -> None:
        draw = torch.Generator().manual_seed(0)
        self.x, self.fault = torch.randn(37, 5, generator=draw), fault

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.fault == "sample" and index == 17:
            raise OSError("this sample cannot be read")
        if self.fault == "slow":
            time.sleep(0.02)
        return self.x[index][: 4 if self.fault == "ragged" and index == 23 else 5]


def go_wrong(fault: str) -> None:
    """In the 16th loss of this process: `attempts` has a line for each time; twice, or whenever it is run."""
    global losses
    losses += 1
    if losses == 16 and (attempts := Path("attempts")).exists() and (fault == "raises" or attempts.stat().st_size < 4):
        with attempts.open("a") as file:
            file.write("x\n")
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("this loss cannot be computed")


losses = 0


def job(
    fault: str = "", steps: int = 8, save_every: int = 2, layers: int = 1, microbatch: int | None = 3
) -> evenly.Job:
    def model() -> nn.Module:
        start = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.2), nn.Tanh(), nn.Linear(7, 1))
        if fault == "start" and os.environ.get("RANK") == "1":
            nn.init.ones_(start[3].bias)
        return start

    def loss(model: nn.Module, x: torch.Tensor) -> evenly.Loss:
        total = (model(x).squeeze(1) - x.sum(1)).square().sum()
        if fault in ("killed", "raises") and os.environ.get("RANK") == "1":
            go_wrong(fault)
        if fault == "nan":
            total = total * torch.nan
        return evenly.Loss(total, 0 if fault == "weightless" else len(x))

    return evenly.Job(
        model=model,
        loss=loss,
        data=Points(fault),
        eval_data=Points(""),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        global_batch=10,
        microbatch=microbatch,
        steps=steps,
        save_every=save_every,
        name="cli",
    )
