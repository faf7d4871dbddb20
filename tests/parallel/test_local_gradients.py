"""Gradients that no other rank adds to, which autograd adds up by itself: against plain loops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import ALL_JOBS
from jobs_pipeline import PIPELINE_JOBS
from jobs_tensor import TENSOR_JOBS
from kept_ranks import KeptRanks
from torch import nn
from torch.utils.checkpoint import checkpoint

from evenly.errors import RunError
from evenly.parallel.data import buckets
from evenly.parallel.data.local_gradients import LocalGradients
from evenly.plan import parse_plan
from evenly.torch_private import has_accumulated_hooks
from evenly.verify.compare import RankComparison, judge
from evenly.verify.ranks import compare_job, keep_reference

JOBS = {**PIPELINE_JOBS, **TENSOR_JOBS, **ALL_JOBS}
STEPS = 5


@pytest.fixture(params=[0, 20, buckets.SMALL], autouse=True)
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most elements of a parameter that has its place in a bucket: none here, some or all."""
    monkeypatch.setattr(buckets, "SMALL", request.param)
    return request.param


class Odd(nn.Module):
    """Of several sizes and types; one lies in memory otherwise than its shape, some are used now and then or never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 7, dtype=torch.float64)
        self.turned = nn.Parameter(torch.randn(5, 7, dtype=torch.float64).T)
        self.short = nn.Parameter(torch.randn(4, 1, dtype=torch.float64)[:, :1].T)
        self.single = nn.Parameter(torch.randn(5))
        self.sometimes = nn.Parameter(torch.ones(2, 5, dtype=torch.float64))
        self.never = nn.Parameter(torch.ones(30, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x)) @ self.turned * self.single.double() + self.short.sum()
        return h * self.sometimes.sum(0) if len(x) % 2 else h


def losses(model: nn.Module, how: str) -> list[Callable[[], torch.Tensor]]:
    """Of microbatches of uneven sizes; how: what goes through the model how often in one backward."""
    xs = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (4, 2, 1, 6)]

    def loss(x: torch.Tensor) -> torch.Tensor:
        if how == "once":
            return model(x).square().sum()
        again: Any = checkpoint(model, x * 0.5, use_reentrant=how == "reentrant")
        return (model(x) + again).square().sum()

    return [lambda x=x: loss(x) for x in xs]


def step(total: LocalGradients, microbatches: list[Callable[[], torch.Tensor]]) -> None:
    total.begin(numbers=3, rounds=len(microbatches))
    for number, loss in enumerate(microbatches):
        if number == len(microbatches) - 1:
            total.expect_last()
        loss().backward()
        total.finish_backward()
    total.start_reduce([1.0, 2.0, 3.0])
    assert total.finish_reduce() == [1.0, 2.0, 3.0]


def by_loop(model: nn.Module, microbatches: list[Callable[[], torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The sums of gradients, by name."""
    model.zero_grad()
    for loss in microbatches:
        loss().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def gradients(total: LocalGradients) -> dict[str, torch.Tensor]:
    return {name: gradient for name, gradient in total.named_gradients() if gradient is not None}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        tolerance = 1e-12 if gradient.dtype is torch.float64 else 1e-5
        torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("how", ["once", "twice", "reentrant"])
def test_the_sums_and_their_norm_are_those_of_a_loop(how: str) -> None:
    model = Odd()
    total = LocalGradients(model)
    for _ in range(3):  # no step sees the one before
        microbatches = losses(model, how)[: 4 if _ < 2 else 2]
        expected = by_loop(model, microbatches)
        step(total, microbatches)
        assert total.used() == expected.keys() and "never" not in expected
        assert_same(gradients(total), expected)
        norm = torch.linalg.vector_norm(torch.cat([one.double().flatten() for one in expected.values()]))
        assert float(total.norm()) == pytest.approx(float(norm), rel=1e-6)
        assert total.exact_norm() == pytest.approx(float(norm), rel=1e-6)
        total.divide(7.0)
        total.scale(0.5)
        assert_same(gradients(total), {name: one / 14 for name, one in expected.items()})
    assert {name for name, p in model.named_parameters() if p.grad is None} == {"never", "sometimes"}
    assert not any(has_accumulated_hooks(p) for p in model.parameters())


