"""What counts as equal, and what a model that computes in a narrower type is held to."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from evenly.verify.compare import RankComparison, difference, judge
from evenly.verify.ranks import DowncastWatch


def test_numbers_are_compared_as_finely_as_tensors() -> None:
    assert difference(1.0 + 2e-9, 1.0) == pytest.approx(2e-9, rel=1e-6)
    assert difference(torch.tensor(1.0 + 2e-9, dtype=torch.float64), 1.0) == pytest.approx(2e-9, rel=1e-6)
    assert difference(3.0, 3.0) == 0.0
    assert difference(math.nan, 1.0) == math.inf
    trace = RankComparison("float64", rank=0)
    trace.add_loss(1, 5.0 * (1 + 3e-9), 5.0)
    assert judge("ddp", [trace]).status == "different"


class Normed(nn.Module):
    """Normalises as models written for 16-bit weights do."""

    def __init__(self, *, narrow: bool) -> None:
        super().__init__()
        self.linear, self.narrow = nn.Linear(4, 4, dtype=torch.float64), narrow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return in_float32(x) if self.narrow else x / x.norm()


def in_float32(x: torch.Tensor) -> torch.Tensor:
    return (x.float() / x.float().norm()).to(x.dtype)


@pytest.mark.parametrize(("narrow", "found"), [(True, "float32"), (False, "")])
def test_a_narrower_type_inside_a_model_is_found(narrow: bool, found: str) -> None:
    with DowncastWatch() as downcasts:
        Normed(narrow=narrow)(torch.randn(3, 4, dtype=torch.float64)).sum().backward()
    assert downcasts.found == found


def test_it_is_held_to_less_and_named() -> None:
    for downcast, status in (("", "different"), ("float32", "equal")):
        trace = RankComparison("float64", rank=0, downcast=downcast)
        trace.add_grad_norm(1, 1.0 + 1e-6, 1.0)
        row = judge("tensor=2", [trace])
        assert row.status == status
        assert ("computes in float32: tolerance 1e-05" in row.reason) == bool(downcast)
    trace.add_grad_norm(2, 1.0 + 1e-4, 1.0)
    assert judge("tensor=2", [trace]).status == "different"


@pytest.mark.parametrize(
    ("dtype", "norm", "status"),
    [
        ("float32", 1.001, "equal"),
        ("float32", 1.1, "different"),
        ("bfloat16", 1.05, "equal"),
        ("float16", 1.5, "different"),
    ],
)
def test_a_norm_that_rounding_does_not_explain_is_a_difference(dtype: str, norm: float, status: str) -> None:
    trace = RankComparison(dtype, rank=0)
    trace.add_grad_norm(1, norm, 1.0)
    assert judge("ddp", [trace]).status == status


def test_other_bits_are_a_difference_where_they_are_compared() -> None:
    one = {"a": torch.ones(3), "b": torch.zeros(5)}
    same, other = RankComparison("float32", rank=0), RankComparison("float32", rank=1)
    same.add_bits(1, one, one)
    other.add_bits(1, one, one)
    other.add_bits(2, one, {**one, "b": torch.tensor([0.0, -0.0, 0.0, -0.0, 0.0])})
    row = judge("ddp exact=bitwise", [same, other])
    assert (row.status, row.bits_differ) == ("different", 2)
    assert row.reason == "first difference: elements of b with different bits at step 2 on rank 1, 2"
    assert judge("ddp exact=bitwise", [same]).status == "equal"
