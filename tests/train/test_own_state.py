"""The recipes of docs/state.md, against the same in a plain loop."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kept_ranks import KeptRanks
from torch import nn
from torch.utils.data import TensorDataset

import evenly
from evenly.data.loader import microbatches_of_step
from evenly.errors import EvenlyError
from evenly.verify.reference import build_model

PAGE = Path(__file__).parents[2] / "docs" / "state.md"
BLOCKS = dict(re.findall(r'```python title="(\w+)"\n(.*?)```', PAGE.read_text(), re.S))
STEPS, BATCH = 4, 12


def recipe(name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"torch": torch, "nn": nn, "copy": copy}
    exec(compile(BLOCKS[name], str(PAGE), "exec"), found)
    return found


def make(name: str) -> evenly.Job:
    found, x = recipe(name), torch.randn(36, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return evenly.Job(
        model=found["Model"],
        loss=lambda model, batch: evenly.Loss((model(batch[0]) - batch[1]).square().sum(), len(batch[0])),
        data=TensorDataset(x, x.flip(1)),
        optimizer=lambda p: torch.optim.SGD([q for q in p if q.requires_grad], lr=0.05),
        global_batch=BATCH,
        microbatch=3,
        steps=STEPS,
        precision="float64",
        on_step=found.get("on_step", ()),
    )


def trained(name: str, plan: str) -> dict[str, torch.Tensor]:
    """The state after a run under `plan`, or the words of its refusal."""
    job, loop = make(name), recipe(name).get("loop")
    try:
        run = evenly.start(job, plan=plan)
    except EvenlyError as problem:
        return {f"refused: {problem}": torch.zeros(())}
    with run:
        if loop is not None:
            loop(run)
        else:
            for batch in run.batches():
                run.step(batch)
        with run.whole_model() as model:
            return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def by_hand(name: str) -> dict[str, torch.Tensor]:
    """The state after a plain loop over whole batches, which calls the recipe's hook."""
    job = make(name)
    model = build_model(job)
    optimizer, data = job.optimizer(model.parameters()), job.data

    def step(samples: list[Any]) -> None:
        optimizer.zero_grad()
        (
            job.loss(model, [torch.stack(column) for column in zip(*samples, strict=True)]).total / len(samples)
        ).backward()
        optimizer.step()

    def batches() -> Iterator[Any]:
        for number in range(STEPS):
            samples = [data[index] for group in microbatches_of_step(job, number) for index in group]
            yield SimpleNamespace(samples=lambda samples=samples: samples)

    run = SimpleNamespace(model=model, batches=batches, step=lambda batch: step(batch.samples()))
    run.whole_parameters = nullcontext
    found = recipe(name)
    if "loop" in found:
        found["loop"](run)
    else:
        for batch in batches():
            run.step(batch)
            found["on_step"](run, None)
    return model.state_dict()


def check(name: str, found: dict[str, torch.Tensor]) -> None:
    for key, tensor in by_hand(name).items():
        assert float((found[key] - tensor).abs().max()) < 1e-9, (name, key)


@pytest.mark.parametrize("name", BLOCKS)
def test_state_of_ones_own_is_that_of_a_plain_loop(name: str, ranks: KeptRanks) -> None:
    check(name, ranks.run(trained, name, "ddp")[0])


@pytest.mark.full
@pytest.mark.parametrize("plan", ["zero1", "zero2", "zero3", "tensor=2", "pipeline=2"])
@pytest.mark.parametrize("name", BLOCKS)
def test_state_of_ones_own_is_kept_or_refused(name: str, plan: str, ranks: KeptRanks) -> None:
    found = ranks.run(trained, name, plan)[0]
    if plan == "pipeline=2":
        assert next(iter(found)).startswith("refused: cutting the model into stages")  # it has no blocks
    else:
        check(name, found)


class Shadow(nn.Module):
    """Moves a parameter in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.shadow = copy.deepcopy(self.head).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for old, new in zip(self.shadow.parameters(), self.head.parameters(), strict=True):
                old.lerp_(new, 0.1)
        return self.head(self.body(x).relu())


class Ranges(Shadow):
    """Keeps the smallest and the largest number that it has seen, as quantisation-aware models do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("least", torch.full((), 1e9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        self.least = torch.minimum(self.least, y.detach().min())
        return self.head(y)


def refused(kind: type[nn.Module], plan: str) -> tuple[str, str]:
    job = make("teacher")
    changed = evenly.Job(**{**vars(job), "model": kind, "on_step": ()})
    with pytest.raises(evenly.UserError) as error:
        evenly.start(changed, plan=plan)
    return error.value.asked, error.value.do


@pytest.mark.parametrize("kind", [Shadow, Ranges])
def test_a_forward_that_moves_state_is_refused_before_the_first_step(kind: type[nn.Module], ranks: KeptRanks) -> None:
    for asked, do in ranks.run(refused, kind, "ddp"):
        assert "several ranks" in asked or "changes in the forward pass" in asked
        assert "State of your own" in do


class Packed(nn.Parameter):
    """Stands in for weights of four bits: two to a byte, with a scale beside them."""


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.weight = Packed(torch.arange(64, dtype=torch.uint8).view(8, 8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) @ (self.weight.to(x.dtype) / 64)


@pytest.mark.parametrize("plan", ["zero3", pytest.param("pipeline=2", marks=pytest.mark.full)])
def test_a_packed_weight_is_refused_where_parameters_are_cut(plan: str, ranks: KeptRanks) -> None:
    asked, do = ranks.run(refused, Base, plan)[0]
    assert asked.startswith("plan") and "zero2" in do


@pytest.mark.full
@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero2", "tensor=2"])
def test_a_packed_weight_stays_whole_under_other_plans(plan: str, ranks: KeptRanks) -> None:
    assert ranks.run(steps_of_base, plan)[0] == STEPS


def steps_of_base(plan: str) -> int:
    job = evenly.Job(**{**vars(make("teacher")), "model": Base, "on_step": ()})
    with evenly.start(job, plan=plan) as run:
        for batch in run.batches():
            run.step(batch)
        return run.steps_done
