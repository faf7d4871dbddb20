"""The drawing kit: what is drawn is what was given, thinned without losing spikes, and no name is markup."""

from __future__ import annotations

import math
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenly.report.axes import round_values, short
from evenly.report.draw import (
    ACROSS,
    BYTES,
    MOST_BOXES,
    SECONDS,
    UP,
    Box,
    ChartAxis,
    Line,
    StackedBar,
    axis,
    boxes,
    curves,
    stacked,
    standalone,
    thinned,
)

NAME = "<script>alert('x')</script>\"&"


def test_few_points_stay_as_they_are() -> None:
    assert thinned([1, 2, 5], [3.0, 1.0, 2.0], 1000) == [(1, 3.0), (2, 1.0), (5, 2.0)]
    assert thinned([], [], 10) == [] and thinned([7], [1], 10) == [(7, 1.0)]


def test_a_spike_of_one_step_stays() -> None:
    ys = [1.0] * 100_000
    ys[54_321], ys[77_777] = 50.0, -3.0
    found = thinned(range(len(ys)), ys, 500)
    assert len(found) <= 1000 and (54_321, 50.0) in found and (77_777, -3.0) in found
    xs = [point[0] for point in found if point is not None]
    assert xs == sorted(xs)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(1, 30))
def test_each_column_keeps_its_least_and_its_largest(ys: list[float], columns: int) -> None:
    found = thinned(range(len(ys)), ys, columns)
    assert len(found) <= 2 * columns and {*found} <= {*enumerate(ys)}
    values = [point[1] for point in found if point is not None]
    assert max(values) == max(ys) and min(values) == min(ys)


def test_what_is_no_number_leaves_a_gap() -> None:
    assert thinned(range(5), [1, None, 2, math.nan, math.inf], 100) == [(0, 1.0), None, (2, 2.0)]
    assert thinned(range(3), [None] * 3, 100) == []
    assert thinned(range(3), [1, 10**400, 2], 100) == [(0, 1.0), None, (2, 2.0)]  # whole, and larger than any float


def points(picture: str) -> list[tuple[int, int]]:
    (path,) = re.findall(r'<path class="line[^>]* d="([^"]*)"', picture)
    return [(int(x), int(y)) for x, y in re.findall(r"[ML](-?\d+),(-?\d+)", path)]


def test_the_coordinates_are_the_data() -> None:
    xs, ys = [10, 20, 110], [0.5, 2.0, 1.0]
    across, up = axis(xs, "step"), axis(ys, "loss")
    found = points(curves([Line("a", xs, ys)], title="loss", across=across, up=up))
    assert [across.low + x / ACROSS * (across.high - across.low) for x, _ in found] == xs
    assert [up.low + (1 - y / UP) * (up.high - up.low) for _, y in found] == pytest.approx(ys, abs=1e-4)


def test_logarithmic_axes_place_factors_alike() -> None:
    one = axis([1.0, 100.0, None, -5.0], "size", log=True)
    assert (one.low, one.high) == (1.0, 100.0) and one.share(10) == pytest.approx(0.5)
    assert one.ticks() == [1, 10, 100]
    picture = curves([Line("a", [1, 10, 100], [1, -1, 100])], title="", across=one, up=one)
    assert points(picture) == [(0, UP), (ACROSS, 0)]


def test_axes_have_round_ticks_in_the_unit_of_their_size() -> None:
    memory = axis([0, 3.4 * 2**30], "memory", units=BYTES)
    assert [tick / 2**30 for tick in memory.ticks()] == [0, 1, 2, 3] and memory.unit == "GiB"
    assert axis([0.0, 0.0042], "time", units=SECONDS).unit == "ms"
    assert round_values(0.0, 1.0) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert [short(value) for value in (0, 0.00012, 1234, 12345, 2_500_000)] == [
        "0",
        "0.00012",
        "1234",
        "12.35k",
        "2.5M",
    ]


@pytest.mark.parametrize(
    "values", [[], [0.0], [5], [-3.0, -3.0], [None, math.nan], [1e29, -1e29], [10**25], [10**400], [5e-324]]
)
def test_no_values_make_an_axis_of_no_length(values: list[float | None]) -> None:
    one = axis(values, "x")
    assert one.low < one.high and all(math.isfinite(one.share(tick)) for tick in one.ticks())


def test_what_lies_at_the_edges_has_room() -> None:
    one = axis([1.0, 3.0], "y", room=0.05)
    assert (one.low, one.high) == pytest.approx((0.9, 3.1))
    assert (axis([0.0, 3.0], "y", room=0.05).low, axis([0.01, 3.0], "y", room=0.05).low) == (0.0, 0.01)
    assert axis([-1.0, 1.0], "y", room=0.05).low == pytest.approx(-1.1)
    assert axis([1.0, 100.0], "y", log=True, room=0.05) == axis([1.0, 100.0], "y", log=True)


