"""The loss of a head without its logits, held against `linear` and `cross_entropy` of torch on one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evenly
from evenly.errors import RunError, UserError
from evenly.nn import losses
from evenly.parallel.core.memory import MemoryCounter
from evenly.planner.profile_recorder import profile_module

T = torch.Tensor
TYPES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As many rows as the head is wide: 5 here, of 3 x 11."""
    monkeypatch.setattr(losses, "LEAST_LOGITS", 1)
    monkeypatch.setattr(losses, "LEAST_ROWS", 1)
    yield


def given(dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (3, 11), classes: int = 23) -> list[T]:
    """Hidden states of width 5, weight, bias, targets of which a third does not count."""
    draw = torch.Generator().manual_seed(3)
    hidden, weight, bias = (
        torch.randn(size, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for size in ((*shape, 5), (classes, 5), (classes,))
    )
    targets = torch.randint(0, classes, shape, generator=draw)
    return [hidden, weight, bias, targets.masked_fill(torch.rand(shape, generator=draw) < 0.3, -100)]


def by_torch(hidden: T, weight: T, bias: T | None, targets: T, **options: Any) -> T:
    logits = F.linear(hidden, weight, bias)
    found = F.cross_entropy(logits.reshape(-1, len(weight)), targets.flatten(), **options)
    return found.view(targets.shape) if options["reduction"] == "none" else found


def by_chunks(hidden: T, weight: T, bias: T | None, targets: T, **options: Any) -> T:
    return evenly.nn.linear_cross_entropy(hidden, weight, targets, bias=bias, **options)


def found_by(function: Any, tensors: list[Any], autocast: torch.dtype | None = None, **options: Any) -> list[T]:
    """Loss and gradients, of what is computed of twice the hidden states, of a loss that is scaled."""
    hidden, weight, bias, targets = tensors
    with nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast):
        loss = function(hidden * 2, weight, bias, targets, **options)
    scale = torch.linspace(0.5, 1.5, loss.numel(), dtype=torch.float64).view(loss.shape).to(loss.dtype) * 3
    leaves = [one for one in (hidden, weight, bias) if one is not None and one.requires_grad]
    return [loss, *torch.autograd.grad((loss * scale).sum(), leaves)]


def differences(mine: list[T], theirs: list[T]) -> float:
    """The largest, relative to the largest element."""
    assert [(one.dtype, one.shape) for one in mine] == [(one.dtype, one.shape) for one in theirs]
    pairs = ((one.detach().double(), other.detach().double()) for one, other in zip(mine, theirs, strict=True))
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(3, 11), (1,), (), (5,), (6,), (4, 2, 5)])
@pytest.mark.parametrize("biased", [True, False])
def test_it_is_the_loss_of_all_logits(reduction: str, shape: tuple[int, ...], biased: bool) -> None:
    tensors: list[Any] = given(shape=shape)
    tensors[2] = tensors[2] if biased else None
    if len(shape) < 2:  # so that something counts
        tensors[3] = tensors[3].clamp(0)
    mine, theirs = (found_by(one, tensors, reduction=reduction) for one in (by_chunks, by_torch))
    assert differences(mine, theirs) < 1e-12


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [*((one, None) for one in TYPES), (torch.float32, torch.bfloat16), (torch.float32, torch.float16)],
)
def test_types_are_those_of_torch(dtype: torch.dtype, autocast: torch.dtype | None, reduction: str) -> None:
    """And sums are no further from those of float64 than torch's, but for a little."""
    tensors = given(dtype)
    exact = [one.detach().double().requires_grad_() if one.is_floating_point() else one for one in tensors]
    mine, theirs = (found_by(one, tensors, autocast, reduction=reduction) for one in (by_chunks, by_torch))
    expected = [
        one.to(own.dtype) for one, own in zip(found_by(by_torch, exact, reduction=reduction), mine, strict=True)
    ]
    rounding = TYPES[autocast or dtype]
    assert differences(mine, expected) < max(2 * differences(theirs, expected), rounding)
    assert differences(mine, theirs) < 2 * rounding


def test_nothing_counts_and_nothing_is_given() -> None:
    hidden, weight, bias, targets = given()
    none = torch.full_like(targets, -100)
    loss, *gradients = found_by(by_chunks, [hidden, weight, bias, none], reduction="sum")
    assert float(loss.detach()) == 0 and not any(one.any() for one in gradients)
    assert by_chunks(hidden, weight, bias, none, reduction="mean").isnan()
    empty = by_chunks(hidden[:, :0], weight, bias, targets[:, :0], reduction="sum")
    assert float(empty.detach()) == 0
    empty.backward()
    assert weight.grad is not None and not weight.grad.any()


def test_another_number_is_ignored() -> None:
    hidden, weight, bias, targets = given()
    tensors = [hidden, weight, bias, targets.clamp(0)]
    mine, theirs = (found_by(one, tensors, ignore_index=7, reduction="mean") for one in (by_chunks, by_torch))
    assert differences(mine, theirs) < 1e-12


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_gradients_are_those_that_are_wanted(frozen: tuple[int, ...]) -> None:
    tensors = given()
    for one in frozen:
        tensors[one].requires_grad_(False)
    mine, theirs = (found_by(one, tensors, reduction="sum") for one in (by_chunks, by_torch))
    assert len(mine) == 4 - len(frozen) and differences(mine, theirs) < 1e-12


