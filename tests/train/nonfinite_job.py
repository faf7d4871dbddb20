"""A job of which one sample, `BAD`, makes numbers that are not finite, in a place that is asked for."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import evenly

BAD = 3  # of 24 samples; batches of 8, microbatches of 2: step 3, microbatch 2, in which it is the first
WIDTH = 6


class Rows(torch.utils.data.Dataset):
    """(x of 6 numbers, a mark of 0, 1 for the bad sample, y)."""

    def __init__(self, kind: str) -> None:
        draw = torch.Generator().manual_seed(0)
        self.x = torch.randn(24, WIDTH, generator=draw)
        self.mark = torch.zeros(24, 1)
        if kind == "data":
            self.x[BAD, 3] = torch.nan
        elif kind != "clean":
            self.mark[BAD] = 1

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.x[index], self.mark[index], self.x[index].sum().nan_to_num()


class Guarded(nn.Module):
    """Takes the root of what is negative, or zero, where the mark says so."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.gain = kind, nn.Parameter(torch.ones(()))

    def forward(self, mark: torch.Tensor) -> torch.Tensor:
        if self.kind == "forward":
            return torch.sqrt(self.gain - 2 * mark)
        return torch.sqrt((1 - mark) * self.gain) if self.kind == "backward" else self.gain - mark * 0


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down, self.guarded = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), Guarded(kind)

    def forward(self, x: torch.Tensor, mark: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        meant = F.softmax(x + mask, -1)  # an infinity that is meant
        return x + self.down(F.gelu(self.up(meant))) * self.guarded(mark)


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(Block(kind if number == 2 else "clean") for number in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        mask = torch.zeros(WIDTH, dtype=h.dtype).masked_fill(torch.arange(WIDTH) > 3, -torch.inf)
        for block in self.blocks:
            h = block(h, mark, mask)
        return self.head(h).squeeze(-1)


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> evenly.Loss:
    x, mark, y = batch
    return evenly.Loss(((model(x, mark) - y) ** 2).sum(), len(y))


def job(kind: str = "forward", **changes: object) -> evenly.Job:
    settings = dict(
        name="nonfinite",
        model=lambda: Model(kind),
        loss=loss,
        data=Rows(kind),
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-2),
        schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        global_batch=8,
        microbatch=2,
        steps=6,
        precision="float64",
    )
    return evenly.Job(**{**settings, **changes})  # type: ignore[arg-type]
