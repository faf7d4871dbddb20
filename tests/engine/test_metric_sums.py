"""Metrics and outputs of a pass as data: what a loss may give, what ranks say of it, how it is added and joined."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from evenly.comm.groups import Group
from evenly.comm.world import World
from evenly.engine.metrics import MetricCells, MetricNames, MetricSums, as_metrics, mark_of
from evenly.engine.outputs import joined_outputs, on_cpu
from evenly.engine.step_totals import as_loss
from evenly.errors import RunError
from evenly.job import Loss


def cells(*rows: dict[str, Any]) -> MetricCells:
    found = MetricCells()
    for number, metrics in enumerate(rows):
        found.add(number, Loss(torch.zeros(()), 1, as_metrics(metrics)))
    return found


ALONE = World(
    rank=0, local_rank=0, size=1, local_size=1, node=0, nodes=1, device="cpu", backend="gloo",
    groups={"world": Group.alone("world")},
)  # fmt: skip


def summed(found: MetricCells, microbatches: int) -> dict[str, MetricSums]:
    return MetricNames(ALONE).sum(found, [found.mark], microbatches)


def test_sums_are_exactly_rounded_over_microbatches() -> None:
    rows = [{"a": (value, 1)} for value in (1e16, 1.0, -1e16, 1.0)]
    assert summed(cells(*rows), 4)["a"].value == 0.5  # added one after the other it would be 0.25 or 0
    assert MetricSums([0.1] * 10, [1.0] * 10).value == 0.1


def test_names_may_come_in_any_order_and_keep_that_of_the_first() -> None:
    found = summed(cells({"b": (1, 2), "a": (torch.tensor([3.0]), torch.tensor(4))}, {"a": (1, 1), "b": (5, 2)}), 3)
    assert [(name, sums.value) for name, sums in found.items()] == [("b", 1.5), ("a", 0.8)]


def test_a_metric_without_a_count_has_no_value() -> None:
    found = summed(cells({"a": (0, 0), "b": (1, 0)}, {"a": (0.0, torch.tensor(0)), "b": (2, 3)}), 2)
    assert (found["a"].value, found["b"].value) == (None, 1.0)


def test_numbers_that_are_not_finite_are_no_error() -> None:
    assert math.isnan(MetricSums([math.inf, -math.inf], [1, 1]).value or 0.0)
    assert MetricSums([math.inf, 1.0], [1, 1]).value == math.inf


@pytest.mark.parametrize("count", [-1.0, math.nan, math.inf])
def test_a_count_must_be_able_to_divide(count: float) -> None:
    with pytest.raises(RunError, match="step 4: the count of a metric") as problem:
        MetricSums([1.0, 1.0], [1.0, count]).check("accuracy", "step 4")
    assert problem.value.found == f"in microbatch 1 accuracy has the count {count:g}"


def test_marks_tell_names_apart_and_cost_no_exchange_without_metrics() -> None:
    assert (MetricCells().mark, cells({}).mark, cells({}, {"a": (1, 1)}).mark) == (0.0, 1.0, 2.0)
    names = [mark_of(one) for one in (["a"], ["b"], ["a", "b"], ["ab"], ["b", "a"])]
    assert len({*names}) == 4 and names[2] == names[4]
    assert all(2 < mark < 2**53 and mark == int(mark) for mark in names)
    assert MetricNames(World.alone()).sum(cells({}, {}), [1.0, 0.0], 2) == {}  # a world without any group


def test_other_names_in_another_microbatch_are_an_error_that_names_both() -> None:
    with pytest.raises(RunError, match="the same names in every microbatch") as problem:
        summed(cells({"a": (1, 1)}, {"a": (1, 1)}, {}), 3)
    assert problem.value.found == "microbatch 0 has a, microbatch 2 none"


@pytest.mark.parametrize(
    ("metrics", "found"),
    [
        ([1], "metrics is a list"),
        ({"a": 0.5}, "'a' is 0.5"),
        ({"a": (1, 2, 3)}, "'a' is (1, 2, 3)"),
        ({3: (1, 2)}, "3 is (1, 2)"),
        ({"a": (torch.ones(2), 2)}, "a has a tensor of shape (2,) and type torch.float32"),
        ({"a": (1, None)}, "a has a NoneType"),
    ],
)
def test_what_is_no_metric_is_named(metrics: Any, found: str) -> None:
    with pytest.raises(RunError, match="pairs of numbers or scalar tensors") as problem:
        as_loss(Loss(torch.ones(()), 1, metrics), 1)
    assert problem.value.found == found


def test_metrics_are_detached() -> None:
    total = torch.ones((), requires_grad=True) * 2
    metrics = as_loss(Loss(total, 1, {"a": (total, total * 2)}), 1).metrics
    assert not any(value.requires_grad for value in metrics["a"])  # type: ignore[union-attr]


# --- outputs -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predicted:
    logits: torch.Tensor
    texts: list[str]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def test_outputs_are_joined_along_the_samples_and_keep_their_nest() -> None:
    sizes = [(0, 3), (3, 4), (4, 6)]
    logits = torch.randn(6, 2, dtype=torch.float64)
    parts = [
        on_cpu((Predicted(logits[a:b], [*"abcdef"[a:b]]), {"y": torch.arange(a, b)}), b - a, whole) for a, b in sizes
    ]
    (predicted, others) = joined_outputs(parts)
    assert isinstance(predicted, Predicted) and torch.equal(predicted.logits, logits)
    assert (predicted.texts, others["y"].tolist()) == ([*"abcdef"], [0, 1, 2, 3, 4, 5])


def test_outputs_are_copies() -> None:
    given = torch.zeros(2, requires_grad=True)
    found = on_cpu(given, 2, whole)
    given.data += 1
    assert found.tolist() == [0.0, 0.0] and not found.requires_grad


def test_lists_hold_samples_of_any_length() -> None:
    rows = [torch.ones(n) for n in (3, 1, 2)]
    assert [*map(len, joined_outputs([on_cpu(rows[:2], 2, whole), on_cpu(rows[2:], 1, whole)]))] == [3, 1, 2]


@pytest.mark.parametrize(
    ("outputs", "found"),
    [
        (torch.ones(()), "outputs is a tensor of shape ()"),
        ((torch.ones(2), torch.ones(3, 2)), "1 is a tensor of shape (3, 2)"),
        ({"a": ([1, 2], [1])}, "a.1 is [1]"),
        ({"a": 0.5}, "a is 0.5"),
    ],
)
def test_a_leaf_that_has_not_the_samples_is_named(outputs: Any, found: str) -> None:
    with pytest.raises(RunError, match="samples of the microbatch") as problem:
        on_cpu(outputs, 2, whole)
    assert problem.value.found == f"of a microbatch of 2 samples {found}"


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ([torch.ones(2, 3), torch.ones(2, 4)], "outputs has samples of [3] (torch.float32) and [4] (torch.float32)"),
        ([{"a": torch.ones(2)}, {"b": torch.ones(2)}], "outputs of microbatch 1 does not have the parts"),
        ([(torch.ones(1), torch.ones(1)), (torch.ones(1), [1])], "1 is a Tensor in one microbatch, and none in"),
    ],
)
def test_outputs_that_do_not_fit_together_are_named(parts: list[Any], found: str) -> None:
    with pytest.raises(RunError, match="the outputs of all microbatches") as problem:
        joined_outputs(parts)
    assert problem.value.found.startswith(found)
