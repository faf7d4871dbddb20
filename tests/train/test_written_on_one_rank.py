"""Cut tensors that one rank saves, prints or hands to numpy: whole within `run.whole_parameters()`, else refused."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kept_ranks import KeptRanks
from torch import nn

import evenly
from evenly.errors import RunError

PLANS = ["single", "ddp", "zero1", "zero2", "zero3", "tensor=2", "tensor=2 zero=3 data=2"]
SHAPE = (6, 8)


def saved(value: Any) -> Any:
    torch.save(value, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "torch.save of a state_dict": lambda model: saved(model.state_dict())["0.weight"],
    "torch.save of a parameter": lambda model: saved(model[0].weight),
    "pickle": lambda model: pickle.loads(pickle.dumps(model[0].weight)),
    "numpy": lambda model: torch.from_numpy(model[0].weight.detach().numpy()),
    "np.asarray": lambda model: torch.from_numpy(np.asarray(model.state_dict()["0.weight"])),
    "repr": lambda model: torch.tensor(float("tensor([[" in repr(model[0].weight))),
}


def job_of() -> evenly.Job:
    draw = torch.Generator().manual_seed(3)
    x, y = torch.randn(16, 8, generator=draw), torch.randn(16, 6, generator=draw)
    return evenly.Job(
        model=lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 6)),
        data=torch.utils.data.TensorDataset(x, y), loss=lambda model, b: nn.functional.mse_loss(model(b[0]), b[1]),
        optimizer=lambda p: torch.optim.SGD(p, 0.1), global_batch=8, microbatch=4, steps=1, precision="float64",
    )  # fmt: skip


def written(plan: str) -> list[tuple[str, str, Any, Any]]:
    """(way, what it says outside, what it gives within, the weight) of the main rank, alone."""
    found: list[tuple[str, str, Any, Any]] = []
    with evenly.start(job_of(), plan=plan) as run:
        for batch in run.batches():
            run.step(batch)
        model: Any = run.model
        whole = run.composed.full_view("0.weight", model[0].weight.detach()).clone()
        whole = whole.cpu() if plan == "single" else torch.zeros(SHAPE, dtype=whole.dtype).copy_(whole)
        for way, write in WAYS.items() if run.is_main else ():
            try:
                write(model)
                words = ""
            except RunError as problem:
                words = str(problem)
            found.append((way, words, None, None))
        with run.whole_parameters():
            for number, (_, write) in enumerate(WAYS.items() if run.is_main else ()):
                found[number] = (*found[number][:2], np.array(write(model).detach()), np.array(whole))
            print_of_module = repr(model)
        assert "Linear(in_features=8, out_features=6, bias=True)" in print_of_module
    return found


@pytest.mark.parametrize("plan", [pytest.param(p, marks=pytest.mark.full) if p != "zero3" else p for p in PLANS])
def test_one_rank_writes_what_all_have_gathered(plan: str, ranks: KeptRanks) -> None:
    size = 1 if plan == "single" else 4 if "data" in plan else 2
    found = ranks.run(written, plan, size=size)
    assert len(found[0]) == len(WAYS)
    for way, words, value, whole in found[0]:
        if "tensor" in plan or "3" in plan:
            assert "cut over ranks" in words and "`with run.whole_parameters():` on all ranks" in words, way
            assert "`evenly export`" in words, way
        else:
            assert words == "", way
        if way == "repr":
            assert value == 1
        else:
            assert value.shape == SHAPE and (value == whole).all(), way


def inferred(plan: str) -> str:
    with evenly.start(job_of(), plan=plan) as run:
        for batch in run.batches():
            run.step(batch)
        try:
            with torch.inference_mode():
                run.model(torch.ones(2, 8, dtype=torch.float64))
        except RunError as problem:
            return str(problem)
    return ""


@pytest.mark.full
@pytest.mark.parametrize("plan", ["ddp", "zero2", "zero3", "tensor=2"])
def test_inference_mode_around_a_call(plan: str, ranks: KeptRanks) -> None:
    for words in ranks.run(inferred, plan):
        assert ("torch.inference_mode() under zero3" in words and "use torch.no_grad()" in words) == (plan == "zero3")
