"""Blocks that compute twice: whose, undone when, and what must not happen twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import InPlace, Tower, Unlike, classifier_job
from kept_ranks import KeptRanks
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import evenly
from evenly.errors import PlanError, RunError
from evenly.model.blocks import find_blocks, find_recomputed
from evenly.parallel.core.calls import WrappedForwards
from evenly.parallel.core.recompute import recomputing
from evenly.verify.compare import RankComparison, judge
from evenly.verify.ranks import compare_job, keep_measured_reference, keep_reference


def test_recomputation_needs_blocks_and_is_undone() -> None:
    with pytest.raises(PlanError, match="no repeated blocks"):
        WrappedForwards([], [recomputing(selective=False)], asked="recompute=full")
    model = Tower()
    forwards = WrappedForwards(find_blocks(model), [recomputing(selective=True)], asked="recompute=selective")
    assert all("forward" in vars(block) for block in model.blocks)
    forwards.close()
    assert not any("forward" in vars(block) for block in model.blocks)


@pytest.mark.parametrize("plan", ["zero3 recompute=full", "ddp recompute=selective"])
def test_where_nothing_repeats_children_are_computed_anew(plan: str, ranks: KeptRanks, tmp_path: Path) -> None:
    model = Unlike()
    assert [part.name for part in find_recomputed(model, find_blocks(model))] == ["first", "read", "decide"]
    keep_reference(unlike_job(), 3, tmp_path / "reference")
    times, rows = zip(*ranks.run(compare_unlike, plan, tmp_path, size=2), strict=True)
    row = judge(plan, rows)
    assert (row.status, row.reason) == ("equal", "")
    assert row.param_diff is not None and row.param_diff < 1e-11
    assert all(count > 0 for count in times)


def unlike_job() -> evenly.Job:
    return classifier_job(model=Unlike, precision="float64")


def compare_unlike(plan: str, folder: Path) -> tuple[int, RankComparison]:
    """The trace, and how often `read` ran within a backward."""
    times, forward = 0, nn.LSTM.forward

    def counted(*arguments: Any) -> Any:
        nonlocal times
        times += torch._C._current_graph_task_id() != -1
        return forward(*arguments)

    nn.LSTM.forward = counted
    try:
        trace = compare_job(unlike_job(), plan, 3, folder)
    finally:
        nn.LSTM.forward = forward
    return times, trace


def test_a_product_that_is_changed_in_place_cannot_be_kept() -> None:
    job = classifier_job(model=InPlace)
    with (
        evenly.start(job, plan="single recompute=selective") as run,
        pytest.raises(PlanError, match="changes the result of a matrix product in place"),
    ):
        run.step(next(run.batches()))
    with evenly.start(job, plan="single recompute=full") as run:
        run.step(next(run.batches()))


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2))


def gpt2_job(**call: Any) -> evenly.Job:
    def loss(model: nn.Module, tokens: torch.Tensor) -> evenly.Loss:
        logits = model(input_ids=tokens[:, :-1], **call).logits.flatten(0, 1)
        labels = tokens[:, 1:].flatten()
        return evenly.Loss(nn.functional.cross_entropy(logits, labels, reduction="sum"), len(labels))

    rows: Any = torch.randint(0, 11, (24, 8), generator=torch.Generator().manual_seed(0))
    return classifier_job(model=gpt2, loss=loss, data=rows, collate=torch.stack, eval_data=None, precision="float64")


@pytest.mark.full_but("full")
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_keys_are_not_cached_twice(mode: str, ranks: KeptRanks, tmp_path: Path) -> None:
    ranks.run(keys_are_cached_once, mode, tmp_path, size=1)


def keys_are_cached_once(mode: str, tmp_path: Path) -> None:
    keep_reference(gpt2_job(), 2, tmp_path / "reference")
    row = judge(mode, [compare_job(gpt2_job(), f"single recompute={mode}", 2, tmp_path)])
    assert (row.status, row.reason) == ("equal", "")
    assert row.param_diff is not None and row.param_diff < 1e-11
    with evenly.start(gpt2_job(), plan=f"single recompute={mode}") as run:
        given: list[Any] = []
        find_blocks(run.model)[0].module.register_forward_pre_hook(lambda _, arguments: given.extend(arguments))
        run.step(next(run.batches()))
        assert given and not any(hasattr(argument, "get_seq_length") for argument in given)
        assert run.model.config.use_cache is False
        run.composed.close()
        assert run.model.config.use_cache is True


def test_a_cache_that_is_asked_for_is_refused() -> None:
    with (
        evenly.start(gpt2_job(use_cache=True), plan="single recompute=full") as run,
        pytest.raises(RunError, match=r"given a DynamicCache"),
    ):
        run.step(next(run.batches()))


class Twice(nn.Module):
    """Calls its first block a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(x)


