"""The contract itself: every job of `jobs`, on 1 to 4 ranks, tensor by tensor against the plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import ALL_JOBS, JOBS, Tower, language_job
from jobs_tensor import TENSOR_JOBS
from kept_ranks import KeptRanks

import evenly
from evenly.verify.compare import RankComparison, judge
from evenly.verify.ranks import compare_job, keep_reference

EVERY_JOB = {**ALL_JOBS, **TENSOR_JOBS}
STEPS = 5  # the classifier's fourth batch is the short one, the fifth begins an epoch


def make_job(name: str, precision: str) -> evenly.Job:
    if precision == "pure-float16":  # Adam divides by the root of a mean of squares, which float16 cannot hold
        return EVERY_JOB[name](precision=precision, optimizer=lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9))
    return EVERY_JOB[name](precision=precision)


def reference(name: str, precision: str, folder: Path) -> None:
    keep_reference(make_job(name, precision), STEPS, folder / "reference")


def compare(name: str, precision: str, plan: str, folder: Path) -> RankComparison:
    return compare_job(make_job(name, precision), plan, STEPS, folder)


@pytest.mark.full_but("classifier")
@pytest.mark.parametrize("name", JOBS)
def test_float64_agrees_on_any_number_of_ranks(name: str, ranks: KeptRanks, tmp_path: Path) -> None:
    ranks.run(reference, name, "float64", tmp_path, size=1)
    for size in (1, 2, 3, 4):
        traces = ranks.run(compare, name, "float64", "ddp", tmp_path, size=size)
        row = judge("ddp", traces)
        assert (row.status, row.reason) == ("equal", "")
        assert row.param_diff is not None and row.param_diff < 1e-11
        assert all(trace.compared > 4 * STEPS for trace in traces)


@pytest.mark.full_but("classifier-float32", "language-bfloat16", "classifier-float16")
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", JOBS)
def test_narrow_types_have_the_same_bits_on_any_number_of_ranks(
    name: str, precision: str, ranks: KeptRanks, tmp_path: Path
) -> None:
    ranks.run(reference, name, precision, tmp_path, size=1)
    for size in (1, 2, 3):
        row = judge("ddp", ranks.run(compare, name, precision, "ddp exact=bitwise", tmp_path, size=size))
        assert row.bits_differ == 0
        assert row.loss_diff is not None and row.loss_diff < 1e-2


SHARDED = [
    ("tower", "zero3 recompute=full", 2),
    ("tower", "ddp recompute=selective", 2),
    ("classifier", "zero3", 3),
    ("language", "zero2", 2),
    ("heads", "ddp", 2),
    ("packed", "zero3", 2),
    ("threes", "ddp", 3),
    ("language", "ddp speeds=1|0.5", 2),
    ("classifier", "zero2 speeds=0.25|1|1", 3),
]


@pytest.mark.full_but("tower-zero3 *", "packed-zero3-2", "threes-ddp-3", "classifier-zero2 speeds*")
@pytest.mark.parametrize(("name", "plan", "size"), SHARDED)
def test_float64_agrees_where_state_is_cut_over_ranks(
    name: str, plan: str, size: int, ranks: KeptRanks, tmp_path: Path
) -> None:
    ranks.run(reference, name, "float64", tmp_path, size=1)
    row = judge(plan, ranks.run(compare, name, "float64", plan, tmp_path, size=size))
    assert (row.status, row.reason) == ("equal", "")
    assert row.param_diff is not None and row.param_diff < 1e-11
    assert row.sharded == (0.0 if plan.startswith("ddp") else 1.0)


class Normalized(torch.autograd.Function):
    """Whose backward of nothing is not nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] / gradients[0].norm()


class NormalizedTower(Tower):
    def forward(self, *given: Any) -> torch.Tensor:
        return Normalized.apply(super().forward(*given))  # type: ignore[no-any-return]


def odd_backward() -> evenly.Job:
    return language_job(model=NormalizedTower, precision="float64")


def odd_reference(folder: Path) -> None:
    keep_reference(odd_backward(), STEPS, folder / "reference")


def odd_trace(plan: str, folder: Path) -> RankComparison:
    return compare_job(odd_backward(), plan, STEPS, folder)


def test_what_fills_up_a_step_counts_for_nothing(ranks: KeptRanks, tmp_path: Path) -> None:
    ranks.run(odd_reference, tmp_path, size=1)
    row = judge("zero3", ranks.run(odd_trace, "zero3", tmp_path, size=3))
    assert (row.status, row.reason) == ("equal", "")


@pytest.mark.full_but("zero1-2-float32", "zero3-2-bfloat16")
@pytest.mark.parametrize(
    ("plan", "size", "precision"),
    [
        ("zero1", 2, "float32"),
        ("zero2 recompute=selective", 3, "float32"),
        ("zero3", 2, "bfloat16"),
        ("hsdp", 4, "float32"),
    ],
)
def test_state_cut_over_ranks_has_the_bits_of_one_device(
    plan: str, size: int, precision: str, ranks: KeptRanks, tmp_path: Path
) -> None:
    ranks.run(reference, "tower", precision, tmp_path, size=1)
    ranks.run(compare, "tower", precision, "single exact=bitwise", tmp_path, size=1)
    row = judge(plan, ranks.run(compare, "tower", precision, f"{plan} exact=bitwise", tmp_path, size=size))
    assert row.bits_differ == 0


@pytest.mark.full_but("zero3-*")
@pytest.mark.parametrize(("plan", "precision"), [("zero3", "pure-bfloat16"), ("zero2", "pure-float16")])
def test_16_bit_weights_cut_over_ranks_agree_up_to_rounding(
    plan: str, precision: str, ranks: KeptRanks, tmp_path: Path
) -> None:
    ranks.run(reference, "tower", precision, tmp_path, size=1)
    row = judge(plan, ranks.run(compare, "tower", precision, plan, tmp_path, size=2))
    assert (row.status, row.reason, row.sharded, row.bits_differ) == ("equal", "", 1.0, None)
    assert row.grad_norm_diff is not None and row.grad_norm_diff < 1e-2
