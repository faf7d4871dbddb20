"""Questions around a question: which they are, that they are the search's own answers, and when there is no time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from evenly.hardware.cluster import Link
from evenly.hardware.cluster_text import parse_cluster
from evenly.job import Job
from evenly.plan import parse_plan
from evenly.planner.around import device_counts, frontier, grid_of, grown, halved_and_doubled, on_devices
from evenly.planner.known import find_shape
from evenly.planner.request import CostSource, PlanRequest
from evenly.planner.search import search
from evenly.planner.shapes import ShapeSource
from evenly.report.plantable import explorer


def request(cluster: str = "2x4xA100-80", batch: int = 16) -> PlanRequest:
    return PlanRequest(source=ShapeSource(find_shape("gpt2")), cluster=parse_cluster(cluster), batch=batch)


def clock(step_s: float) -> Callable[[], float]:
    """One that goes on by as much whenever it is read."""
    times = iter(range(1_000_000))
    return lambda: next(times) * step_s


@pytest.mark.parametrize(
    ("cluster", "devices", "expected"),
    [
        ("8xA100-80", 8, [2, 4, 8, 16, 32]),
        ("3xA100-80", 3, [3, 6, 12]),
        ("4x8xA100-80", 32, [8, 16, 32, 64, 128]),
        ("4x8xA100-80", 24, [24, 48, 96]),
        ("2x6xA100-80", 12, [3, 6, 12, 24, 48]),
    ],
)
def test_numbers_of_devices_are_whole_nodes_or_parts_that_divide_one(
    cluster: str, devices: int, expected: list[int]
) -> None:
    assert device_counts(request(cluster), devices)[0] == expected


def test_what_is_stated_is_not_changed() -> None:
    assert device_counts(replace(request(), only=parse_plan("data=2 tensor=2")), 4) == ([4], "--only states 4 devices")
    assert device_counts(replace(request(), max_devices=8), 8)[0] == [2, 4, 8]
    measured = replace(request(), cluster=replace(request().cluster, backend="nccl"))
    assert device_counts(measured, 8)[0] == [2, 4, 8]
    assert halved_and_doubled(6) == [3, 6, 12, 24] and halved_and_doubled(1) == [1, 2, 4]


@pytest.mark.parametrize(
    ("cluster", "count", "expected"),
    [
        ("2xA100-80", 8, "8xA100-80"), ("4xA100-80", 16, "2x8xA100-80"), ("8xA100-80", 32, "4x8xA100-80"),
        ("2x4xA100-80", 16, "4x4xA100-80"), ("3xA100-80", 12, "4x3xA100-80"), ("2xcpu", 8, "4x2xcpu"),
    ],
)  # fmt: skip
def test_more_devices_fill_a_node_first(cluster: str, count: int, expected: str) -> None:
    assert str(grown(parse_cluster(cluster), count)) == expected


def test_links_measured_from_node_to_node_are_none_of_more_nodes() -> None:
    measured = replace(parse_cluster("3x2xcpu"), hops={(node, (node + 1) % 3): Link(0.0, 1e-9) for node in range(3)})
    assert grown(measured, 12) == replace(measured, nodes=6, hops={})
    fewer = on_devices(replace(request(), cluster=measured), 4)
    assert fewer.cluster.hops == measured.hops and fewer.max_devices == 4
    asked = replace(request(), cluster=measured, only=parse_plan("pipeline=6"))
    assert search(asked).plans
    more = search(on_devices(replace(asked, only=parse_plan("pipeline=12")), 12))  # crosses nodes that were not there
    assert more.plans[0].plan.devices == 12


def test_a_cell_is_the_answer_to_its_question() -> None:
    asked = request("8xA100-80")
    found = grid_of(asked, 8, source_of=lambda _: asked.source, within_s=float("inf"))
    assert {*found.cells} == {(count, batch) for count in (2, 4, 8, 16, 32) for batch in (4, 8, 16, 32, 64)}
    assert found.left_out == [] and found.alone == {} and found.asked == (8, 16)
    for key in ((8, 16), (2, 64), (32, 32)):
        cell = found.cells[key]
        alone = search(replace(on_devices(asked, key[0]), batch=key[1], top=5))
        assert cell.plans[0] == alone.plans[0] and cell.plans[0].plan.devices == key[0]
    few = found.cells[32, 4]  # more devices than samples
    assert few.refused or few.plans


def test_the_nearest_come_first_and_the_rest_is_named() -> None:
    asked = request("8xA100-80")
    found = grid_of(asked, 8, source_of=lambda _: asked.source, within_s=8.5, now_s=clock(1.0))
    assert found.asked in found.cells and 1 < len(found.cells) < 10
    assert len(found.cells) + len(found.left_out) == 25 and (2, 4) in found.left_out
    alone = grid_of(asked, 8, source_of=None, within_s=0.0, now_s=clock(1.0))
    assert [*alone.cells] == [(8, 16)] and {batch for _, batch in alone.left_out} == {16}


def zero(model: nn.Module, batch: Any) -> torch.Tensor:
    return torch.zeros(())


def test_a_batch_that_the_job_has_no_samples_for_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a job with 40 samples a batch of 16 may become 32, and not 64."""
    asked, jobs = request("8xA100-80"), list[int]()

    def source_of(batch: int) -> CostSource:
        job = Job(model=nn.Identity, loss=zero, data=[0.0] * 40, optimizer=torch.optim.SGD, global_batch=batch, steps=1)
        jobs.append(job.global_batch)
        return asked.source

    monkeypatch.setattr("evenly.planner.around.FEW", 1)
    found = grid_of(replace(asked, max_devices=2), 2, source_of=source_of, within_s=float("inf"))
    assert {*jobs} == {4, 8, 32} and {batch for _, batch in found.cells} == {4, 8, 16, 32, 64} and not found.left_out
    for (_, batch), cell in found.cells.items():
        assert ("40 samples" in cell.refused) == (batch == 64) and bool(cell.plans) == (batch != 64)
    assert "40 samples" in explorer(found)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_nothing_is_better_than_the_frontier(points: list[tuple[int, int]]) -> None:
    found = [points[at] for at in frontier(points)]
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(found))
    assert all(any(x <= a and y <= b for x, y in found) for a, b in points)
    assert not any(a <= x and b <= y and (a, b) != (x, y) for x, y in found for a, b in points)
