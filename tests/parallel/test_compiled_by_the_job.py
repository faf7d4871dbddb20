"""What a job compiles itself: steps as in a plain loop without compiler, or as it is written."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_ranks import KeptRanks
from torch import nn

import evenly
from evenly.data.loader import microbatches_of_step
from evenly.data.stream import stream_key
from evenly.errors import EvenlyError

STEPS = 4  # the memory of tensors is counted in the second
PLANS = ["single", "ddp", "zero1", "zero2", "zero3", "tensor=2", "pipeline=2"]


def compiled(function: Any, how: str) -> Any:
    """`function` as scripts compile it; by a backend that needs no C++ compiler."""
    return function if how == "plain" else torch.compile(function, fullgraph=how == "whole", backend="eager")


def add_scaled(p: torch.Tensor, gradient: torch.Tensor, lr: torch.Tensor) -> None:
    p.sub_(lr * gradient)


def squares(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (out - y).square().sum()


class Update(torch.optim.Optimizer):
    """A step under `torch.compile`, as nanochat's optimizer has it."""

    def __init__(self, params: Any, how: str) -> None:
        super().__init__(params, dict(lr=0.01))
        self.how = how

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                compiled(add_scaled, self.how)(p, p.grad, torch.tensor(group["lr"], dtype=p.dtype))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net_of(where: str, how: str) -> nn.Module:
    net = Net()
    if where == "model":
        return compiled(net, how)
    if where == "in place" and how != "plain":
        net.compile(fullgraph=how == "whole", backend="eager")
    if where == "part" and how != "plain":
        net.blocks[1].compile(fullgraph=how == "whole", backend="eager")
    return net


def job_of(where: str, how: str) -> evenly.Job:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loss = compiled(squares, how if where == "loss" else "plain")
    return evenly.Job(
        model=lambda: net_of(where, how),
        data=torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)),
        loss=lambda model, batch: evenly.Loss(loss(model(batch[0]), batch[1]), len(batch[0])),
        optimizer=lambda p: Update(p, how) if where == "update" else torch.optim.SGD(p, 0.01),
        global_batch=16, microbatch=8, steps=STEPS, precision="float64",
    )  # fmt: skip


def plain_name(name: str) -> str:
    return name.replace("_orig_mod.", "")


def plain() -> dict[str, torch.Tensor]:
    job = job_of("nothing", "plain")
    torch.manual_seed(key := stream_key(job.seed, "model"))
    random.seed(key)
    model = job.model().double()
    for step in range(STEPS):
        model.zero_grad()
        for indices in microbatches_of_step(job, step):
            x, y = torch.utils.data.default_collate([job.data[i] for i in indices])
            ((model(x) - y).square().sum() / 16).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
    return {name: p.detach() for name, p in model.named_parameters()}


def trained(where: str, how: str, plan: str, folder: Path) -> dict[str, torch.Tensor] | str:
    """The whole parameters, of those that this rank has; or the refusal. Raises for a warning of the compiler."""
    torch.compiler.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with evenly.start(job_of(where, how), plan=plan, out=folder) as run:
                for batch in run.batches():
                    run.step(batch)
                pipeline = run.composed.pipeline
                return {
                    plain_name(name): run.composed.full_view(name, p.detach()).clone()
                    for name, p in run.model.named_parameters()
                    if pipeline is None or name not in pipeline.placeholders
                }
    except EvenlyError as refused:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        return str(refused)


def check(found: Any, expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, p in expected.items():
        torch.testing.assert_close(found[name], p, rtol=1e-9, atol=1e-12)


@pytest.fixture
def compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


def test_an_update_that_is_compiled_whole_goes_through_the_step_whose_memory_is_counted(
    tmp_path: Path, compiler: None
) -> None:
    check(trained("update", "whole", "single", tmp_path), plain())
    assert '"memory"' in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.full_but("model-whole-tensor=2")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("how", ["whole", "breaks"])
@pytest.mark.parametrize("where", ["update", "loss", "model", "in place", "part"])
def test_what_a_job_compiles_trains_as_without_compiler(
    where: str, how: str, plan: str, tmp_path: Path, ranks: KeptRanks
) -> None:
    found: dict[str, torch.Tensor] = {}
    for one in ranks.run(trained, where, how, plan, tmp_path, size=1 if plan == "single" else 2):
        if isinstance(one, str):
            assert (where, plan) == ("update", "pipeline=2") and "it may look at all parameters together" in one
            return
        found |= one
    check(found, plain())
