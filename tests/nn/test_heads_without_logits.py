"""Jobs whose loss is that of a head without its logits, under every kind of plan, held against one device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs_tensor import HeadsBlock, Sentences, adam, pad, warm_up
from kept_ranks import KeptRanks
from kept_references import References
from torch import nn

import evenly
from evenly.nn import losses
from evenly.torch_private import TorchDispatchMode, without_subclasses
from evenly.verify.compare import RankComparison, judge
from evenly.verify.ranks import compare_job, keep_measured_reference, keep_reference

STEPS = 4  # the last has the short batch of the epoch
TOKENS, WIDTH = 37, 32  # so many tokens are dealt unevenly


class Decoder(nn.Module):
    """Returns hidden states, or with labels the sum of its losses; the head is the embedding's weight if `tied`."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tok, self.place = nn.Embedding(TOKENS, WIDTH), nn.Parameter(0.1 * torch.randn(17, WIDTH))
        self.blocks = nn.ModuleList(HeadsBlock(4) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=not tied)
        if tied:
            self.head.weight = self.tok.weight
            nn.init.normal_(self.tok.weight, std=0.1)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.tok(tokens) + self.place[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return x if labels is None else total(x, self.head, labels)


def total(hidden: torch.Tensor, head: Any, labels: torch.Tensor) -> torch.Tensor:
    return evenly.nn.linear_cross_entropy(hidden, head.weight, labels, bias=head.bias, reduction="sum")


def outside(model: Any, batch: Any) -> evenly.Loss:
    """The loss reads the weight of a head that the model's forward does not call."""
    found = total(model(batch["inputs"]), model.head, batch["labels"])
    return evenly.Loss(found, (batch["labels"] != -100).sum())


def inside(model: Any, batch: Any) -> evenly.Loss:
    return evenly.Loss(model(batch["inputs"], batch["labels"]), (batch["labels"] != -100).sum())


def each(model: Any, batch: Any) -> evenly.Loss:
    """Every token has a weight of its own."""
    hidden, labels = model(batch["inputs"]), batch["labels"]
    found = evenly.nn.linear_cross_entropy(hidden, model.head.weight, labels, bias=model.head.bias, reduction="none")
    weights = torch.linspace(0.5, 1.5, labels.shape[1], dtype=found.dtype, device=found.device) * (labels != -100)
    return evenly.Loss((found * weights).sum(), weights.sum())


LOSSES = {"outside": outside, "inside": inside, "each": each}


def prepared(name: str, **changes: Any) -> evenly.Job:
    """name: of the loss, and whether the head is tied."""
    losses.LEAST_LOGITS = losses.LEAST_ROWS = 1  # chunks of as many rows as the head is wide, here and on the ranks
    kind, _, tied = name.partition(" ")
    fields: dict[str, Any] = dict(
        model=lambda: Decoder(bool(tied)), loss=LOSSES[kind], data=Sentences(41, tokens=TOKENS), collate=pad,
        eval_data=Sentences(9, seed=1, tokens=TOKENS), optimizer=adam, global_batch=12, microbatch=4, steps=6,
        clip_norm=0.7, schedule=warm_up, precision="float64",
    )  # fmt: skip
    return evenly.Job(**{**fields, **changes})


@pytest.fixture(autouse=True)
def _chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What `prepared` sets is put back in this process."""
    for name in ("LEAST_LOGITS", "LEAST_ROWS"):
        monkeypatch.setattr(losses, name, getattr(losses, name))
    yield


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory, prepared, STEPS)


def compared(name: str, plan: str, folder: Path) -> RankComparison:
    return compare_job(prepared(name), plan, STEPS, folder)


PLANS = {
    "ddp": 2,
    "zero2": 2,
    "zero3": 2,
    "tensor=2": 2,
    "tensor=2 sequence_parallel=on": 2,
    "pipeline=2": 2,
    "zero3 recompute=full": 2,
    "data=2 tensor=2 zero=3": 4,
}


@pytest.mark.parametrize("name", ["outside", "inside tied"])
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_computes_what_one_device_does(
    name: str, plan: str, references: References, ranks: KeptRanks
) -> None:
    row = judge(plan, ranks.run(compared, name, plan, references(name), size=PLANS[plan]))
    assert row.status == "equal", row.reason
    assert row.param_diff is not None and row.param_diff < 1e-11


@pytest.mark.parametrize(
    ("name", "plan", "size"),
    [
        ("each", "zero3", 2),
        ("each tied", "tensor=2", 2),
        ("each", "tensor=2 recompute=full", 2),
        ("each tied", "pipeline=2", 2),
        ("inside", "tensor=3", 3),
        ("outside tied", "data=2 tensor=2 pipeline=2", 8),
    ],
)
def test_so_does_a_loss_per_token(name: str, plan: str, size: int, references: References, ranks: KeptRanks) -> None:
    row = judge(plan, ranks.run(compared, name, plan, references(name), size=size))
    assert row.status == "equal", row.reason
    assert row.param_diff is not None and row.param_diff < 1e-11


@pytest.mark.parametrize("name", ["outside", "each tied"])
def test_the_vocabulary_is_what_the_tensor_axis_splits(name: str, ranks: KeptRanks) -> None:
    found = ranks.run(split_rows, name)
    assert found == [found[0]] * 2 and {*found[0].values()} == {(0, (19, 18))}
    assert {*found[0]} == ({"tok.weight"} if "tied" in name else {"tok.weight", "head.weight", "head.bias"})


def split_rows(name: str) -> dict[str, tuple[int, tuple[int, ...]]]:
    """The dim of embedding and head that is split, and how many rows each rank has."""
    with evenly.start(prepared(name), plan="tensor=2", steps=1) as run:
        assert run.composed.tensor is not None
        layouts = run.composed.tensor.layouts
        return {of: (one.dim, tuple(one.sizes)) for of, one in layouts.items() if of.startswith(("tok", "head"))}


def test_no_rank_has_the_logits_of_anothers_classes(ranks: KeptRanks) -> None:
    for rows, seen in zip((19, 18), ranks.run(widths_of_products, "inside tied"), strict=True):
        assert rows in seen and TOKENS not in seen


def widths_of_products(name: str) -> set[int]:
    """How many columns products of hidden states have here."""
    seen: set[int] = set()

    class Widths(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with without_subclasses():
                if func.overloadpacket is torch.ops.aten.mm and args[0].shape[1] == WIDTH:
                    seen.add(args[1].shape[1])
                return func(*args, **(kwargs or {}))

    with evenly.start(prepared(name), plan="tensor=2", steps=1) as run, Widths():
        for batch in run.batches():
            run.step(batch)
    return seen


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_bits_are_those_of_one_device(precision: str, tmp_path: Path, ranks: KeptRanks) -> None:
    ranks.run(kept, precision, tmp_path, size=1)
    for size in (1, 2, 3):
        row = judge("ddp", ranks.run(compared_in_bits, precision, tmp_path, size=size))
        assert row.bits_differ == 0


def kept(precision: Any, folder: Path) -> None:
    keep_reference(prepared("outside", precision=precision), STEPS, folder / "reference")


def compared_in_bits(precision: Any, folder: Path) -> RankComparison:
    return compare_job(prepared("outside", precision=precision), "ddp exact=bitwise", STEPS, folder)


@pytest.mark.parametrize("precision", ["bfloat16", "pure-bfloat16"])
@pytest.mark.parametrize("plan", ["ddp", "tensor=2"])
def test_sixteen_bits_agree_up_to_rounding(precision: str, plan: str, tmp_path: Path, ranks: KeptRanks) -> None:
    keep_measured_reference(prepared("inside", precision=precision), STEPS, tmp_path, ["forward"])
    row = judge(plan, ranks.run(compared_in_sixteen_bits, plan, precision, tmp_path))
    assert row.status in ("equal", "rounding"), row.reason


def compared_in_sixteen_bits(plan: str, precision: str, folder: Path) -> RankComparison:
    return compare_job(prepared("inside", precision=precision), plan, STEPS, folder, "forward")