def test_the_legend_says_how_long_the_parts_of_one_bar_are() -> None:
    bar = StackedBar("a step", {"computing": 0.75, "waiting": 0.0, "rest": 0.25})
    drawn = stacked([bar], "{:.0%}".format, title="shares", in_legend=True)
    assert re.findall(r"<span class='c\d'>(.*?)</span>", drawn) == ["computing 75%", "rest 25%"]
    assert "100%" not in re.sub("<.*?>", "", drawn)
    assert "100%" in stacked([bar], "{:.0%}".format, title="shares")


def test_no_name_is_markup() -> None:
    one = ChartAxis(0, 1, NAME, 1, NAME)
    drawn = curves([Line(NAME, [0, 1], [0, 1])] * 2, title=NAME, across=one, up=one, limit=(0.5, NAME))
    drawn += boxes([NAME], [Box(0, 0, 1, NAME, NAME)], {NAME: "c0"}, title=NAME, longest=1)
    assert "<script" not in drawn and "alert('x')" not in drawn and "&lt;script&gt;" in drawn


def test_many_boxes_are_those_of_the_first_rows() -> None:
    per_row = MOST_BOXES // 4
    many = [Box(row, at, at + 0.5, "forward", f"F0.{at}") for row in range(10) for at in range(per_row)]
    drawn = boxes([f"rank {row}" for row in range(10)], many, {"forward": "c0"}, title="", longest=per_row)
    assert (
        drawn.count("h-") == MOST_BOXES
        and f"{MOST_BOXES} of {10 * per_row} boxes, of rows 0 to 3 of 10" in drawn
        and len(drawn) < 500_000
    )
    xs = [int(x) for x in re.findall(r"M(\d+),", drawn)]
    assert min(xs) == 0 and max(xs) < ACROSS
    one_row = [Box(0, at, at + 0.5 + (at == 9000), "forward", "") for at in range(10_000)]
    drawn = boxes(["rank 0"], one_row, {"forward": "c0"}, title="", longest=10_000)
    assert drawn.count("h-") == MOST_BOXES and "M900000,6h150v" in drawn
    lower = [Box(row, at, at + 0.5, "message", "", lower=True) for row in range(10) for at in range(per_row)]
    drawn = boxes(["r"] * 10, many[:5000] + lower, {"forward": "c0", "message": "c1"}, title="", longest=per_row)
    assert drawn.count("h-") == MOST_BOXES and "rows" not in drawn.split("</figcaption>")[1]


def test_a_picture_is_bounded_however_many_lines_there_are() -> None:
    chance = random.Random(0)
    xs = range(20_000)
    many = [Line(f"rank {at}", xs, [chance.random() for _ in xs]) for at in range(20)]
    drawn = curves(many, title="memory", across=axis([0, xs[-1]], "step"), up=axis([0, 1], "y"))
    assert len(drawn) < 250_000


def test_curves_on_each_other_are_all_seen() -> None:
    up = axis([0, 1], "loss")
    lines = [
        Line("a", [1, 2, 3], [0.5, 0.4, None]),
        Line("b", [1, 2, 3], [0.5, 0.4001, None]),
        Line("c", [1, 2, 3], [0.5, 0.6, None]),
        Line("d", [1, 2, 3], [0.5, 0.4, 0.3]),
        Line("e", [1, 2, 3], [0.5, 0.3999, None]),
    ]
    drawn = curves(lines, title="", across=axis([1, 3], "step"), up=up)
    styles = dict(re.findall(r'<path[^>]*data-line="(\w)"(?: style="([^"]*)")?', drawn))
    assert styles["a"] == styles["c"] == styles["d"] == ""
    assert styles["b"].startswith("stroke-dasharray:7 14;stroke-dashoffset:-7;")
    assert styles["e"].startswith("stroke-dasharray:7 14;stroke-dashoffset:-14;")
    marks = [Line(name, [1], [0.5], dots=True) for name in "ab"]
    drawn = curves(marks, title="", across=axis([1, 3], "step"), up=up)
    assert re.findall(r"stroke-width:(\d+)px", drawn) == ["11", "7"]
    assert 'style="stroke-width:11px"' in standalone(drawn)


def test_what_differs_by_rounding_is_not_zoomed_to() -> None:
    close = axis([4.120720085, 4.120720065], "loss")
    assert close.low < 3 and close.high > 5
    assert axis([4.1207, 4.1208], "loss").high < 4.121


def test_no_two_of_many_parts_look_the_same() -> None:
    drawn = stacked([StackedBar("plan", {f"cause {at}": 1.0 for at in range(10)})], "{:g} s".format, title="time")
    classes = re.findall(r"<span class='(.*?)'>", drawn)
    assert len({*classes}) == 10 and classes[8] == "c0 again" == re.findall(r'<i class="(.*?)"', drawn)[8]
    assert 'class="swatch c0 again"' in standalone(drawn)
