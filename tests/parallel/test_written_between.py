"""Tensors that are written in place between blocks, where functions of one form have made several of them."""

from __future__ import annotations

import pytest
import torch
from jobs import losses_of
from kept_ranks import KeptRanks
from torch import nn


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Outer(nn.Module):
    """Adds its input to what its blocks have made of it, in place, as Xception does."""

    def __init__(self) -> None:
        super().__init__()
        layers = [[nn.ReLU(inplace=n > 0), Pair(), nn.LayerNorm(6)] for n in range(3)]
        self.rep = nn.Sequential(*(layer for three in layers for layer in three))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.rep(inputs)
        x += inputs
        return x


class Model(nn.Module):
    """Its blocks are the pairs: the outer modules stand in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.outer1, self.outer2, self.outer3 = Outer(), Outer(), Outer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.outer3(self.outer2(self.outer1(self.stem(x)))))


def losses(plan: str) -> list[float]:
    torch.manual_seed(1)
    data = [torch.randn(4, dtype=torch.float64) for _ in range(24)]
    return losses_of(Model, data, plan, global_batch=6, microbatch=2, precision="float64")


@pytest.mark.parametrize("split", [3, 5, 6, 7])
def test_what_is_written_is_sent(split: int, ranks: KeptRanks) -> None:
    (expected,) = ranks.run(losses, "single", size=1)
    for found in ranks.run(losses, f"pipeline=2 split_points={split}", size=2):
        assert found == pytest.approx(expected, rel=1e-12)