def test_what_was_a_gradient_before_counts_for_nothing(small: int) -> None:
    """Of a step that dropped a parameter, and of one that used another."""
    model = Odd()
    total = LocalGradients(model)
    microbatches = losses(model, "once")
    step(total, microbatches)
    expected = by_loop(model, microbatches[:1])
    total.drop(frozenset({"first.bias", "turned"}))
    step(total, microbatches[:1])
    assert_same(gradients(total), {n: one for n, one in expected.items() if n not in ("first.bias", "turned")})
    norm = sum(one.double().square().sum() for n, one in expected.items() if n not in ("first.bias", "turned"))
    assert float(total.norm()) == pytest.approx(float(norm) ** 0.5, rel=1e-6)
    total.drop(frozenset())
    step(total, microbatches[:1])
    assert_same(gradients(total), expected)


def test_what_a_backward_has_put_in_place_of_a_sum_is_the_sum() -> None:
    model = Odd()
    total = LocalGradients(model)
    total.begin()
    for factor in (1.0, 10.0):
        now = model.first.bias.grad
        more = torch.full((7,), factor, dtype=torch.float64)
        model.first.bias.grad = more if now is None else now + more
        total.finish_backward()
    total.start_reduce()
    total.finish_reduce()
    assert gradients(total)["first.bias"].tolist() == [11.0] * 7
    assert float(total.norm()) == pytest.approx(11 * 7**0.5)


def test_a_step_without_a_backward_leaves_no_gradient() -> None:
    model = Odd()
    total = LocalGradients(model)
    step(total, losses(model, "once"))
    total.begin()
    total.start_reduce()
    assert total.finish_reduce() == [] and total.used() == set()
    total.divide(2.0)
    assert float(total.norm()) == 0 and all(p.grad is None for p in model.parameters())


def test_what_another_rank_has_used_has_zeros_and_sums_of_earlier_passes_are_added() -> None:
    model = Odd()
    total = LocalGradients(model)
    microbatches = losses(model, "once")[:2]
    expected = by_loop(model, microbatches)
    total.begin()
    for loss in microbatches:
        loss().backward()
        total.finish_backward()
    total.mark_used({"never", "turned"})
    total.start_reduce()
    total.finish_reduce()
    expected["never"] = torch.zeros(30, dtype=torch.float64)
    assert_same(gradients(total), expected)
    earlier = {"sometimes": torch.full((2, 5), 3.0, dtype=torch.float64), "turned": expected["turned"].clone()}
    total.add(earlier)
    total.scale(2.0)
    expected |= {"sometimes": earlier["sometimes"], "turned": 2 * expected["turned"]}
    assert_same(gradients(total), {name: 2 * one for name, one in expected.items()})
    assert earlier["sometimes"].max() == 3.0  # they are the caller's


def test_the_first_gradient_becomes_the_sum_and_takes_memory_from_then_on() -> None:
    model = nn.ParameterList(nn.Parameter(torch.randn(300, 200)) for _ in range(3))
    total = LocalGradients(model)
    total.begin()
    assert all(p.grad is None for p in model)
    for factor in (1.0, 2.0):
        sum((p.square().sum() * factor for p in model), start=torch.zeros(())).backward()
        total.finish_backward()
        if factor == 1.0:
            first = [p.grad for p in model]
    total.start_reduce()
    total.finish_reduce()
    total.divide(3.0)
    assert all(p.grad is one for p, one in zip(model, first, strict=True))
    assert_same(gradients(total), {str(number): 2 * p.detach() for number, p in enumerate(model)})


