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
from torch.utils._python_dispatch import TorchDispatchMode

import evenly
from evenly.errors import RunError
from evenly.parallel.data.row_layout import RowLayout, RowPacker
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


def layouts_of(shapes: list[tuple[int, ...]], ranks: int) -> list[RowLayout]:
    layouts: list[RowLayout] = []
    for shape in shapes:
        offset = layouts[-1].offset + layouts[-1].length if layouts else 0
        layouts.append(RowLayout.of(shape, ranks, offset))
    return layouts


def nothing_yet(layouts: list[RowLayout], ranks: int, dtype: torch.dtype) -> torch.Tensor:
    """Packed rows of a bucket, which nothing is in."""
    return torch.full((ranks, layouts[-1].offset + layouts[-1].length), torch.nan, dtype=dtype)


# Even for 2 ranks, for 3 and for 5; uneven; fewer rows than ranks; no rows, no elements.
MIXED: list[tuple[int, ...]] = [(6, 3), (10,), (30, 2), (7, 3), (30, 4), (0, 2), (60, 0), (30, 2, 2), (1, 4), (30,)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bucket_is_packed_as_its_parameters_are_one_by_one(ranks: int, dtype: torch.dtype) -> None:
    layouts = layouts_of(MIXED, ranks)
    tensors = [torch.randn(shape) for shape in MIXED]
    tensors[4] = torch.randn(4, 30).t()  # any strides
    given = [None if number == 7 else tensor for number, tensor in enumerate(tensors)]
    expected, packed = nothing_yet(layouts, ranks, dtype), nothing_yet(layouts, ranks, dtype)
    for layout, tensor in zip(layouts, given, strict=True):
        layout.pack(tensor, expected)
    RowPacker(layouts, given, ranks, 0).pack(packed)
    assert not packed.isnan().any()
    assert torch.equal(packed, expected)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_packed_bucket_becomes_its_parameters_again(ranks: int) -> None:
    layouts = layouts_of(MIXED, ranks)
    tensors = [torch.randn(shape) for shape in MIXED]
    packed = nothing_yet(layouts, ranks, torch.float32)
    for rank in range(ranks):  # as ranks gather them
        RowPacker(layouts, tensors, ranks, rank).pack_own(packed[rank])
    again = [torch.full_like(tensor, torch.nan) for tensor in tensors]
    again[4] = torch.full((4, 30), torch.nan).t()
    RowPacker(layouts, again, ranks, 0).unpack(packed)
    for tensor, other in zip(tensors, again, strict=True):
        assert torch.equal(tensor, other)


class Operations(TorchDispatchMode):
    """Counts the operations that write."""

    def __init__(self) -> None:
        super().__init__()
        self.writing: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            self.writing.append(str(func))
        return func(*args, **(kwargs or {}))


def test_parameters_that_all_ranks_have_equal_parts_of_are_copied_in_one_call() -> None:
    shapes: list[tuple[int, ...]] = [(6, 3), (12,)] * 40
    layouts, tensors = layouts_of(shapes, 2), [torch.randn(shape) for shape in shapes]
    packed = nothing_yet(layouts, 2, torch.float32)
    with Operations() as found:
        packer = RowPacker(layouts, tensors, 2, 1)
        packer.pack(packed)
        packer.pack_own(packed[0])
        packer.unpack(packed)
    assert found.writing == ["aten.cat.out", "aten.cat.out", "aten.split_with_sizes_copy.out"]


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


def even_model() -> nn.Module:
    """Two ranks have equally many rows of every parameter."""
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    """Dealt whole to ranks, which may give a parameter other memory meanwhile."""
    return torch.optim.Adafactor(parameters, lr=1e-2)


def stepped(plan: str, moving: bool) -> dict[str, torch.Tensor]:
    """This rank's parameters after a few steps; moving: whether they are given other memory on the way."""
    with evenly.start(classifier_job(model=even_model, optimizer=adafactor), plan=plan) as run:
        for number, batch in enumerate(run.batches()):
            for parameter in run.model.parameters() if moving and number == 2 else ():
                parameter.data = parameter.data.clone()
            run.step(batch)
        return {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}


@pytest.mark.parametrize("plan", ["zero1", "zero2"])
def test_parameters_in_other_memory_are_gathered_there(plan: str, ranks: KeptRanks) -> None:
    expected = ranks.run(stepped, plan, False, size=2)
    for found, left in zip(ranks.run(stepped, plan, True, size=2), expected, strict=True):
        assert found.keys() == left.keys()
        assert all(torch.equal(found[name], left[name]) for name in left)
        assert all(torch.equal(found[name], expected[0][name]) for name in left)
