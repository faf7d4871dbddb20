"""Sums of inputs' gradients under products of weights' gradients: the numbers without, bit for bit, in that order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from jobs_tensor import TENSOR_JOBS
from kept_ranks import KeptRanks
from torch.nn import functional as F

import evenly
from evenly.comm import collectives
from evenly.comm.groups import Group
from evenly.engine import compose
from evenly.parallel.tensor import sums_under_products
from evenly.parallel.tensor.axis import Axis
from evenly.parallel.tensor.sums_under_products import product_under_sum
from evenly.plan import parse_plan

T = torch.Tensor


def product(x: T, weight: T, bias: T | None = None, axis: Axis | None = None) -> T:
    result = product_under_sum(x, weight, bias, axis or Axis(Group.alone(), overlapped=True))
    assert result is not None
    return result


def given(*shape: int, bias: bool = True, dtype: torch.dtype = torch.float64) -> list[Any]:
    """An input, a weight and a bias or None, which require gradients."""
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = [shape, (5, shape[-1]), *[(5,)] * bias]
    found = [torch.randn(*one, dtype=torch.float64, generator=generator).to(dtype) for one in sizes]
    return [*(one.requires_grad_() for one in found), *[None] * (not bias)]


# ------------------------------------------------------------------------------------------------------- numbers
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 3), (2, 7, 3), (2, 3, 7, 3), (3,), (0, 3)])
def test_result_and_gradients_have_the_bits_of_torch_s(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    leaves = given(*shape, bias=bias, dtype=dtype)
    for turned in {False, len(shape) > 2}:
        assert_alike(F.linear, product, leaves, lambda y, turned=turned: (y.mT.contiguous().mT if turned else y).sin())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_autocast_has_them_too(dtype: torch.dtype, bias: bool) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_alike(F.linear, product, given(2, 7, 3, bias=bias, dtype=dtype), torch.sin)


def assert_alike(
    expected: Callable[..., T], found: Callable[..., T], leaves: list[Any], after: Callable[[T], T]
) -> None:
    wanted, results = [one for one in leaves if one is not None], []
    for compute in (expected, found):
        y = compute(leaves[0] * 1, *leaves[1:])
        results.append([y, *torch.autograd.grad(after(y).float().sum(), wanted)])
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other) and one.stride() == other.stride()


def test_gradients_have_gradients() -> None:
    leaves = given(2, 4, 3)
    compute = lambda x, weight, bias: product(x.sin(), weight, bias).sin()  # noqa: E731
    assert torch.autograd.gradcheck(compute, leaves) and torch.autograd.gradgradcheck(compute, leaves)


def test_a_frozen_bias_gets_no_gradient() -> None:
    x, weight, bias = given(4, 3)
    product(x * 1, weight, bias.requires_grad_(False)).sum().backward()
    assert bias.grad is None and weight.grad is not None


def test_what_is_changed_in_place_is_noticed_and_the_result_may_be() -> None:
    x, weight, bias = given(4, 3)
    relu_, tensor = product(y := x * 1, weight, bias).relu_(), torch.relu(F.linear(x, weight, bias))
    assert torch.equal(relu_, tensor)
    found, expected = (torch.autograd.grad(one.sum(), (x, weight), retain_graph=True) for one in (relu_, tensor))
    assert all(map(torch.equal, found, expected))
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        relu_.sum().backward()


# --------------------------------------------------------------------------------------------------------- order
@pytest.fixture
def events() -> Iterator[list[str]]:
    """When sums are begun and waited for."""
    found: list[str] = []

    class Pending:
        def wait(self) -> None:
            found.append("wait")

    begin = mock.Mock(begin=lambda tensor, group: found.append("begin") or Pending())
    with mock.patch.object(sums_under_products, "all_reduce", begin):
        yield found


def noted(weight: T, name: str, events: list[str]) -> T:
    weight.register_hook(lambda _: events.append(name))
    return weight


def test_the_sum_is_under_way_while_the_gradient_of_the_weight_is_computed(events: list[str]) -> None:
    x, weight, bias = given(4, 3)
    for _ in range(2):
        product(noted(x * 1, "input", events), noted(weight, "weight", events), bias).sum().backward()
        assert events == ["begin", "weight", "wait", "input"]
        events.clear()
        weight = weight.detach().requires_grad_()


def test_products_of_one_input_share_one_sum(events: list[str]) -> None:
    axis, (x, weight, bias) = Axis(Group.alone(), overlapped=True), given(4, 3)
    h, second = noted(x * 1, "input", events), noted(weight.detach().requires_grad_(), "second", events)
    first = product(h, noted(weight, "first", events), bias, axis)
    assert product_under_sum(h, second, bias, axis) is None
    (first + F.linear(axis.enter(h, products=True), second, bias)).sum().backward()
    assert events == ["second", "begin", "first", "wait", "input"]


@pytest.mark.parametrize("frozen", [0, 1])
def test_where_nothing_can_be_overlapped_nothing_is(frozen: int, events: list[str]) -> None:
    leaves = given(4, 3)
    leaves[frozen].requires_grad_(False)
    assert product_under_sum(*leaves, Axis(Group.alone(), overlapped=True)) is None
    with torch.no_grad():
        assert product_under_sum(*given(4, 3), Axis(Group.alone(), overlapped=True)) is None
    assert events == []


# ---------------------------------------------------------------------------------------------------------- runs
def trained(name: str, plan: str, precision: str, overlapped: bool) -> tuple[int, dict[str, T]]:
    """How many sums were begun under products, and this rank's parameters after three steps."""
    begun: list[T] = []
    all_reduce = mock.Mock(begin=lambda one, group: begun.append(one) or collectives.all_reduce.begin(one, group))
    job = TENSOR_JOBS[name](precision=precision)
    with (
        mock.patch.object(compose, "sums_under_products", lambda *_: overlapped),
        mock.patch.object(sums_under_products, "all_reduce", all_reduce),
        evenly.start(job, plan=plan, steps=3) as run,
    ):
        for batch in run.batches():
            run.step(batch)
        with run.inside():
            local = {name: parameter.detach() for name, parameter in run.model.named_parameters()}
            whole = {name: getattr(one, "_local_tensor", one).clone() for name, one in local.items()}
        return len(begun), {name: torch.Tensor.clone(one.as_subclass(torch.Tensor)) for name, one in whole.items()}


