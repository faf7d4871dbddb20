"""The page of plans: a table and points that show what was found, and the answers around what was asked."""

from __future__ import annotations

import json
import re
from functools import cache
from html import unescape

import pytest

from evenly.hardware.cluster_text import parse_cluster
from evenly.planner.around import Grid, GridCell, grid_of
from evenly.planner.known import find_shape
from evenly.planner.request import PlanRequest
from evenly.planner.shapes import ShapeSource
from evenly.report.page import SortedCell, sortable
from evenly.report.planpage import page, preview
from evenly.report.plantable import answer, explorer


@cache
def grid() -> tuple[PlanRequest, Grid]:
    request = PlanRequest(source=ShapeSource(find_shape("gpt2")), cluster=parse_cluster("8xA100-80"), batch=16)
    return request, grid_of(request, 8, source_of=lambda _: request.source, within_s=float("inf"))


def drawn_plans() -> str:
    request, found = grid()
    best = found.cells[found.asked].plans[0]
    cells = {key: cell for key, cell in found.cells.items() if key[0] >= 8 and key[1] >= 16}
    few = Grid(asked=found.asked, cells=cells, left_out=[(16, 8)], alone={})
    return page("gpt2", "8xA100-80", few, preview(request, best.plan), assumed=False)


def points_of(text: str) -> list[tuple[str, str]]:
    """Texts and keys."""
    found = re.findall(r'data-texts="([^"]*)" data-keys="([^"]*)"', text)
    return [
        pair
        for texts, keys in found
        for pair in zip(*(json.loads(unescape(one)) for one in (texts, keys)), strict=True)
    ]


def test_every_plan_is_a_row_and_a_point_of_the_same_key() -> None:
    _, found = grid()
    cell = found.cells[found.asked]
    text = answer(cell)
    rows = re.findall(r'<tr data-key="([^"]+)">(.*?)</tr>', text)
    assert [key for key, _ in rows] == [f"8xA100-80 8 16 {number}" for number in range(1, len(cell.plans) + 1)]
    assert {key for _, key in points_of(text)} == {key for key, _ in rows}
    for words, key in points_of(text):
        one = cell.plans[int(key.rsplit(" ", 1)[1]) - 1]
        assert f"data={one.plan.axes['data']}" in words and f"data-value={one.step_s:.6g}" in dict(rows)[key]
    assert "time: matmul" in rows[0][1] and all("slower" in row or "as fast" in row for _, row in rows[1:8])


def test_the_grid_is_in_the_page_and_what_it_lacks_is_said() -> None:
    text = drawn_plans()
    assert re.findall(r'data-at="([\d ]+)"( hidden)?', text)[0] == ("8 16", "")
    assert "Left out for want of time (devices with batch): 16 with 8." in text
    assert 'data-values="8 16 32"' in text and 'data-values="8 16 32 64"' in text
    assert len(text) < 1_000_000 and "http" not in text.replace("http-equiv", "")


def test_what_cannot_be_changed_has_no_slider() -> None:
    _, found = grid()
    alone = Grid(asked=found.asked, cells={found.asked: found.cells[found.asked]}, alone={"devices": "one <reason>"})
    text = explorer(alone)
    assert "type=range" not in text and "Other devices: one &lt;reason&gt;." in text and "all in one table" not in text


def test_a_question_without_an_answer_says_why() -> None:
    assert "no plan &lt;fits&gt;" in answer(GridCell(devices=3, batch=4, cluster="3xH100", refused="no plan <fits>"))


def test_cells_are_text_and_sorted_by_their_values() -> None:
    text = sortable(("<a>", "b"), [[SortedCell("<x>"), SortedCell("2 s", 2.0)]], label="<l>", words="b")
    assert "<x>" not in text and "<a>" not in text and "<td class=sentence data-value=2>2 s</td>" in text
    assert "<th scope=col class=sentence>b</th>" in text and "&lt;l&gt;" in text


@pytest.mark.parametrize("share", [0.75, 0.5, 0.375, 0.25])
def test_the_frontier_has_the_fastest_plan_for_less_memory(share: float) -> None:
    _, found = grid()
    plans = found.cells[found.asked].plans
    most = share * plans[0].limit_bytes
    assert any(one.peak_bytes <= most * 0.92 for one in plans) and all(
        one.limit_bytes == plans[0].limit_bytes for one in plans
    )
