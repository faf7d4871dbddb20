"""The job that the tests of the command line run; `fault` makes it go wrong in one way."""

from __future__ import annotations

import os
import time

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