@pytest.mark.full_but("threes-*", "packed-tensor=2 recompute=full-*", "packed-tensor=2-2-bfloat16")
@pytest.mark.parametrize(
    ("name", "plan", "size", "precision"),
    [
        ("packed", "tensor=2", 2, "float64"),
        ("threes", "tensor=2", 2, "float64"),
        ("packed", "tensor=2 recompute=full", 2, "float64"),
        ("packed", "tensor=2 recompute=selective", 2, "float64"),
        ("packed", "tensor=2", 2, "bfloat16"),
        ("packed", "tensor=2", 2, "float16"),
        ("packed", "data=2 tensor=2 zero=2", 4, "float64"),
        ("packed", "tensor=2 pipeline=2 schedule=zero-bubble", 4, "float64"),
    ],
)
def test_runs_have_the_same_bits(name: str, plan: str, size: int, precision: str, ranks: KeptRanks) -> None:
    plain = ranks.run(trained, name, plan, precision, False, size=size)
    overlapped = ranks.run(trained, name, plan, precision, True, size=size)
    assert {count for count, _ in plain} == {0} and min(count for count, _ in overlapped) > 0
    for (_, expected), (_, found) in zip(plain, overlapped, strict=True):
        assert {*found} == {*expected}
        assert [name for name, one in expected.items() if not torch.equal(one, found[name])] == []


@pytest.mark.full_but("tensor=2-2-nccl-True", "tensor=2-2-gloo-False")
@pytest.mark.parametrize(
    ("plan", "devices", "backend", "expected"),
    [
        ("tensor=2", 2, "nccl", True),
        ("tensor=2", 2, "gloo", False),
        ("tensor=2 pipeline=2 schedule=1f1b", 4, "nccl", True),
        ("tensor=2 pipeline=2 schedule=zero-bubble", 4, "nccl", False),
    ],
)
def test_sums_are_overlapped_where_they_take_no_core(plan: str, devices: int, backend: str, expected: bool) -> None:
    complete = parse_plan(plan).fit(devices).complete("float32")
    assert compose.sums_under_products(complete, backend) is expected
