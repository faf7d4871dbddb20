"""The microbatch of a job that states none: its own under `auto` too, unless no number depends on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from battery import full_state, leave
from kept_ranks import KeptRanks
from plain import Case, plain_steps
from torch import nn
from torch.nn import functional as F

import evenly
from evenly.launcher.environment import find_here
from evenly.plan import PlanSpec
from evenly.planner.microbatch import with_known_microbatch
from evenly.train.options import RunOptions
from evenly.train.resolve_run import decide

STEPS = 3
x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Pairs = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def squares(model: nn.Module, batch: Any) -> evenly.Loss:
    return evenly.Loss((model(batch[0]) - batch[1]).square().sum(), len(batch[1]))


def hardest(model: nn.Module, batch: Any) -> evenly.Loss:
    losses = (model(batch[0]) - batch[1]).square().flatten()
    return evenly.Loss(losses.topk(max(1, len(losses) // 4)).values.sum(), len(losses))


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 1)
        self.calls = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.calls += 1  # by which another model may go
        return super().forward(input)


class Noisy(torch.utils.data.Dataset[Any]):
    """Draws for every sample, and hardly ever makes use of it."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Any:
        return x[index] + float(torch.rand(()) < 1e-7), x[index].sum(0, keepdim=True)


class Net(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), layer()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def job(layer: Callable[[], nn.Module] = nn.Tanh, **changes: Any) -> evenly.Job:
    given = {
        "model": lambda: Net(layer),
        "loss": squares,
        "data": Pairs,
        "optimizer": lambda p: torch.optim.SGD(p, 0.01),
    }
    return evenly.Job(**{**given, "global_batch": 64, "steps": STEPS, "precision": "float64", **changes})


def size_of(one: evenly.Job, only: PlanSpec | None = None) -> int | None:
    known, why = with_known_microbatch(one, only or PlanSpec())
    assert ("microbatch=8, an eighth of the batch" in why) is (known.microbatch == 8 and one.microbatch is None)
    return known.microbatch  # pyright: ignore[reportReturnType]


FOLLOW = {
    "dropout": job(lambda: nn.Dropout(0.5)),
    "statistics of the batch": job(lambda: nn.BatchNorm1d(16)),
    "statistics that are not kept": job(lambda: nn.BatchNorm1d(16, track_running_stats=False)),
    "slopes that are drawn": job(nn.RReLU),
    "pairs of samples": job(loss=lambda m, b: (m(b[0]) @ m(b[0]).T).mean()),
    "hard samples": job(loss=hardest),
    "a count of calls": job(model=Counting),
    "draws of the data": job(data=Noisy()),
    "an error": job(loss=lambda m, b: squares(m, b) if len(b[0]) > 1 else 1 / 0),
    "a model too large to be tried": job(model=lambda: nn.Linear(8, 2**22), loss=lambda m, b: m(b[0]).mean()),
}
FREE = {
    "a mean over samples": job(nn.ReLU, loss=lambda m, b: F.mse_loss(m(b[0]), b[1])),
    "sums": job(lambda: nn.Dropout(0.0)),
    "statistics of a sample": job(lambda: nn.GroupNorm(4, 16)),
    "a stream": job(data=lambda: iter(Pairs)),
    "costs": job(cost=lambda index: index % 7 + 1),
}


@pytest.mark.parametrize("name", FOLLOW)
def test_a_job_whose_numbers_may_follow_microbatches_keeps_its_own(name: str) -> None:
    one = FOLLOW[name]
    assert with_known_microbatch(one, PlanSpec())[0].microbatch == one.samples_per_microbatch


@pytest.mark.parametrize("name", FREE)
def test_plans_may_choose_where_no_number_depends_on_it(name: str) -> None:
    assert size_of(FREE[name]) is None
    assert size_of(FREE[name], PlanSpec(exact="bitwise")) == 8


def test_a_job_may_leave_its_microbatch_to_the_plan() -> None:
    dropout = FOLLOW["dropout"]
    assert size_of(dropout) == 8
    assert size_of(replace(dropout, microbatch="auto")) is None
    assert size_of(replace(dropout, microbatch=5)) == 5
    assert replace(dropout, microbatch="auto").samples_per_microbatch == 8  # under a plan that is named
    with pytest.raises(evenly.UserError, match="microbatch is 'all', must be a whole number"):
        replace(dropout, microbatch="all")  # pyright: ignore[reportArgumentType]


def test_auto_takes_the_microbatch_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    decision = decide(FOLLOW["dropout"], RunOptions(search=True), find_here())
    assert decision.plan.microbatch is None and decision.microbatch is None
    assert f"evenly: plan {decision.plan}; microbatch=8, an eighth of the batch" in capsys.readouterr().err


def trained(name: str, plan: str) -> list[dict[str, torch.Tensor]]:
    with evenly.start(FOLLOW[name], plan=plan) as run:
        found = []
        for batch in run.batches():
            run.step(batch)
            found.append({key: value.clone() for key, value in full_state(run).items()})
    leave()
    return found


@pytest.mark.full
@pytest.mark.parametrize("name", ["dropout", "statistics of the batch", "slopes that are drawn"])
@pytest.mark.parametrize(
    "plan", ["single", "auto", "ddp", "auto zero=1", "zero2", "auto zero=3", "auto tensor=2", "auto pipeline=2"]
)
def test_every_plan_trains_as_one_device_does(ranks: KeptRanks, name: str, plan: str) -> None:
    for found in ranks.run(trained, name, plan, size=1 if plan == "single" else 2):
        for step, expected in zip(found, plain_steps(Case(FOLLOW[name]), STEPS), strict=True):
            for key, value in step.items():
                assert torch.allclose(value, expected[key], rtol=1e-9, atol=1e-12), key
