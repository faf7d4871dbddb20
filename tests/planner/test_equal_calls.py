"""Models with rows of equal blocks are run with few of them, and all others whole; what is read is the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import evenly
from evenly.plan import parse_plan
from evenly.planner.job_profile import JobProfiler

WIDTH, BLOCKS = 8, 9


class Block(nn.Module):
    def __init__(self, inner: int = 4 * WIDTH, p: float = 0.1) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(p)
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(self.up(self.norm(x)).relu()))


class Scaled(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Numbered(Block):
    """Does something else where it is the sixth."""

    number = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2 if self.number == 5 else super().forward(x)


class Model(nn.Module):
    def __init__(self, make: Callable[[int], nn.Module] = lambda _: Block(), blocks: int = BLOCKS) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(make(number) for number in range(blocks))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Looks(Model):
    """Takes the results of some blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        seen: list[torch.Tensor] = []
        for number, block in enumerate(self.blocks):
            x = block(x)
            seen += [x] * (number in (2, 6))
        return self.leave(torch.stack(seen).sum(0) + x)


class Bridged(Model):
    """The last blocks are given the results of the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        seen: list[torch.Tensor] = []
        for number, block in enumerate(self.blocks):
            x = block(x if 2 * number < len(self.blocks) else x + seen.pop())
            seen.append(x)
        return self.leave(x)


class Counts(Model):
    """Goes by the number of its blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for number in range(BLOCKS):
            x = self.blocks[number](x)
        return self.leave(x / len(self.blocks))


class Around(Model):
    """Computes something more behind one block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for number, block in enumerate(self.blocks):
            x = block(x).tanh() if number == 5 else block(x)
        return self.leave(x)


class Stacked(Model):
    """Its loss is of as many tensors as it has blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([super().forward(x)] * len(self.blocks))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Model(), Model()
        self.between = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(x)))


def numbered(number: int) -> nn.Module:
    block = Numbered()
    block.number = number
    return block


def tied() -> nn.Module:
    model = Model()
    model.blocks[6].up.weight = model.blocks[2].up.weight  # type: ignore[union-attr]
    return model


def half_frozen() -> nn.Module:
    model = Model()
    for block in [*model.blocks][:4]:
        block.requires_grad_(False)
    return model


def job(model: Callable[[], nn.Module]) -> evenly.Job:
    return evenly.Job(
        model=model,
        loss=lambda model, batch: evenly.Loss(model(batch).square().sum(), len(batch)),
        data=[torch.zeros(5) for _ in range(12)],  # type: ignore[arg-type]
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        global_batch=12,
        microbatch=3,
        steps=1,
    )


class Watched(JobProfiler):
    """Notes how many modules each run leaves out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.left_out: list[int] = []

    def _run(self, plan: Any, microbatch: Any, without: Any = ()) -> Any:
        self.left_out.append(len([*without]))
        return super()._run(plan, microbatch, without)


PLANS = ("data=1", "data=1 recompute=selective", "data=1 recompute=full", "data=1 tensor=2", "data=1 pipeline=2")


def of_whole_runs(job: evenly.Job, plan: str) -> Any:
    profiler = JobProfiler(job, _equal_calls={"float64": None})
    return profiler.profile(parse_plan(plan).complete("float64"))


@pytest.mark.full_but("Model-4", "Towers-8")
@pytest.mark.parametrize(("model", "kept"), [(Model, 4), (Towers, 8), (lambda: Model(blocks=30), 4)])
def test_few_of_a_row_of_equal_blocks_are_run(model: Callable[[], nn.Module], kept: int) -> None:
    one = job(model)
    profiler = Watched(one)
    for plan in PLANS:
        assert profiler.profile(parse_plan(plan).complete("float64")) == of_whole_runs(one, plan)
    calls = len(profiler.profile(parse_plan("data=1").complete("float64")).calls)
    assert profiler.left_out[0] == 0 and {*profiler.left_out[1:]} == {calls - kept}


@pytest.mark.full_but("<lambda>0", "Looks", "Counts", "Stacked", "tied")
@pytest.mark.parametrize(
    "model",
    [
        lambda: Model(lambda number: Block(4 * WIDTH + (number == 5))),
        lambda: Model(lambda number: (Scaled if number == 5 else Block)()),
        lambda: Model(lambda number: Block(p=0.1 + 0.1 * (number == 5))),
        lambda: Model(numbered),
        Looks,
        Bridged,
        Counts,
        Around,
        Stacked,
        tied,
        half_frozen,
        lambda: Model(blocks=4),
    ],
)
def test_a_model_whose_blocks_differ_is_run_whole(model: Callable[[], nn.Module]) -> None:
    one = job(model)
    profiler = Watched(one)
    for plan in PLANS:
        assert profiler.profile(parse_plan(plan).complete("float64")) == of_whole_runs(one, plan)
    assert not any(profiler.left_out[2:])  # the second may have found out that it differs


def test_neighbours_that_come_to_differ_are_noticed() -> None:
    class Chosen(Numbered):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2 if self.number == 2 and len(x) > 3 else super().forward(x)

    def make(number: int) -> nn.Module:
        block = Chosen()
        block.number = number if number == 2 else 0
        return block

    one = job(lambda: Model(make))
    profiler = Watched(one)
    plan = parse_plan("data=1").complete("float64")
    profiler.profile(plan)
    larger = replace(one, microbatch=4)
    known = profiler._equal_calls  # pyright: ignore[reportPrivateUsage]
    later = Watched(larger, _equal_calls=known)
    assert later.profile(plan) == of_whole_runs(larger, "data=1")
    assert later.left_out[0] > 0 and later.left_out[-1] == 0