def test_gradients_that_a_loop_would_not_have_are_refused() -> None:
    model = Odd()
    total = LocalGradients(model)
    total.begin()
    losses(model, "once")[0]().backward()
    model.first.weight.data, model.first.weight.grad = model.first.weight.data.float(), None
    model.first.weight.sum().backward()
    with pytest.raises(RunError, match=r"first\.weight\n.*the forward has changed its type"):
        total.start_reduce()


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    total = LocalGradients(model)
    total.begin()
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RunError, match="use dense gradients"):
        total.start_reduce()


def test_a_parameter_that_was_frozen_is_refused() -> None:
    model = Odd()
    model.never.requires_grad_(False)
    total = LocalGradients(model)
    total.begin()
    model.never.requires_grad_(True)
    with pytest.raises(RunError, match="never was frozen"):
        total.start_reduce()


@pytest.mark.parametrize(
    ("plan", "devices", "local"),
    [
        ("single", 1, True),
        ("single recompute=full", 1, True),
        ("single exact=bitwise", 1, False),
        ("single offload=optimizer", 1, True),
        ("ddp", 2, False),
        ("zero1", 2, False),
        ("data=1 zero=3", 1, True),  # is the same
        ("data=1 zero=3 offload=parameters", 1, False),
        ("balanced-dp replicas=2", 2, False),
        ("tensor=2", 2, True),
        ("tensor=2", 4, False),
        ("pipeline=2", 2, True),
        ("pipeline=2", 4, False),
        ("pipeline=2 schedule=interleaved", 2, True),
        ("pipeline=2 schedule=zero-bubble", 2, False),  # a backward in parts writes to `grad` what others share
        ("pipeline=2 schedule=zero-bubble recompute=full", 2, True),
    ],
)
def test_autograd_adds_up_where_nobody_else_does(plan: str, devices: int, local: bool) -> None:
    assert parse_plan(plan).fit(devices).complete("float32").sums_locally is local


def reference(name: str, folder: Path) -> None:
    keep_reference(JOBS[name](precision="float64"), STEPS, folder / "reference")


def compare(name: str, plan: str, folder: Path, small: int) -> RankComparison:
    """As `compare_job`, with so many elements of a small gradient."""
    before, buckets.SMALL = buckets.SMALL, small
    try:
        return compare_job(JOBS[name](precision="float64"), plan, STEPS, folder)
    finally:
        buckets.SMALL = before


# job, plan: ranks. Parameters that are not used, that several stages share, that are parts, that some microbatches use.
COMPARED = [
    ("classifier", "single", 1),
    ("language", "single offload=optimizer", 1),
    ("tower", "single recompute=full", 1),
    ("tied", "pipeline=2", 2),
    ("tied", "pipeline=2 schedule=zero-bubble", 2),
    ("experts", "pipeline=2 schedule=interleaved", 2),
    ("ragged", "pipeline=2 schedule=gpipe", 2),
    ("heads", "tensor=2", 2),
    ("heads", "data=1 tensor=2 pipeline=2", 4),
]


@pytest.mark.full_but(
    "20-classifier-*",
    "20-language-*",
    "20-tower-*",
    "20-tied-pipeline=2 schedule*",
    "20-heads-tensor=2-*",
    "0-classifier-*",
    "16384-classifier-*",
)
@pytest.mark.parametrize(("name", "plan", "size"), COMPARED)
def test_plans_have_the_numbers_of_one_device(
    name: str, plan: str, size: int, small: int, ranks: KeptRanks, tmp_path: Path
) -> None:
    if small > 20:
        pytest.skip("as in tests/verify, whose jobs are small")
    ranks.run(reference, name, tmp_path, size=1)
    row = judge(plan, ranks.run(compare, name, plan, tmp_path, small, size=size))
    assert (row.status, row.reason) == ("equal", "")
    assert row.param_diff is not None and row.param_diff < 1e-11
