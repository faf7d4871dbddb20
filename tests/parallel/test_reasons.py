"""Refusals say what is true of the plan that was asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kept_ranks import KeptRanks, RankFailure
from torch import nn
from torch.utils.checkpoint import checkpoint

import evenly
from evenly.errors import UserError


class Net(nn.Module):
    """kind: what of it no plan, or not each, can run."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inp, self.out = kind, nn.Linear(8, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4))
        self.norm = nn.SyncBatchNorm(16) if kind == "synced" else nn.Identity()
        self.register_buffer("high", torch.zeros(16))
        self.high: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.inp(x))
        if self.kind == "ranges":
            with torch.no_grad():
                self.high.copy_(torch.maximum(self.high, x.detach().amax(0)))
        for block in self.blocks:
            if self.kind == "checkpoints":
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[assignment]
            else:
                x = block(x)
        return self.out(x)[:, 0]


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.sum(1)).square().mean()


def run_step(kind: str, plan: str) -> Any:
    data = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
    job = evenly.Job(
        model=lambda: Net(kind), loss=loss, data=data, optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
        global_batch=12, microbatch=3, steps=2,
    )  # fmt: skip
    with evenly.start(job, plan=plan) as run:
        return run.step(next(run.batches())).loss


@pytest.mark.parametrize(
    ("kind", "plan", "found"),
    [
        ("checkpoints", "pipeline=2", r"does not restore random numbers \(preserve_rng_state=False\)"),
        pytest.param("ranges", "tensor=2", "each of which has a part of the model", marks=pytest.mark.full),
        pytest.param("ranges", "ddp", "each of which runs some of the microbatches", marks=pytest.mark.full),
        pytest.param("synced", "ddp", "takes its statistics over all ranks at once", marks=pytest.mark.full),
    ],
)
def test_a_refusal_names_its_reason(kind: str, plan: str, found: str, ranks: KeptRanks) -> None:
    with pytest.raises(RankFailure, match=found):
        ranks.run(run_step, kind, plan)


def test_a_layer_over_all_ranks_is_refused_on_one_with_the_reason() -> None:
    with pytest.raises(UserError, match="use BatchNorm, which it is on one rank"):
        run_step("synced", "single")
