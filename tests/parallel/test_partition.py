"""Pieces of parameters, gradients and state on ranks that hold whole parameters (ZeRO 1 and 2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Points, classifier_job
from kept_ranks import KeptRanks
from torch import nn
from torch.nn import functional as F

import evenly
from evenly.errors import RunError
from evenly.parallel.data.row_layout import RowLayout
from evenly.verify.compare import RankComparison, judge
from evenly.verify.ranks import compare_job, keep_reference

STEPS = 4


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_pieces_are_those_of_torch_and_join_to_the_whole(ranks: int) -> None:
    shapes = [(7, 3), (1, 4), (0, 2), (6,), (5, 2, 2), (4, 0)]
    offset, places = 0, []
    for shape in shapes:
        places.append(RowLayout.of(shape, ranks, offset))
        offset += places[-1].length
    tensors = [torch.randn(shape) for shape in shapes]
    tensors[0] = torch.randn(3, 7).t()  # any strides
    packed = torch.full((ranks, offset), torch.nan)
    for place, tensor in zip(places, tensors, strict=True):
        place.pack(tensor, packed)
    assert not packed.isnan().any()  # what is no row is zero
    for place, tensor in zip(places, tensors, strict=True):
        expected = [*tensor.chunk(ranks), *[tensor[:0]] * ranks][:ranks] if len(tensor) else [tensor] * ranks
        for rank in range(ranks):
            assert torch.equal(place.piece(packed[rank], rank), expected[rank])
            assert torch.equal(tensor[place.own(rank)], expected[rank])
        again = torch.full_like(tensor, torch.nan)
        place.unpack(packed, again)
        assert torch.equal(again, tensor)
    places[0].pack(None, packed)
    assert packed[:, : places[0].length].eq(0).all()


class Odd(nn.Module):
    """What sharding by modules has trouble with: no dims, fewer rows than ranks, ties, a way around `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight
        self.temperature = nn.Parameter(torch.tensor(1.3))
        self.row = nn.Parameter(torch.randn(1, 5))
        self.rare, self.never = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(3, 5))
        self.head = nn.Linear(5, 3)
        self.fixed = nn.Linear(5, 5).requires_grad_(False)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(self.fixed(x))) * self.row
        if len(x) < 3:  # in the last microbatch of a batch only
            x = x * self.rare
        return self.head(x) * self.temperature


def loss(model: nn.Module, batch: Any) -> evenly.Loss:
    x, y = batch
    assert isinstance(model, Odd)
    return evenly.Loss(F.cross_entropy(model.scores(x), y, reduction="sum"), len(y))


def job() -> evenly.Job:
    return classifier_job(model=Odd, loss=loss, data=Points(37), eval_data=Points(11, seed=1), precision="float64")


def compare(plan: str, folder: Path) -> RankComparison:
    return compare_job(job(), plan, STEPS, folder)


@pytest.mark.parametrize(("plan", "size"), [("zero1", 3), ("zero2", 3), ("zero1 shard=2", 4), ("zero2 shard=2", 4)])
def test_any_model_is_equal_in_pieces(plan: str, size: int, ranks: KeptRanks, tmp_path: Path) -> None:
    keep_reference(job(), STEPS, tmp_path / "reference")
    row = judge(plan, ranks.run(compare, plan, tmp_path, size=size))
    assert (row.status, row.reason) == ("equal", "")
    assert row.param_diff is not None and row.param_diff < 1e-11
    assert row.sharded is not None and row.sharded > 0.5


def change(plan: str, what: str) -> str:
    with evenly.start(job() if what == "moved" else classifier_job(), plan=plan) as run:
        batches = run.batches()
        run.step(next(batches))
        if what == "moved":
            run.model.head.weight.data = run.model.head.weight.data.clone()
        else:
            run.model.frozen.requires_grad_(True)
        try:
            run.step(next(batches))
        except RunError as problem:
            return str(problem)
    return "nothing"


@pytest.mark.parametrize(
    ("plan", "what", "said"),
    [
        ("zero1", "moved", ["stepping head.weight", "its memory has moved"]),
        ("zero2", "thawed", ["parameter frozen", "now requires a gradient"]),
        ("zero3", "thawed", ["parameter frozen", "now requires a gradient"]),
    ],
)
def test_what_is_changed_midway_is_found(plan: str, what: str, said: list[str], ranks: KeptRanks) -> None:
    for text in ranks.run(change, plan, what, size=2):
        assert all(part in text for part in said)
