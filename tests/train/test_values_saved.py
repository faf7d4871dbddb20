"""Values that a checkpoint must hold: numbers of numpy are numbers, all else is found before the first step."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kept_ranks import KeptRanks
from torch import nn

import evenly

TABLE = 0.1 * 0.5 * (1 + np.cos(np.pi * np.arange(100) / 100))
X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Table(torch.optim.lr_scheduler.LRScheduler):
    """Rates of numpy, from a table that is part of its state."""

    def __init__(self, optimizer: Any, table: Any = TABLE) -> None:
        self.table = table
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [self.table[self.last_epoch] for _ in self.optimizer.param_groups]


class Keeping:
    """A hook with a state."""

    def __init__(self, *states: Any) -> None:
        self.states = [*states]

    def __call__(self, run: Any, found: Any) -> None:
        self.states = self.states[1:] or self.states

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.states[0]}

    def load_state_dict(self, state: Any) -> None:
        self.states = [state["kept"]]


def made_by_seed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1).double()


def job(**fields: Any) -> evenly.Job:
    made = evenly.Job(
        model=made_by_seed, loss=lambda m, x: (m(x) - x.sum(1, keepdim=True)).square().mean(), data=X,
        optimizer=lambda p: torch.optim.SGD(p, 0.1), schedule=Table, global_batch=8, shuffle=False, steps=6,
        precision="float64",
    )  # fmt: skip
    return replace(made, **fields)


def trained(plan: str, out: Path, last: int, made: evenly.Job) -> dict[str, torch.Tensor]:
    with evenly.start(made, plan=plan, out=out, steps=last, resume=last > 3) as run:
        for batch in run.batches():
            run.step(batch)
            run.log({"a": np.float32(1.5), "list": [np.float32(2.5)]})
        assert type(run.optimizer.param_groups[0]["lr"]) is np.float64
        with run.whole_model() as model:
            return {name: p.detach().clone() for name, p in model.named_parameters()}


def in_two_legs(plan: str, out: Path) -> dict[str, torch.Tensor]:
    trained(plan, out, 3, job(on_step=Keeping(np.int64(3), {"b": np.float32(0.1)})))
    return trained(plan, out, 6, job(on_step=Keeping(np.int64(3))))


def plain() -> dict[str, torch.Tensor]:
    weights = {name: p.detach().clone().requires_grad_() for name, p in made_by_seed().named_parameters()}
    for step in range(6):
        x = X[8 * (step % 4) :][:8]
        loss = (x @ weights["weight"].T + weights["bias"] - x.sum(1, keepdim=True)).square().mean()
        for p, gradient in zip(weights.values(), torch.autograd.grad(loss, [*weights.values()]), strict=True):
            p.data.sub_(gradient, alpha=TABLE[step])
    return weights


def test_a_rate_of_numpy_is_saved_and_comes_back(tmp_path: Path) -> None:
    found = in_two_legs("single", tmp_path)
    assert all(torch.allclose(found[name], one, rtol=1e-9) for name, one in plain().items())


@pytest.mark.full
@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero2", "zero3"])
def test_rates_of_numpy_under_every_plan(plan: str, ranks: KeptRanks, tmp_path: Path) -> None:
    found = ranks.run(in_two_legs, plan, tmp_path, size=2)[0]
    assert all(torch.allclose(found[name], one, rtol=1e-9) for name, one in plain().items())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a hook": ({"on_step": Keeping({1, 2})}, r"values.hooks.*it is a set"),
    "a schedule": ({"schedule": lambda o: Table(o, memoryview(b"abc"))}, "values.schedule.table .*it is a memoryview"),
    "a group": ({"optimizer": lambda p: torch.optim.SGD([{"params": [*p], "lr": 0.1, "by": print}])}, "option 'by'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_value_that_cannot_be_saved_is_found_before_the_first_step(case: str, tmp_path: Path) -> None:
    fields, said = REFUSED[case]
    with pytest.raises(evenly.UserError) as problem, evenly.start(job(**fields), plan="single", out=tmp_path):
        pass
    assert re.search(said, str(problem.value).replace("\n", " "))


def test_a_save_that_fails_later_leaves_what_was_saved_before(tmp_path: Path) -> None:
    with (
        pytest.raises(evenly.EvenlyError, match=r"step 1 is saved in .*: resume from there") as problem,
        evenly.start(job(on_step=Keeping(1, 2, {3})), plan="single", out=tmp_path) as run,
        closing(run.store),  # type: ignore[type-var]
    ):
        for batch in run.batches():
            run.step(batch)
            run.save()
    assert problem.value.exit_code == 1
    assert trained("single", tmp_path, 6, job(on_step=Keeping(1)))