def test_a_graph_that_is_kept_has_its_gradients_twice() -> None:
    hidden, weight, bias, targets = given()
    loss = by_chunks(hidden, weight, bias, targets, reduction="sum")
    first = torch.autograd.grad(loss * 3, [hidden, weight, bias], retain_graph=True)
    kept = [one.clone() for one in first]
    second = torch.autograd.grad(loss * 6, [hidden, weight, bias])
    assert differences([one * 2 for one in first], [*second]) < 1e-12
    assert differences([*first], kept) == 0


def test_a_gradient_of_the_gradient_is_refused() -> None:
    hidden, weight, bias, targets = given()
    loss = by_chunks(hidden, weight, bias, targets, reduction="sum")
    with pytest.raises(RunError, match="create_graph"):
        torch.autograd.grad(loss, [hidden], create_graph=True)


def test_under_autocast_other_uses_of_the_weight_keep_their_gradient() -> None:
    hidden, weight, _, targets = given(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        evenly.nn.linear_cross_entropy(hidden.detach(), weight.detach(), targets)
        loss = evenly.nn.linear_cross_entropy(hidden, weight, targets)
        used = F.linear(hidden, weight)
    (gradient,) = torch.autograd.grad(used.float().sum() + 0 * loss, [weight])
    assert gradient.any()


@pytest.mark.parametrize(
    "change",
    [
        {"hidden": torch.zeros(3, 4)},
        {"weight": torch.zeros(5)},
        {"targets": torch.zeros(4, dtype=torch.long)},
        {"targets": torch.zeros(3)},
        {"bias": torch.zeros(2)},
        {"weight": torch.zeros(7, 5, dtype=torch.float64)},
        {"reduction": "total"},
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    fields: dict[str, Any] = dict(hidden=torch.zeros(3, 5), weight=torch.zeros(7, 5), targets=torch.zeros(3).long())
    with pytest.raises(UserError, match=r"evenly.nn.linear_cross_entropy"):
        evenly.nn.linear_cross_entropy(**{**fields, **change})


def test_a_class_that_there_is_not_is_refused() -> None:
    hidden, weight, bias, targets = given()
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        by_chunks(hidden, weight, bias, targets.masked_fill(targets < 0, 23))


# ---------------------------------------------------------------------------------------------------------- chunks
@pytest.mark.parametrize(
    ("rows", "classes", "width"), [(1, 7, 5), (5, 7, 5), (6, 7, 5), (33, 7, 5), (0, 7, 5), (9, 7, 1)]
)
def test_chunks_are_all_rows_in_order(rows: int, classes: int, width: int) -> None:
    chunks = [*losses.chunks_of(rows, classes, width)]
    assert [row for one in chunks for row in range(rows)[one]] == [*range(rows)]
    assert all(one.stop - one.start <= max(width, 1) for one in chunks)


def test_a_chunk_has_as_many_rows_as_the_head_is_wide_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LEAST_LOGITS", 1 << 20)
    monkeypatch.setattr(losses, "LEAST_ROWS", 256)
    sizes = {(8192, 50257, 768): 745, (8192, 128256, 4096): 1024, (1024, 50257, 128): 256, (4096, 256, 256): 4096}
    for (rows, classes, width), size in sizes.items():
        first = next(losses.chunks_of(rows, classes, width))
        assert first.stop == size


# ---------------------------------------------------------------------------------------------------------- memory
ROWS, CLASSES, WIDTH = 512, 997, 32


def peak_of(function: Any, **options: Any) -> float:
    """Bytes at the peak of a forward and a backward, over those of the weight; with it and the hidden states."""
    hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
    weight = torch.randn(CLASSES, WIDTH, requires_grad=True)
    targets = torch.randint(0, CLASSES, (ROWS,))
    with MemoryCounter() as counter:
        loss = function(hidden, weight, None, targets, **options)
        if loss.requires_grad:
            loss.sum().backward()
        del loss
    return counter.peak_bytes() / (4 * CLASSES * WIDTH)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_no_more_logits_are_there_than_a_chunk(reduction: str) -> None:
    """The weight, a chunk of logits, their probabilities, the gradient of the weight; hidden states are half as large.

    All logits are 16 chunks.
    """
    assert 5 < peak_of(by_chunks, reduction=reduction) < 5.2
    assert peak_of(by_torch, reduction=reduction) > 32


def test_without_gradients_none_are_made() -> None:
    with torch.no_grad():
        assert 3.5 < peak_of(by_chunks, reduction="sum") < 3.7


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, hidden: T) -> T:
        return hidden * 1.0


def test_a_prediction_sees_the_lower_peak_and_the_same_products() -> None:
    def predicted(function: Any) -> tuple[float, float]:
        """The peak in units of the weight, and operations of products."""

        def loss(model: Any, batch: T) -> T:
            return function(model(batch), model.head.weight, None, batch[:, 0].long(), reduction="sum")

        profile = profile_module(Head(), loss, torch.zeros(ROWS, WIDTH))
        now, peak = 0, 0
        for one in profile.intervals:
            peak = max(peak, now + one.peak.total)
            now += one.left.total
        works = [work for found in profile.works.values() for work in found]
        return peak / (4 * CLASSES * WIDTH), sum(work.flops * work.times for work in works)

    (mine, products), (theirs, expected) = predicted(by_chunks), predicted(by_torch)
    assert mine < 5 < 32 < theirs
    assert products == expected > 0