def test_a_weight_that_is_cast_once_and_used_twice_is_refused_or_recomputed_in_full(tmp_path: Path) -> None:
    job = classifier_job(model=Twice, precision="bfloat16")
    with (
        evenly.start(job, plan="single recompute=selective") as run,
        pytest.raises(PlanError, match="uses a weight twice and casts it once, say"),
    ):
        run.step(next(run.batches()))
    keep_measured_reference(job, 3, tmp_path, ["sums"])
    row = judge("full", [compare_job(job, "single recompute=full", 3, tmp_path)])
    assert (row.status, row.reason) == ("equal", "")


class Annealed(nn.Module):
    """A block whose forward follows from how often it has run, and from which turn it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.turn = nn.Linear(5, 5), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.times = getattr(self, "times", 0) + 1
        self.turn = not self.turn
        return x + torch.tanh(self.layer(x)) * 0.9**self.times * (1 if self.turn else -1)


class Annealing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Annealed() for _ in range(3)), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("plan", ["single recompute=full", "single recompute=selective"])
def test_what_a_forward_counts_is_as_it_was_where_it_is_repeated(plan: str, tmp_path: Path) -> None:
    job = classifier_job(model=Annealing, precision="float64")
    keep_reference(job, 3, tmp_path / "reference")
    row = judge(plan, [compare_job(job, plan, 3, tmp_path)])
    assert (row.status, row.reason) == ("equal", "")
    assert row.param_diff is not None and row.param_diff < 1e-11


SHARED = torch.Generator().manual_seed(3)
DRAWS: dict[str, Callable[[], Callable[..., Any]]] = {
    "torch": lambda: partial(torch.rand, (), generator=torch.Generator().manual_seed(3)),
    "one of all blocks": lambda: lambda: torch.rand((), generator=SHARED),
    "random": lambda: random.Random(3).gauss,
    "random, in C": lambda: random.Random(3).random,
    "numpy": lambda: np.random.default_rng(3).random,
    "numpy, as it was": lambda: np.random.RandomState(3).standard_normal,
    "given": lambda: lambda generator: torch.rand((), generator=generator),
}


class DrawingBlock(nn.Module):
    """Has a generator of its own, or is given one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(5, 5), DRAWS[kind]()

    def forward(self, x: torch.Tensor, *given: torch.Generator) -> torch.Tensor:
        noise = torch.as_tensor(self.draw(*given), dtype=x.dtype) if self.training else 0.5
        return x + torch.tanh(self.layer(x * noise))


class DrawingModel(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(DrawingBlock(kind) for _ in range(3)), nn.Linear(5, 3)
        self.given = [torch.Generator().manual_seed(3)] if kind == "given" else []
        SHARED.manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = block(x, *self.given)
        return self.head(x)


@pytest.mark.parametrize("kind", DRAWS)
def test_generators_of_the_job_s_own_draw_the_same_where_a_forward_is_repeated(kind: str, tmp_path: Path) -> None:
    job = classifier_job(model=partial(DrawingModel, kind), precision="float64")
    keep_reference(job, 3, tmp_path / "reference")
    row = judge("full", [compare_job(job, "single recompute=full", 3, tmp_path)])
    assert (row.status, row.reason) == ("equal", "")
    assert row.param_diff is not None and row.param_diff < 1e-11
