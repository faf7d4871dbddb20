"""What a model prints: once for the run, and not once for each look at it."""

from __future__ import annotations

from collections import Counter
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch
from kept_ranks import KeptRanks
from torch import nn

import evenly

PLANS = ["pipeline=2", "single", "ddp", "zero1", "zero2", "zero3", "tensor=2", "auto"]


class Loud(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        print("built")
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("called")
        return self.net(x)


def loud_job() -> evenly.Job:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    return evenly.Job(
        model=Loud, data=torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)),
        loss=lambda model, b: nn.functional.mse_loss(model(b[0]), b[1]),
        optimizer=lambda p: torch.optim.SGD(p, 0.1), global_batch=8, microbatch=4, steps=2,
    )  # fmt: skip


def printed(plan: str) -> tuple[Counter[str], Counter[str]]:
    """What stands there before the first step, and what a step adds."""
    with redirect_stdout(StringIO()) as found, evenly.start(loud_job(), plan=plan) as run:
        before = Counter(found.getvalue().split())
        for batch in run.batches():
            run.step(batch)
            if run.steps_done == 1:  # in the second the memory is counted
                return before, Counter(found.getvalue().split()) - before
    raise AssertionError


@pytest.mark.parametrize("plan", [p if p == "pipeline=2" else pytest.param(p, marks=pytest.mark.full) for p in PLANS])
def test_a_model_prints_as_it_is_built_and_in_steps(plan: str, ranks: KeptRanks) -> None:
    for before, step in ranks.run(printed, plan, size=1 if plan == "single" else 2):
        assert before == {"built": 1}
        assert 1 <= step["called"] <= 2 and "built" not in step  # microbatches of this rank
