"""Schedules by plateau follow the loss of evaluations, or the metric that the job names."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from battery import leave
from kept_ranks import KeptRanks
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import evenly
from evenly.verify.reference import reference_steps

STEPS, COLUMN = 6, 5
x = torch.randn(48, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        for number, parameter in enumerate(self.parameters()):
            nn.init.uniform_(parameter, -1, 1, generator=torch.Generator().manual_seed(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loss(net: nn.Module, batch: torch.Tensor) -> evenly.Loss:
    out = net(batch)
    metrics = {"spread": (out[:, COLUMN].sum(), len(batch)), "loss per number": (out.sum(), out.numel())}
    return evenly.Loss((out - batch).square().sum(), len(batch), metrics=metrics, outputs=out)


def plateau(mode: Any, optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, mode=mode, patience=0, factor=0.5)


def job(mode: str = "max", **changes: Any) -> evenly.Job:
    given: dict[str, Any] = {"model": Net, "loss": loss, "data": x[:32], "eval_data": x[32:], "eval_every": 1}
    given |= {"optimizer": partial(torch.optim.SGD, lr=0.05), "schedule": partial(plateau, mode), "steps": STEPS}
    given |= {"schedule_metric": "spread", "global_batch": 8, "shuffle": False, "precision": "float64"}
    return evenly.Job(**{**given, **changes})


def script(mode: str, followed: str) -> list[float]:
    """The rates after each step of a plain loop."""
    net, rates = Net().double(), list[float]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    schedule = plateau(mode, optimizer)
    for step in range(STEPS):
        batch = x[:32][step % 4 * 8 :][:8]
        optimizer.zero_grad()
        ((net(batch) - batch).square().sum() / len(batch)).backward()
        optimizer.step()
        with torch.no_grad():
            out = net(x[32:])
            loss_of_all = (out - x[32:]).square().sum() / 16
            found = {"spread": out[:, COLUMN].sum() / 16, "loss": loss_of_all, "figure": out.max()}
        schedule.step(found[followed].item())
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


CASES = {
    "a metric": (job(), ("max", "spread")),
    "a metric that falls": (job("min"), ("min", "spread")),
    "the loss": (job("min", schedule_metric=None), ("min", "loss")),
    "the loss by its name": (job("min", schedule_metric="loss"), ("min", "loss")),
    "a figure": (job(schedule_metric="figure", evaluate=lambda out: {"figure": float(out.max())}), ("max", "figure")),
}


def rates(name: str, plan: str) -> list[float]:
    found = list[float]()
    with evenly.start(CASES[name][0], plan=plan) as run:
        for batch in run.batches():
            run.step(batch)
            run.evaluate()
            found.append(run.optimizer.param_groups[0]["lr"])
    leave()
    return found


def test_a_schedule_follows_the_metric_that_is_named() -> None:
    assert rates("a metric", "single") == script("max", "spread") != script("max", "loss")


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("plan", ["single", "ddp", "zero1", "zero2", "zero3", "tensor=2", "pipeline=2"])
def test_every_plan_follows_it(ranks: KeptRanks, name: str, plan: str) -> None:
    one, asked = CASES[name]
    for found in ranks.run(rates, name, plan, size=1 if plan == "single" else 2):
        assert found == script(*asked)
    assert [step.rates[0] for step in reference_steps(one, STEPS)] == script(*asked)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule_metric": None}, r"mode='max'\n  found: it follows the loss of the evaluations, which is to fall"),
        ({"schedule_metric": "loss"}, r"mode='max'\n  found: it follows the loss of the evaluations, which is to fall"),
        ({"schedule": partial(StepLR, step_size=2)}, "found: no schedule follows the evaluations"),
        ({"schedule": None}, "found: no schedule follows the evaluations"),
        ({"schedule_metric": 3}, "schedule_metric is a int, not the name of a metric"),
    ],
)
def test_what_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(evenly.UserError, match=message):
        evenly.start(job(**changes))


def test_a_metric_that_an_evaluation_does_not_have() -> None:
    one = job(schedule_metric="accuracy")
    with evenly.start(one) as run, pytest.raises(evenly.RunError, match="follows 'accuracy', and it has loss"):
        run.step(next(run.batches()))
        run.evaluate()
    leave()
    with pytest.raises(evenly.UserError, match="an evaluation has loss, spread"):
        [*reference_steps(one, 1)]
