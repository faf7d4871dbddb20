"""Convolutions and their norms under the tensor axis, channels and groups split, held against the plain loop."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from jobs import output_types
from kept_ranks import KeptRanks
from torch import nn
from torch.nn import functional as F

import evenly
from evenly.parallel.tensor.splits import derive, select
from evenly.parallel.tensor.trace import trace
from evenly.verify.compare import RankComparison, judge
from evenly.verify.ranks import compare_job, keep_reference


class Inverted(nn.Module):
    """Wide between two narrow ends: a convolution of all channels, one of each by itself, one of pairs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 4 * width
        self.up, self.norm = nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.each, self.norm_each = nn.Conv2d(wide, wide, 3, padding=1, groups=wide), nn.BatchNorm2d(wide)
        self.pairs, self.norm_groups = (
            nn.Conv2d(wide, 2 * wide, 3, padding=1, groups=wide // 2),
            nn.GroupNorm(4, 2 * wide),
        )
        self.down = nn.Conv2d(2 * wide, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu6(self.norm_each(self.each(self.norm(self.up(x)).relu())))
        h = F.max_pool2d(self.norm_groups(self.pairs(h)), 3, 1, 1)
        return x + self.down(F.interpolate(F.avg_pool2d(h, 2), scale_factor=2))


def model() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8))
    return nn.Sequential(stem, Inverted(8), Inverted(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def job_of() -> evenly.Job:
    drawn = torch.Generator().manual_seed(2)
    data = torch.utils.data.TensorDataset(
        torch.randn(16, 3, 8, 8, generator=drawn), torch.randint(4, (16,), generator=drawn)
    )
    return evenly.Job(
        model=model, loss=loss, data=data, eval_data=data, optimizer=partial(torch.optim.SGD, lr=0.05), global_batch=8,
        microbatch=4, steps=3, precision="float64",
    )  # fmt: skip


def compared(folder: Path) -> RankComparison:
    return compare_job(job_of(), "tensor=2", 3, folder)


def test_a_split_convolution_computes_what_one_device_does(tmp_path: Path, ranks: KeptRanks) -> None:
    keep_reference(job_of(), 3, tmp_path / "reference")
    row = judge("tensor=2", ranks.run(compared, tmp_path))
    assert row.status == "equal", row.reason
    assert row.param_diff is not None and row.param_diff < 1e-11
    assert row.sharded is not None and row.sharded > 0.8


def test_channels_and_groups_are_split_and_a_sum_closes_them() -> None:
    derived = derive(trace(model(), loss, [torch.randn(2, 3, 8, 8), torch.zeros(2, dtype=torch.long)]))
    splits = select(derived, 2, ()).splits
    assert {name: splits[f"1.{name}.weight"].dim for name in ("up", "norm", "each", "norm_each", "pairs", "down")} == {
        "up": 0, "norm": 0, "each": 0, "norm_each": 0, "pairs": 0, "down": 1,
    }  # fmt: skip


def types_of(plan: str) -> list[tuple[str, list[torch.dtype]]]:
    return output_types(replace(job_of(), precision="bfloat16"), plan)


def test_convolutions_in_16_bits_give_the_types_that_they_give_on_one_device(ranks: KeptRanks) -> None:
    (alone,) = ranks.run(types_of, "single", size=1)
    assert ranks.run(types_of, "tensor=2") == [alone, alone]
