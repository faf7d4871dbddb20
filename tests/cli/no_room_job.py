"""A job with one long sample, in the second step, under a limit on the memory of the rank that trains on it."""

from __future__ import annotations

import resource
from pathlib import Path

import torch
from torch import nn

import evenly

MIB = 2**20
LONG_BYTES = 12 * MIB  # of the long sample
LIMIT = 20  # times as much: without recomputation a rank needs 28 times, with it 14


def in_use() -> int:
    """Bytes that RLIMIT_DATA counts."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Nine, three for each step; the fifth is long."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> torch.Tensor:
        rows = LONG_BYTES // 8 // 16 if index == 4 else 32
        return torch.sin(torch.arange(16 * rows, dtype=torch.float64).reshape(rows, 16) * (index + 1) / 7)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.norm, self.drop = nn.Parameter(torch.ones(16)), nn.BatchNorm1d(16), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.norm(torch.tanh((x * self.scale).sin().exp().sigmoid())))


def job(limit: float = 0) -> evenly.Job:
    def loss(model: nn.Module, x: torch.Tensor) -> evenly.Loss:
        x = x.flatten(0, 1)
        if limit and len(x) > 32 and type(x) is torch.Tensor:  # the planner's are others
            most = in_use() + int(limit * LONG_BYTES)
            resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))
        return evenly.Loss(model(x).square().sum(), len(x))

    return evenly.Job(
        model=lambda: nn.Sequential(*(Block() for _ in range(4))),
        loss=loss,
        data=Samples(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        global_batch=3,
        microbatch=1,
        steps=3,
        shuffle=False,
        precision="float64",
        name="no room",
    )
