"""Jobs that call torch.distributed themselves: each sees one rank, and trains what one device trains."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kept_ranks import KeptRanks
from torch import nn
from torch.distributed import all_reduce, get_rank, get_world_size, is_initialized  # as scripts have them at their top

import evenly
from evenly.data.loader import microbatches_of_step
from evenly.errors import EvenlyError

STEPS = 3
PLANS = ["ddp", "single", "zero1", "zero2", "zero3", "tensor=2", "pipeline=2"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def boxes_of(there: torch.Tensor) -> torch.Tensor:
    """Return the normaliser as detection scripts have it: the boxes of a rank, averaged over ranks."""
    boxes = there.sum()
    if dist.is_available() and (is_initialized() or dist.is_initialized()):
        all_reduce(boxes := boxes.clone())
        boxes = boxes / dist.get_world_size()
    return boxes.clamp(min=1)


def asked_anyway(there: torch.Tensor) -> torch.Tensor:
    """Return the normaliser of a script that runs under torchrun only, by way of several collectives."""
    gathered = [torch.zeros(()).to(there) for _ in range(get_world_size())]
    dist.all_gather(gathered, there.sum())
    objects: list[Any] = [None] * get_world_size()
    dist.all_gather_object(objects, get_rank())
    dist.barrier(group=dist.new_group([get_rank()]))
    return torch.stack(gathered).sum().clamp(min=1) + sum(objects)


class Talking(torch.optim.Optimizer):
    """Steps each matrix on one rank and gathers it from there, as Muon does."""

    def __init__(self, params: Any, lr: float = 0.1, talks: bool = True) -> None:
        super().__init__(params, dict(lr=lr))
        self.talks = talks

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        size = dist.get_world_size() if self.talks else 1
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                if number % size == (dist.get_rank() if self.talks else 0):
                    p.sub_(p.grad / (1e-3 + p.grad.norm()), alpha=group["lr"])
                if self.talks:
                    dist.broadcast(p, src=number % size)


def plain_boxes(there: torch.Tensor) -> torch.Tensor:
    return there.sum().clamp(min=1)


def job_of(normaliser: Callable[..., torch.Tensor], optimizer: Callable[..., Any]) -> evenly.Job:
    draw = torch.Generator().manual_seed(3)
    x, y = torch.randn(2, 24, 8, generator=draw, dtype=torch.float64)
    there = (torch.arange(24)[:, None] % 5 > torch.arange(8)).double()

    def loss(model: nn.Module, batch: Any) -> evenly.Loss:
        x, y, there = batch
        return evenly.Loss(((model(x) - y).square() * there).sum() / normaliser(there), 1)

    return evenly.Job(
        model=Net, data=torch.utils.data.TensorDataset(x, y, there), loss=loss, optimizer=optimizer,
        global_batch=8, microbatch=2, steps=STEPS, precision="float64",
    )  # fmt: skip


JOBS: dict[str, tuple[Callable[[], evenly.Job], Callable[[], evenly.Job]]] = {
    "normaliser": (lambda: job_of(boxes_of, sgd), lambda: job_of(plain_boxes, sgd)),
    "collectives": (lambda: job_of(asked_anyway, sgd), lambda: job_of(plain_boxes, sgd)),
    "optimizer": (lambda: job_of(plain_boxes, Talking), lambda: job_of(plain_boxes, lambda p: Talking(p, talks=False))),
}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1, momentum=0.9)


def trained(name: str, plan: str) -> dict[str, torch.Tensor] | str:
    """The whole parameters after the run, of those that this rank has; or the refusal."""
    try:
        with evenly.start(JOBS[name][0](), plan=plan) as run:
            for batch in run.batches():
                run.step(batch)
            pipeline = run.composed.pipeline
            return {
                key: run.composed.full_view(key, p.detach()).clone()
                for key, p in run.model.named_parameters()
                if pipeline is None or key not in pipeline.placeholders
            }
    except EvenlyError as refused:
        if dist.is_initialized():
            dist.destroy_process_group()
        return str(refused)


def plain(name: str) -> dict[str, torch.Tensor]:
    """The parameters after a loop on one device that knows of no ranks."""
    from evenly.data.stream import stream_key

    job = JOBS[name][1]()
    torch.manual_seed(key := stream_key(job.seed, "model"))
    random.seed(key)
    model = job.model().double()
    optimizer = job.optimizer(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        microbatches = microbatches_of_step(job, step)
        for indices in microbatches:
            batch = torch.utils.data.default_collate([job.data[i] for i in indices])
            (job.loss(model, batch).total / len(microbatches)).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


CASES = [(name, plan) for name in JOBS for plan in PLANS]
FAST = [("normaliser", "ddp")]


@pytest.mark.parametrize(
    ("name", "plan"), [case if case in FAST else pytest.param(*case, marks=pytest.mark.full) for case in CASES]
)
def test_a_job_that_talks_trains_as_on_one_device(name: str, plan: str, ranks: KeptRanks) -> None:
    expected, found = plain(name), {}
    for one in ranks.run(trained, name, plan, size=1 if plan == "single" else 2):
        if isinstance(one, str):
            assert (name, plan) == ("optimizer", "pipeline=2") and "it may look at all parameters together" in one
            return
        found |= one
    assert found.keys() == expected.keys()
    for key, p in expected.items():
        torch.testing.assert_close(found[key], p, rtol=1e-9, atol=1e-12)


ASKED: dict[str, Callable[[], Any]] = {
    "broadcast": lambda: dist.broadcast(torch.ones(1), src=1),
    "init_process_group": lambda: dist.init_process_group("gloo"),
    "new_group": lambda: dist.new_group([0, 1]),
    "all_gather": lambda: dist.all_gather([torch.ones(1)] * 2, torch.ones(1)),
    "send": lambda: dist.send(torch.ones(1), 1),
    "destroy_process_group": lambda: dist.destroy_process_group(),
}


def refused(function: str) -> tuple[str, tuple[bool, int]]:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        ASKED[function]()
        return model(batch).sum()

    job = evenly.Job(
        model=lambda: nn.Linear(8, 1), data=torch.randn(16, 8), loss=loss, optimizer=sgd, global_batch=4, steps=1
    )
    with pytest.raises(EvenlyError) as problem:
        evenly.start(job, plan="ddp")
    outside = dist.is_initialized(), dist.get_world_size()
    dist.destroy_process_group()
    return str(problem.value), outside


@pytest.mark.parametrize(
    "function", ["broadcast", *(pytest.param(one, marks=pytest.mark.full) for one in [*ASKED][1:])]
)
def test_what_one_rank_cannot_be_is_refused_by_name(function: str, ranks: KeptRanks) -> None:
    for words, outside in ranks.run(refused, function):
        assert f"torch.distributed's {function} in the job's code ({Path(__file__).name}:" in words
        assert "a job sees one rank, whatever the plan" in words
        assert outside == (True, 2)  # a script's own code, between the steps of its loop
