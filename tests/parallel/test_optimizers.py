"""Every optimizer of torch.optim on shards: the numbers of one device, or refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import classifier_job
from kept_ranks import KeptRanks
from torch import nn

import evenly
from evenly.verify.reference import reference_steps

STEPS = 3
EVERY = {
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
REFUSED_ANYWHERE = {"LBFGS", "SparseAdam"}  # several losses per step; sparse gradients
STEPPED_WHOLE = ["Adafactor", "Rprop"]
# Muon computes in bfloat16, which turns the last bits of a sum into other steps: it is compared in wrong_runs.
WORK_ON_SHARDS = sorted(EVERY - REFUSED_ANYWHERE - {"Muon"})


class Blocks(nn.Module):
    """Odd widths: no dim is a multiple of the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5)) for _ in range(2))
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
        assert len(worst) == STEPS * 10
        found[name] = max(worst)
    return found


# Adagrad makes its state at once. Normed is no optimizer of torch's.
@pytest.mark.parametrize(
    ("plan", "names"),
    [
        ("zero3", [*WORK_ON_SHARDS, "Normed"]),
        ("zero1", ["Adagrad", "Normed", *STEPPED_WHOLE]),
        ("tensor=2", ["Adagrad", "Normed", *STEPPED_WHOLE]),
    ],
)
def test_optimizers_compute_on_shards_what_they_compute_on_one_device(
    plan: str, names: list[str], ranks: KeptRanks
) -> None:
    for found in ranks.run(differences, plan, names, size=2):
        assert found.keys() == set(names)
        assert {name: worst for name, worst in found.items() if not worst < 1e-11} == {}


def trained(name: str, plan: str, out: Path, resume: bool) -> float:
    """The largest difference after the second step, saved, or after the third, resumed."""
    steps = 3 if resume else 2
    with evenly.start(job(name), plan=plan, out=out, steps=steps, resume=resume) as run:
        for batch in run.batches():
            run.step(batch)
            run.save()
        run.save()
        found = {key: run.composed.full_view(key, p.detach()) for key, p in run.model.named_parameters()}
    expected = [*reference_steps(job(name), steps)][-1].tensors
    return max(float((found[key] - expected[key]).abs().max()) for key in found)


@pytest.mark.full_but("plans0")
@pytest.mark.parametrize("plans", [("zero3", "tensor=2"), ("tensor=2", "zero1"), ("zero2", "ddp"), ("ddp", "zero3")])
def test_an_optimizer_that_is_stepped_whole_goes_on_under_another_plan(
    plans: tuple[str, str], ranks: KeptRanks, tmp_path: Path
) -> None:
    for name in ("Rprop", "Normed"):
        for plan, resume in zip(plans, (False, True), strict=True):
            assert max(ranks.run(trained, name, plan, tmp_path / name, resume, size=2)) < 1e-11, (name, plan)
