"""Layers that keep statistics, in blocks that are computed a second time in the backward.

A layer with running statistics is not computed a second time by itself: its statistics would be added twice. Where the
tensor axis splits its channels, what its second forward keeps must look as what the first kept.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import classifier_job
from kept_ranks import KeptRanks
from torch import nn
from torch.nn import functional as F

import evenly
from evenly.errors import PlanError
from evenly.model.blocks import find_blocks, recomputable
from evenly.plan import parse_plan
from evenly.planner.job_profile import JobProfiler
from evenly.verify.compare import RankComparison, judge
from evenly.verify.ranks import compare_job, keep_reference


def trained(plan: str) -> dict[str, torch.Tensor]:
    with evenly.start(classifier_job(precision="float64"), plan=plan) as run:
        for batch in run.batches():
            run.step(batch)
        return {name: tensor.clone() for name, tensor in run.model.state_dict().items()}


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_statistics_of_a_layer_of_the_root_are_those_without_recomputation(recompute: str) -> None:
    found, wanted = trained(f"single recompute={recompute}"), trained("single")
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12, msg=name)


def test_layers_with_statistics_among_blocks_are_left_out() -> None:
    layers = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)])
    model = nn.Module()
    model.layers = layers
    blocks = find_blocks(model)
    assert all(isinstance(block.module, nn.Linear) for block in recomputable(blocks))


# ------------------------------------------------------------------------------------------- channels that are split
class Averaged(nn.Module):
    """Keeps the mean of each channel: in a buffer that it changes, and in one that it replaces."""

    changed: torch.Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("changed", torch.zeros(channels))
        self.register_buffer("replaced", torch.zeros(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            mean = x.detach().mean((0, 2, 3))
            self.changed.mul_(0.9).add_(mean, alpha=0.1)
            self.replaced = 0.75 * self.replaced + mean
        return x


NORMS = {
    "batch": nn.BatchNorm2d,
    "instance": partial(nn.InstanceNorm2d, affine=True, track_running_stats=True),
    "averages": Averaged,
}


class Wide(nn.Module):
    """Channels in the middle, which the tensor axis splits, with a layer that keeps statistics of them."""

    def __init__(self, norm: str, width: int = 6) -> None:
        super().__init__()
        self.up, self.norm = nn.Conv2d(width, 4 * width, 3, padding=1, bias=False), NORMS[norm](4 * width)
        self.down = nn.Conv2d(4 * width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(self.up(x)).relu())


def images_job(norm: str) -> evenly.Job:
    drawn = torch.Generator().manual_seed(2)
    data = torch.utils.data.TensorDataset(
        torch.randn(15, 3, 5, 5, generator=drawn), torch.randint(4, (15,), generator=drawn)
    )

    def model() -> nn.Module:
        blocks = [Wide(norm) for _ in range(2)]
        return nn.Sequential(
            nn.Conv2d(3, 6, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)
        )  # fmt: skip

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return classifier_job(
        model=model, loss=loss, data=data, collate=None,
        eval_data=data, global_batch=7, microbatch=2, steps=3, precision="float64",
    )  # fmt: skip


def compared(norm: str, plan: str, folder: Path) -> RankComparison:
    return compare_job(images_job(norm), plan, 3, folder)


PLANS = ["tensor=2 recompute=full", "tensor=2 recompute=selective"]
PLANS_OF_4 = ["data=2 tensor=2 zero=3 recompute=selective", "pipeline=2 tensor=2 recompute=full"]


@pytest.mark.full_but("batch-tensor=2 recompute=full-2", "instance-pipeline=2-2", "averages-tensor=2-2")
@pytest.mark.parametrize(
    ("norm", "plan", "size"),
    [
        *(("batch", plan, 2) for plan in PLANS),
        *(("batch", plan, 4) for plan in PLANS_OF_4),
        ("instance", "tensor=2 recompute=full", 2),
        ("instance", "pipeline=2", 2),  # where no stage asks for the counter of an InstanceNorm
        ("averages", "tensor=2", 2),
        ("averages", "tensor=2 recompute=full", 2),
    ],
)
def test_statistics_of_split_channels_are_those_of_one_device(
    norm: str, plan: str, size: int, ranks: KeptRanks, tmp_path: Path
) -> None:
    keep_reference(images_job(norm), 3, tmp_path / "reference")
    row = judge(plan, ranks.run(compared, norm, plan, tmp_path, size=size))
    assert (row.status, row.reason) == ("equal", "")
    assert row.param_diff is not None and row.param_diff < 1e-11
    assert row.sharded is not None and (row.sharded > 0.8 or norm == "instance")


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_the_planner_reads_blocks_with_split_statistics(recompute: str) -> None:
    plan = parse_plan(f"data=1 tensor=2 recompute={recompute}").complete("float32")
    profile = JobProfiler(images_job("batch")).profile(plan)
    assert profile.parameters["1.norm.weight"].shape == (12,)


# ----------------------------------------------------------------------------------- what cannot be computed again
class Alternating(nn.Module):
    """Does more in every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), itertools.count(1)  # what is seen to count is put back before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh().sin() if next(self.calls) % 2 else self.linear(x).tanh()


def alternating_job() -> evenly.Job:
    def model() -> nn.Module:
        return nn.Sequential(nn.Sequential(Alternating()), nn.Sequential(Alternating()), nn.Linear(4, 3))

    def loss(model: nn.Module, x: torch.Tensor) -> Any:
        return model(x).square().sum()

    data = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    return classifier_job(model=model, loss=loss, data=data, collate=torch.stack, eval_data=None)


def test_a_block_that_keeps_other_tensors_the_second_time_is_refused() -> None:
    with evenly.start(alternating_job(), plan="single recompute=full") as run:
        batch = next(run.batches())
        with pytest.raises(PlanError, match=r"(?s)recompute=full.*keeps other tensors.*a counter, a cache, a flag"):
            run.step(batch)


def refused_in_stages() -> str:
    with evenly.start(alternating_job(), plan="pipeline=2 recompute=full") as run:
        try:
            run.step(next(run.batches()))
        except PlanError as problem:
            return str(problem)
        except RuntimeError as problem:  # the other rank is gone
            return type(problem).__name__
    return ""


def test_so_it_is_in_a_stage(ranks: KeptRanks) -> None:
    assert any("keeps other tensors" in found for found in ranks.run(refused_in_stages))
