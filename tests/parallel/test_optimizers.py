"""Every optimizer of torch.optim on shards: the numbers of one device, or refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from jobs import classifier_job
from kept_ranks import KeptRanks
from torch import nn

import evenly
from evenly.errors import UserError
from evenly.verify.reference import reference_steps

STEPS = 3
EVERY = {
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
REFUSED_ANYWHERE = {"LBFGS", "SparseAdam"}  # several losses per step; sparse gradients
REFUSED_ON_SHARDS = {"Adafactor", "Muon", "Rprop"}
WORK_ON_SHARDS = sorted(EVERY - REFUSED_ANYWHERE - REFUSED_ON_SHARDS)


class Blocks(nn.Module):
    """Odd widths: no dim is a multiple of the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Normed(torch.optim.SGD):
    """Steps by the norm of a whole parameter, as LARS does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * (parameter.detach().norm() / (parameter.grad.norm() + 1))
        return super().step(closure)


def in_groups(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    """Weights and biases in groups with rates of their own."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        every = list(parameters)
        weights, biases = ([p for p in every if (p.ndim > 1) is large] for large in (True, False))
        groups = [{"params": weights}, {"params": biases, "lr": 3e-3}]
        if name == "Muon":
            groups = groups[:1]  # it takes matrices only
        return (Normed if name == "Normed" else getattr(torch.optim, name))(groups, lr=1e-2)

    return make


def job(name: str) -> evenly.Job:
    return classifier_job(
        model=Blocks, optimizer=in_groups(name), precision="float64", eval_data=None, schedule=None, steps=STEPS
    )


def differences(plan: str, names: list[str]) -> dict[str, float]:
    """The largest of any parameter at any step, by optimizer."""
    found: dict[str, float] = {}
    for name in names:
        worst = []
        with evenly.start(job(name), plan=plan) as run:
            for batch, expected in zip(run.batches(), reference_steps(job(name), STEPS), strict=True):
                run.step(batch)
                for key, parameter in run.model.named_parameters():
                    worst.append(
                        float((run.composed.full_view(key, parameter.detach()) - expected.tensors[key]).abs().max())
                    )
            assert [group["lr"] for group in run.optimizer.param_groups] == [1e-2, 3e-3]
        assert len(worst) == STEPS * 6
        found[name] = max(worst)
    return found


# Adagrad makes its state at once. Normed is no optimizer of torch's.
@pytest.mark.parametrize(("plan", "names"), [("zero3", [*WORK_ON_SHARDS, "Normed"]), ("zero1", ["Adagrad", "Normed"])])
def test_optimizers_compute_on_shards_what_they_compute_on_one_device(
    plan: str, names: list[str], ranks: KeptRanks
) -> None:
    for found in ranks.run(differences, plan, names, size=2):
        assert found.keys() == set(names)
        assert {name: worst for name, worst in found.items() if not worst < 1e-11} == {}


def refusals() -> dict[str, str]:
    texts: dict[str, str] = {}
    for name in sorted(REFUSED_ON_SHARDS):
        try:
            with evenly.start(job(name), plan="zero2"):
                texts[name] = "nothing"
        except UserError as problem:
            texts[name] = str(problem)
    return texts


def test_optimizers_that_need_whole_parameters_are_refused_on_shards(ranks: KeptRanks) -> None:
    for found in ranks.run(refusals, size=2):
        assert all(f"optimizer {name} under zero=2" in text for name, text in found.items()), found


@pytest.mark.parametrize("name", sorted(REFUSED_ON_SHARDS - {"Muon"}))
def test_they_work_where_parameters_are_whole(name: str) -> None:
    with evenly.start(job(name), plan="single") as run:
        for batch in run.batches():
            run.step(batch)
        assert run.steps_done == STEPS
