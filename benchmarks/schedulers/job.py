"""A job small enough to be started many times; `fails` and `how` make one rank go wrong in its third step."""

from __future__ import annotations

import os
import signal
import time

import torch
from torch import nn

import evenly


def job(steps: int = 8, pause: float = 0.0, fails: int = -1, how: str = "raises") -> evenly.Job:
    draw = torch.Generator().manual_seed(0)
    data = [(torch.randn(5, generator=draw), torch.randn(3, generator=draw)) for _ in range(44)]

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> evenly.Loss:
        x, y = batch
        time.sleep(pause)
        return evenly.Loss((model(x) - y).square().sum(), len(x))

    def go_wrong(run: evenly.Run, report: evenly.StepReport) -> None:
        if run.world.rank == fails and report.step == 3:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("this step is one too many")

    return evenly.Job(
        model=lambda: nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.1), nn.Tanh(), nn.Linear(7, 3)),
        loss=loss,
        data=data,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        global_batch=11,
        microbatch=2,
        steps=steps,
        precision="float64",
        save_every=2,
        on_step=go_wrong,
    )
