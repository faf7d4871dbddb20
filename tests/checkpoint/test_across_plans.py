"""A run that was saved under one plan goes on under another: loss, gradient norm, parameters and the optimizer's state.

Every row of `PAIRS` trains two steps, saves, goes on under the other plan for three more, and is held against five
steps on one device, tensor by tensor; under the same plan against its own five steps, bit by bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from jobs_pipeline import PIPELINE_JOBS, Block, Chain, text_job
from kept_ranks import KeptRanks
from torch import nn

import evenly
from evenly.checkpoint.state import parameter_of, read_state
from evenly.plan import parse_plan
from evenly.train.run import Run
from evenly.verify.verify import world_of

SAVED_AT, STEPS = 2, 5
Numbers = dict[str, torch.Tensor]
Train = Callable[..., Numbers]

TIED = [
    ("single", "pp"),
    ("single", "3d"),
    ("ddp", "data=2 pipeline=2 zero=1"),
    ("ddp", "tp"),
    ("zero3", "pp"),
    ("hsdp", "pipeline=2 schedule=zbv"),
    ("tp", "data=2 pipeline=2 zero=3"),
    ("tp", "hsdp"),
    ("pp", "single"),
    ("pp", "pipeline=4"),
    ("pipeline=4", "pipeline=2 schedule=interleaved stages_per_rank=2"),
    ("pipeline=2 schedule=interleaved stages_per_rank=2", "zero3"),
    ("pipeline=2 schedule=zbv", "ddp"),
    ("data=2 pipeline=2 zero=1", "zero3"),
    ("data=2 pipeline=2 zero=2", "pipeline=2 schedule=zbv"),
    ("data=2 pipeline=2 zero=3", "tensor=2 pipeline=2"),
    ("tensor=2 pipeline=2", "data=2 pipeline=2 zero=2"),
    ("3d", "data=2 pipeline=2 zero=3"),
]
# Running statistics, which a stage has of its own blocks.
CONV_NORM = [
    ("pp", "ddp"),
    ("zero3", "data=2 pipeline=2 zero=3"),
    ("data=2 pipeline=2 zero=3", "pipeline=2 schedule=interleaved stages_per_rank=2"),
]
# A learning rate of its own for what only one stage holds, computed from the one before.
HEAD_APART = [("pp", "pp"), ("single", "pipeline=2 schedule=zbv")]
PAIRS = [*(("tied", *pair) for pair in TIED), *(("conv_norm", *pair) for pair in CONV_NORM)]
PAIRS += [("head_apart", *pair) for pair in HEAD_APART]
SAME = ["pp", "pipeline=2 schedule=zbv", "data=2 pipeline=2 zero=3"]


def trained(name: str, plan: str, steps: int, out: Path | None, resume: bool) -> Numbers:
    """Trains to `steps`; what this rank has of the whole state after it, and figures by step."""
    found: Numbers = {}
    job = JOBS[name](precision="float64", global_batch=9)
    with evenly.start(job, plan=plan, out=out, steps=steps, resume=resume) as run:
        for batch in run.batches():
            report = run.step(batch)
            found[f"loss {report.step}"] = torch.tensor(report.loss, dtype=torch.float64)
            found[f"grad_norm {report.step}"] = torch.tensor(report.grad_norm, dtype=torch.float64)
            found[f"lr {report.step}"] = torch.tensor(report.lr, dtype=torch.float64)
        if out is not None:
            run.save()
        return found | state_of(run)


def state_of(run: Run) -> Numbers:
    """The tensors of model and optimizer, whole; those that other stages hold are not among them."""
    with run.state_as_saved():
        tensors, _ = read_state(run.model, run.optimizer)
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        # A counter of steps belongs to a parameter and is not cut as it is.
        return {n: run.composed.full_view(parameter_of(n), t).cpu() if t.dim() else t for n, t in copies.items()}


def united(parts: list[Numbers]) -> Numbers:
    """What all ranks have together. What several have, tied parameters of several stages too, is the same bits."""
    whole: Numbers = {}
    for part in parts:
        for name, tensor in part.items():
            assert torch.equal(whole.setdefault(name, tensor), tensor), name
    return whole


def head_apart(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    *others, head = parameters
    return torch.optim.AdamW([{"params": [head], "lr": 3e-3}, {"params": others}], lr=1e-2, eps=1e-6)


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)


def short() -> Chain:
    """Half of a chain: as many blocks as any plan here has stages."""
    return Chain(Block() for _ in range(4))


def short_tied() -> Chain:
    model = short()
    nn.init.normal_(model.embed.weight, std=0.1)
    model.head.weight = model.embed.weight
    return model


JOBS: dict[str, Callable[..., evenly.Job]] = {
    "tied": partial(PIPELINE_JOBS["tied"], model=short_tied),
    "conv_norm": PIPELINE_JOBS["conv_norm"],
    "head_apart": partial(text_job, model=short, optimizer=head_apart, schedule=cosine),
}


@pytest.fixture(scope="module")
def train(ranks: KeptRanks) -> Train:
    """`trained` on as many ranks as the plan takes, their results united."""

    def train(name: str, plan: str, steps: int, out: Path | None = None, resume: bool = False) -> Numbers:
        size = world_of(parse_plan(plan), None)
        return united(ranks.run(trained, name, plan, steps, out, resume, size=size))

    return train


@pytest.fixture(scope="module")
def uninterrupted(train: Train) -> Callable[[str, str], Numbers]:
    """State and figures of five steps; each run is made once."""
    return cache(lambda name, plan: train(name, plan, STEPS))


@pytest.fixture(scope="module")
def saved(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The folder of a run that was saved after two steps; each is made once."""

    def save(name: str, plan: str) -> Path:
        folder = tmp_path_factory.mktemp("saved") / "run"
        train(name, plan, SAVED_AT, folder)
        return folder

    return cache(save)


