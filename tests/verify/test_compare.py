"""What counts as equal: what rounding explains, measured on the job itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import evenly.cli.verify as command
from evenly.verify.compare import RankComparison, Rounding, Row, difference, differing_elements, judge, spread
from evenly.verify.disturb import Disturbance, Disturber
from evenly.verify.trajectory import Scalars, Trajectory, read_rounding, rounding_of
from evenly.verify.verify import Verification


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


@pytest.mark.parametrize(
    ("kind", "narrow", "least", "most"),
    [
        ("none", True, 0.0, 0.0),
        ("sums", True, 1e-18, 1e-15),
        ("forward", False, 1e-18, 1e-14),
        ("forward", True, 1e-9, 1e-5),
    ],
)
def test_rounding_is_added_in_the_type_that_a_model_computes_in(
    kind: Disturbance, narrow: bool, least: float, most: float
) -> None:
    gradients: list[torch.Tensor] = []
    for added in (Disturber(), Disturber(kind)):
        torch.manual_seed(0)
        model = Normed(narrow=narrow)
        before = [p.clone() for p in model.parameters()]
        with added.around_microbatch(model):
            model(torch.randn(3, 4, dtype=torch.float64)).square().sum(0)[0].backward()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        gradients.append(model.linear.weight.grad)  # type: ignore[arg-type]
    apart = float((gradients[0] - gradients[1]).abs().max())
    assert least <= apart <= most
    assert added.cast_eps == (2.0**-23 if kind == "forward" and narrow else 0.0)


def test_rounding_in_the_forward_tells_samples_that_are_alike_apart() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3))).double()
    alike = torch.randn(1, 4, dtype=torch.float64).expand(5, 4)
    with Disturber("forward").around_microbatch(model):
        disturbed = model(alike).detach()
    assert float(model(alike).detach().std(0).max()) < 1e-15 < 1e-12 < float(disturbed.std(0).max())


def test_a_forward_has_other_weights_where_its_rounding_is_measured() -> None:
    seen: dict[Disturbance, torch.Tensor] = {}
    for kind in ("sums", "forward"):
        model = Normed(narrow=False)
        before = model.linear.weight.detach().clone()
        with Disturber(kind).around_microbatch(model):
            seen[kind] = (model.linear.weight.detach() / before - 1).abs()
    assert seen["sums"].max() == 0 and 1e-17 < seen["forward"].max() < 1e-15


def rounding(scalar: float = 0.0, **named: tuple[float, float]) -> Rounding:
    """What rounding does at step 1 to the tensors of these names."""
    return Rounding([0.0, scalar], [{}, dict(named)], [{}, dict(named)])


@pytest.mark.parametrize(
    ("dtype", "measured", "diff", "status"),
    [
        ("float64", 0.0, 5e-10, "equal"),
        ("float64", 0.0, 2e-9, "different"),
        ("float64", 1e-6, 1e-5, "equal"),
        ("float64", 1e-6, 1e-4, "different"),
        ("float32", 0.0, 1e-6, "equal"),
        ("float32", 0.0, 1e-5, "different"),
        ("bfloat16", 0.0, 1e-4, "different"),
        ("bfloat16", 1e-3, 1e-2, "equal"),
        ("pure-bfloat16", 0.0, 0.05, "equal"),
        ("float16", 0.0, 0.5, "different"),
    ],
)
def test_a_norm_is_judged_by_what_rounding_does_to_this_job(
    dtype: str, measured: float, diff: float, status: str
) -> None:
    comparison = RankComparison(dtype, rank=0, rounding=rounding(measured))
    comparison.add_grad_norm(1, 1.0 + diff, 1.0)
    assert judge("ddp", [comparison]).status == status


def test_a_loss_that_a_model_computes_in_a_narrower_type_has_its_rounding() -> None:
    for cast_eps, status in ((0.0, "different"), (2.0**-23, "equal")):
        comparison = RankComparison("float64", rank=0, rounding=Rounding(kind="forward", cast_eps=cast_eps))
        comparison.add_loss(1, 3.0 + 1e-7, 3.0)
        assert judge("tensor=2", [comparison]).status == status


BEFORE = torch.linspace(0.5, 2.0, 40)


def one_far(x: torch.Tensor) -> torch.Tensor:
    """As where Adam turns the rounding of one gradient near zero into a full step."""
    return torch.cat([x[:1] + 0.1, x[1:]])


@pytest.mark.parametrize(
    ("dtype", "found", "measured", "status"),
    [
        ("float64", lambda x: x + 1e-8, (0.0, 0.0), "different"),
        ("float64", lambda x: x + 1e-8, (2e-9, 1e-9), "equal"),
        ("float64", one_far, (1e-3, 1e-3), "different"),
        ("float32", one_far, (0.0, 0.0), "equal"),
        ("float32", lambda x: x * (1 - 1e-4), (0.0, 0.0), "different"),
        ("float32", lambda x: x * (1 - 1e-4), (1e-3, 1e-4), "equal"),
        ("float32", lambda x: x * (1 - 1e-4), (1.0, 1e-7), "different"),
    ],
)
def test_a_tensor_is_judged_by_what_rounding_does_to_it(
    dtype: str, found: Any, measured: tuple[float, float], status: str
) -> None:
    expected = BEFORE.to(getattr(torch, dtype))
    comparison = RankComparison(dtype, rank=0, rounding=rounding(w=measured))
    comparison.add_tensors(1, {"w": found(expected)}, {"w": expected})
    assert judge("ddp", [comparison]).status == status


def test_after_the_first_step_one_element_of_the_optimizers_state_is_a_difference() -> None:
    for step, status in ((1, "different"), (2, "equal")):
        comparison = RankComparison("float32", rank=0)
        comparison.add_state(step, {"exp_avg of w": one_far(BEFORE)}, {"exp_avg of w": BEFORE})
        assert judge("ddp", [comparison]).status == status


@pytest.mark.parametrize(
    ("factor", "measured", "status"),
    [(1 + 1e-6, 0.0, "equal"), (1 + 1e-4, 0.0, "different"), (1 + 1e-4, 1e-3, "equal")],
)
def test_the_optimizers_state_after_the_first_step_may_differ_by_rounding(
    factor: float, measured: float, status: str
) -> None:
    """By its median element it would be equal each time."""
    found = torch.cat([BEFORE[:1] * factor, BEFORE[1:]])
    comparison = RankComparison("float32", rank=0, rounding=rounding(**{"exp_avg of w": (measured, 0.0)}))
    comparison.add_state(1, {"exp_avg of w": found}, {"exp_avg of w": BEFORE})
    assert judge("ddp", [comparison]).status == status


def test_the_median_of_many_elements_is_judged_by_their_own_rounding() -> None:
    one, other = torch.ones(64), torch.ones(64)
    comparison = RankComparison("float32", rank=0, rounding=rounding(one=(1e-6, 1e-7), other=(0.9, 0.5)))
    comparison.add_tensors(1, {"one": one * 1.5, "other": other}, {"one": one, "other": other})
    assert judge("ddp", [comparison]).reason.startswith("first difference: one at step 1")


def test_a_loss_of_a_narrower_forward_that_is_split_has_its_unit_in_the_last_place() -> None:
    for kind, status in (("sums", "different"), ("forward", "equal")):
        comparison = RankComparison("bfloat16", rank=0, rounding=Rounding(kind=kind))  # type: ignore[arg-type]
        comparison.add_loss(1, 3.0 + 1e-2, 3.0)
        assert judge("tensor=2", [comparison]).status == status


@pytest.mark.parametrize(
    ("found", "expected", "status"),
    [(math.inf, math.nan, "equal"), (math.inf, 1.0, "different"), (1.0, math.inf, "different")],
)
def test_a_norm_overflows_on_both_sides_or_on_none(found: float, expected: float, status: str) -> None:
    comparison = RankComparison("float16", rank=0)
    comparison.add_grad_norm(1, found, expected)
    assert judge("ddp", [comparison]).status == status


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("found", [BEFORE[:-1], BEFORE.view(4, 10), torch.cat([BEFORE[1:], torch.tensor([math.nan])])])
def test_other_shapes_and_numbers_that_are_none_are_different(dtype: str, found: torch.Tensor) -> None:
    noisy = rounding(w=(1e9, 1e9))
    for name in ("add_tensors", "add_state"):
        comparison = RankComparison(dtype, rank=0, rounding=noisy)
        getattr(comparison, name)(1, {"w": found}, {"w": BEFORE})
        assert judge("ddp", [comparison]).reason == "first difference: w at step 1 on rank 0, inf"
    assert difference(found, BEFORE) == math.inf and spread(found, BEFORE) == (math.inf, math.inf)


def test_the_median_of_few_elements_may_be_chance_where_others_are_noise() -> None:
    few, many = torch.ones(3), torch.ones(64)
    for noisy, status in (((0.9, 0.5), "rounding"), ((1e-7, 1e-7), "different")):
        comparison = RankComparison("float32", rank=0, rounding=rounding(few=(0.0, 0.0), many=noisy))
        comparison.add_tensors(1, {"few": few * 1.5, "many": many}, {"few": few, "many": many})
        assert judge("ddp", [comparison]).status == status


def test_what_no_rank_has_compared_is_a_difference() -> None:
    whole = {"a": torch.ones(3), "b": torch.zeros(5)}
    ranks = [RankComparison("float64", rank=rank) for rank in range(2)]
    for comparison, name in zip(ranks, whole, strict=True):
        comparison.add_tensors(1, {name: whole[name]}, whole)
    assert judge("pipeline=2", ranks).status == "equal"
    row = judge("pipeline=2", ranks[:1])
    assert (row.status, row.reason) == ("different", "no rank has b")
    ranks[1].add_state(1, {}, {"exp_avg of a": whole["a"], "exp_avg of b": whole["b"]})
    assert judge("pipeline=2", ranks).reason == "no rank has exp_avg of a and 1 more"


def test_what_the_reference_has_not_is_a_difference() -> None:
    for name in ("add_tensors", "add_state"):
        comparison = RankComparison("float64", rank=0)
        getattr(comparison, name)(1, {"a": torch.ones(3), "b": torch.ones(3)}, {"a": torch.ones(3)})
        assert judge("ddp", [comparison]).reason == "first difference: b at step 1 on rank 0, inf"


def test_a_learning_rate_is_compared_for_every_group() -> None:
    for found, reason in (
        ([0.1, 0.01], ""),
        ([0.1, 0.02], "first difference: learning rate of group 1 at step 2 on rank 0, 1"),
        ([0.1], "first difference: learning rate of group 1 at step 2 on rank 0, inf"),
    ):
        comparison = RankComparison("float32", rank=0)
        comparison.add_rates(2, found, [0.1, 0.01])
        assert judge("ddp", [comparison]).reason == reason


def test_the_numbers_of_rounding_are_measured(tmp_path: Path) -> None:
    one, other = Trajectory(tmp_path / "one"), Trajectory(tmp_path / "other")
    for trajectory, shift in ((one, 0.0), (other, 1e-3)):
        scalars = Scalars()
        for step in (1, 2):
            trajectory.add_tensors(step, {"w": BEFORE + shift * step}, {"exp_avg of w": BEFORE})
            scalars.add(step, loss=1.0, grad_norm=2.0 + shift / step, rates=[0.1], eval_loss=None)
        trajectory.finish(scalars)
    found = rounding_of(one, other, "forward")
    assert found.kind == "forward"
    assert [found.scalar(step) for step in (1, 2)] == pytest.approx([5e-4, 5e-4])  # the largest so far
    assert found.of_tensors(2)["w"] == pytest.approx((2e-3, 2e-3), rel=1e-3)
    assert found.of_state(1) == {"exp_avg of w": (0.0, 0.0)}
    assert read_rounding(tmp_path / "none.json") == Rounding()


def test_of_several_draws_of_rounding_the_largest_counts() -> None:
    one = Rounding([0.0, 1e-6], [{}, {"w": (1e-3, 1e-7)}], [{}, {}], "sums", 0.0)
    other = Rounding([0.0, 1e-5], [{}, {"w": (1e-4, 1e-6)}], [{}, {"step of w": (1.0, 1.0)}], "sums", 1e-2)
    both = one.joined(other)
    assert both == Rounding([0.0, 1e-5], [{}, {"w": (1e-3, 1e-6)}], [{}, {}], "sums", 1e-2)
    assert one.joined(Rounding()) == one


def test_the_rounding_of_an_evaluation_counts(tmp_path: Path) -> None:
    one, other = Trajectory(tmp_path / "one"), Trajectory(tmp_path / "other")
    for trajectory, found in ((one, 1.0), (other, 1.01)):
        scalars = Scalars()
        trajectory.add_tensors(1, {})
        scalars.add(1, loss=1.0, grad_norm=2.0, rates=[0.1], eval_loss=found)
        trajectory.finish(scalars)
    assert rounding_of(one, other, "sums").scalar(1) == pytest.approx(0.01)


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
    for changed in (torch.ones(3, dtype=torch.float64), torch.ones(2), torch.ones(3, 1)):
        assert differing_elements(changed, one["a"]) == 3


@pytest.mark.parametrize(
    ("step", "diff", "status"), [(1, 1.5e-9, "equal"), (2, 1.5e-9, "equal"), (2, 1e-7, "different")]
)
def test_few_elements_that_cancel_have_the_rounding_of_the_largest_of_their_kind(
    step: int, diff: float, status: str
) -> None:
    expected = {"exp_avg of wide": torch.full((32,), 1e-2), "exp_avg of bias": torch.full((1,), 1e-9)}
    trace = RankComparison("float32", rank=0)
    trace.add_state(step, {**expected, "exp_avg of bias": expected["exp_avg of bias"] + diff}, expected)
    assert judge("ddp", [trace]).status == status


def test_few_elements_of_16_bits_are_held_against_their_own_size() -> None:
    expected = {"exp_avg of wide": torch.full((32,), 1.0), "exp_avg of bias": torch.full((4,), 1e-2)}
    expected = {name: tensor.bfloat16() for name, tensor in expected.items()}
    trace = RankComparison("pure-bfloat16", rank=0)
    trace.add_state(2, {**expected, "exp_avg of bias": torch.zeros(4).bfloat16()}, expected)
    assert judge("ddp", [trace]).status == "different"


@pytest.mark.parametrize(
    ("dtype", "rounding", "apart", "status"),
    [
        ("float64", 0.28, 0.2, "rounding"),
        ("float64", 2e-3, 1e-6, "rounding"),
        ("float64", 0.28, 1e-10, "equal"),  # within the contract, however far rounding carries
        ("float64", 5e-4, 1e-4, "equal"),
        ("float64", 0.01, 0.9, "different"),
        ("float32", 0.28, 0.2, "rounding"),
        ("float32", 5e-4, 5e-4, "equal"),
        ("bfloat16", 2e-3, 1e-3, "rounding"),
    ],
)
def test_a_job_that_rounding_moves_far_is_not_equal(dtype: Any, rounding: float, apart: float, status: str) -> None:
    expected = {"weight": torch.ones(40, 5)}
    measured = Rounding(scalars=[0.0, rounding / 2], tensors=[{}, {"weight": (rounding, rounding)}])
    trace = RankComparison(dtype, rank=0, rounding=measured)
    trace.add_tensors(1, {"weight": torch.ones(40, 5) + apart}, expected)
    row = judge("ddp", [trace])
    assert row.status == status
    if status == "rounding":
        said = f"rounding alone moves this job by {100 * rounding:.2g} %: nothing is shown; try --dtype float64"
        assert row.reason.startswith(said)


def test_elements_that_jump_by_chance_hide_nothing_in_narrow_types() -> None:
    """Adam turns the rounding of a gradient near zero into a full step."""
    measured = Rounding(scalars=[0.0, 1e-7], tensors=[{}, {"weight": (0.05, 1e-8), "bias": (0.03, 0.03)}])
    expected = {"weight": torch.ones(400, 5), "bias": torch.zeros(8)}
    trace = RankComparison("float32", rank=0, rounding=measured)
    trace.add_tensors(1, {**expected, "bias": torch.full((8,), 0.01)}, expected)
    assert judge("ddp", [trace]).status == "equal"


def test_losses_that_rounding_moves_hide_as_much_as_parameters() -> None:
    trace = RankComparison("float64", rank=0, rounding=Rounding(scalars=[0.0, 0.05], tensors=[{}, {}]))
    trace.add_loss(1, 2.01, 2.0)
    trace.add_tensors(1, {"weight": torch.ones(2)}, {"weight": torch.ones(2)})
    assert judge("ddp", [trace]).reason.startswith("rounding alone moves this job by 5 %")


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["equal", "equal"], 0),
        (["equal", "rounding"], 3),
        (["rounding"], 3),
        (["rounding", "different"], 1),
        (["equal", "unsupported"], 1),
        (["rounding", "error"], 1),
    ],
)
def test_the_exit_code_tells_rounding_apart(
    statuses: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [Row(str(number), 2, status) for number, status in enumerate(statuses)]
    monkeypatch.setattr("evenly.verify.verify.verify", lambda *_, **__: Verification("job.py", 3, "float64", rows))
    monkeypatch.setattr(command, "warm_up", lambda *_: None)
    (tmp_path / "job.py").touch()
    asked: dict[str, Any] = {"devices": None, "steps": 3, "dtype": "float64", "settings": [], "json_only": False}
    assert command.run_verify(tmp_path / "job.py", "ddp", **asked) == code
    counted = "1 rounding" in capsys.readouterr().out
    assert counted == ("rounding" in statuses)
