"""Pictures as files: all that a figure says is in one well-formed SVG, which a browser shows without an error."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from evenly.report import draw

SVG = "{http://www.w3.org/2000/svg}"
NAME = '<b>a & "b"</b>\''


def curves() -> str:
    xs = [*range(50)]
    lines = [draw.Line("measured", xs, [x * 2**20 for x in xs]), draw.Line(NAME, xs, [2**22] * 50, dots=True)]
    up = draw.axis([0, 64 * 2**20], "bytes", units=draw.BYTES)
    across = draw.axis(xs, "operation")
    return draw.curves(lines, title="Memory", across=across, up=up, limit=(2**25, "the limit"))


def rows() -> str:
    found = [draw.Box(rank, at, at + 0.9, "forward", f"stage 1.{at}", pale=rank) for rank in (0, 1) for at in range(4)]
    return draw.boxes(["rank 0", NAME], [*found, draw.Box(0, 4, 4.001, "forward", "x.9")], {"forward": "c0"},
                      title="A step", longest=5)  # fmt: skip


def bars() -> str:
    parts = [
        draw.StackedBar("device 0", {"parameters": 3.0, NAME: 5.0}),
        draw.StackedBar("장치 1", {"parameters": 3.0}),
    ]
    return draw.stacked(parts, "{:.1f} B".format, title="Bars", limit=(6.0, "what there is"))


def texts(svg: str) -> list[str]:
    return ["".join(one.itertext()) for one in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_everything_that_a_figure_says_is_in_it() -> None:
    found = texts(draw.standalone(curves()))
    assert {"Memory", "measured", NAME, "the limit", "operation", "20", "20 MiB"} <= {*found}
    found = texts(draw.standalone(rows()))
    assert {"A step", "forward", "rank 0", NAME, "time", "1 s"} <= {*found}
    assert [text for text in found if text in "0123" and len(text) == 1] == [*"0123"] * 2 and "9" not in found
    found = texts(draw.standalone(bars()))
    assert {"Bars", "parameters", NAME, "device 0", "장치 1", "8.0 B", "3.0 B", "the line: what there is"} <= {*found}


def test_the_data_are_the_figure_s_own() -> None:
    for figure in (curves(), rows()):
        ours = [one.get("d") for one in ElementTree.fromstring(draw.standalone(figure)).iter(f"{SVG}path")]
        assert ours == re.findall(r' d="([^"]+)"', figure) and ours


def test_parts_of_a_bar_are_as_long_as_they_are() -> None:
    root = ElementTree.fromstring(draw.standalone(bars()))
    found = [one for one in root.iter(f"{SVG}rect") if one.find(f"{SVG}title") is not None]
    widths = [float(one.get("width", 0)) + 1 for one in found]
    assert widths == pytest.approx([widths[0], widths[0] * 5 / 3, widths[0]], abs=0.2)
    assert [one.findtext(f"{SVG}title") for one in found][:2] == ["parameters: 3.0 B", f"{NAME}: 5.0 B"]


def test_figures_stand_below_each_other_in_light_and_dark() -> None:
    svg = draw.standalone(curves(), rows(), bars(), title=NAME)
    root = ElementTree.fromstring(svg)
    height = float(root.get("height", 0))
    titles = [float(one.get("y", 0)) for one in root.iter(f"{SVG}text") if one.text in ("Memory", "A step", "Bars")]
    assert titles == sorted(titles) and titles[0] > 0 and titles[-1] < height
    assert all(0 <= float(one.get("y", 0)) <= height for one in root.iter(f"{SVG}text"))
    assert root.findtext(f"{SVG}title") == NAME
    style = root.findtext(f"{SVG}style") or ""
    assert style.count(".picture{--") == 2 and "prefers-color-scheme:dark" in style and ":root" not in style
    for rule in (".c7{", ".line{", ".line.faint{", ".box.pale2{", ".box.c7{"):
        assert rule in style
    assert "table{" not in style and ".plot" not in style and len(style) < 2500