@pytest.fixture
def resumed(train: Train, saved: Callable[[str, str], Path], tmp_path: Path) -> Callable[[str, str, str], Numbers]:
    """State and figures of the steps after the second, under another plan."""

    def resume(name: str, first: str, then: str) -> Numbers:
        shutil.copytree(saved(name, first), tmp_path / "run")
        return train(name, then, STEPS, tmp_path / "run", resume=True)

    return resume


@pytest.mark.full_but(
    "tied-ddp-tp",
    "tied-zero3-pp",
    "tied-pp-single",
    "tied-pipeline=2 schedule=zbv-ddp",
    "conv_norm-pp-ddp",
    "head_apart-single-*",
)
@pytest.mark.parametrize(("name", "first", "then"), PAIRS)
def test_a_run_goes_on_under_another_plan(
    name: str,
    first: str,
    then: str,
    resumed: Callable[[str, str, str], Numbers],
    uninterrupted: Callable[[str, str], Numbers],
) -> None:
    found, expected = resumed(name, first, then), after(SAVED_AT, uninterrupted(name, "single"))
    assert found.keys() == expected.keys()
    for what, tensor in expected.items():
        torch.testing.assert_close(found[what], tensor, rtol=1e-9, atol=1e-9, msg=what)


@pytest.mark.full_but("pp")
@pytest.mark.parametrize("plan", SAME)
def test_a_run_goes_on_under_its_own_plan_with_the_same_bits(
    plan: str, resumed: Callable[[str, str, str], Numbers], uninterrupted: Callable[[str, str], Numbers]
) -> None:
    found, expected = resumed("tied", plan, plan), after(SAVED_AT, uninterrupted("tied", plan))
    assert found.keys() == expected.keys()
    for what, tensor in expected.items():
        assert torch.equal(found[what], tensor), what


def after(step: int, numbers: Numbers) -> Numbers:
    """Without the figures of the steps up to `step`."""
    past = {f"{what} {number + 1}" for what in ("loss", "grad_norm", "lr") for number in range(step)}
    return {name: tensor for name, tensor in numbers.items() if name not in past}
