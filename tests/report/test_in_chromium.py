"""Pages in a real browser, where there is one: no error on its console, nothing wider than the page, and it zooms."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from chromium import dump, needs_chromium
from made_runs import record, write_full_run, write_run

from evenly.report import compare, draw
from evenly.report.board import Board
from evenly.report.prices import page as prices_page
from evenly.report.run import read_run

pytestmark = needs_chromium

# Uses the page as a reader does, and writes what came of it into the title.
PROBE = """
<script>addEventListener("load", () => setTimeout(() => {
  const found = {};
  try {
    const page = document.documentElement, area = document.querySelector(".area"), figure = area.closest("figure");
    found.wider = [...document.querySelectorAll("main *")].filter((one) =>
      one.getBoundingClientRect().right > page.clientWidth + 1 && !one.closest(".scroll, svg, pre, .ticks, .texts"))
      .map((one) => `${one.tagName}.${one.className}`).slice(0, 5);
    const box = area.getBoundingClientRect();
    const at = (kind, x, more) => area.dispatchEvent(new PointerEvent(kind,
      { clientX: box.left + x * box.width, clientY: box.top + box.height / 2, bubbles: true, pointerId: 1, ...more }));
    at("pointermove", 0.5);
    found.tip = document.querySelector(".tip").textContent;
    at("pointerdown", 0.25, { pointerType: "touch" });
    at("pointermove", 0.75, { pointerType: "touch" });
    at("pointerup", 0.75, { pointerType: "touch" });
    found.zoomed = figure.querySelector("svg").getAttribute("viewBox").split(" ").map(Number);
    found.ticks = [...figure.querySelectorAll(".ticks .x")].map((one) => one.textContent);
    const plot = figure.querySelector(".plot");
    const press = (key) => plot.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    press("0");
    found.whole = figure.querySelector("svg").getAttribute("viewBox");
    press("ArrowRight");
    found.key = document.querySelector(".tip").textContent;
    figure.querySelector(".legend button")?.click();
    found.hidden = figure.querySelectorAll(".line.hidden").length;
    found.texts = document.querySelectorAll(".texts b").length;
    window.evenly.setUp(document);
    found.still = figure.querySelectorAll(".line.hidden").length;
  } catch (problem) { found.problem = String(problem.stack); }
  document.title = JSON.stringify(found);
}, 50))</script>
"""


# Sorts by a click and by a key, points at a point, goes from a row to its point, and moves a slider.
PROBE_OF_PLANS = """
<script>addEventListener("load", () => setTimeout(() => {
  const found = {};
  try {
    const page = document.documentElement, table = document.querySelector("table.sortable");
    found.wider = [...document.querySelectorAll("main *")].filter((one) =>
      one.getBoundingClientRect().right > page.clientWidth + 1 && !one.closest(".scroll, svg, pre, .ticks, .texts"))
      .map((one) => `${one.tagName}.${one.className}`).slice(0, 5);
    const column = (at) => [...table.tBodies[0].rows].map((row) => Number(row.cells[at].dataset.value));
    const heads = [...table.tHead.querySelectorAll("button")];
    found.first = column(3);
    heads[3].click();
    found.sorted = column(3);
    heads[3].focus();
    heads[3].click();
    found.down = [column(3), heads[3].closest("th").getAttribute("aria-sort"), document.activeElement === heads[3]];
    const row = table.tBodies[0].rows[1];
    row.querySelector("button").focus();
    found.named = document.querySelector(".tip").textContent;
    found.number = row.cells[0].textContent;
    row.querySelector("button").blur();
    const area = document.querySelector("figure.points .area"), box = area.getBoundingClientRect();
    const mark = () => document.querySelector("figure.points .mark");
    area.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + 0.9 * box.width, clientY: box.top + 1 }));
    found.hovered = [document.querySelector(".tip").textContent, mark().hidden];
    const plot = document.querySelector("figure.points .plot");
    const press = (key) => plot.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    press("Escape"), press("ArrowLeft"), press("ArrowLeft"), press("Enter");
    found.marked = document.querySelector("tr.on")?.cells[0].textContent;
    const panes = [...document.querySelectorAll(".pane")];
    const shown = () => panes.filter((pane) => !pane.hidden).map((pane) => pane.dataset.at);
    found.before = shown();
    const slider = document.querySelector("input[type=range]");
    slider.value = slider.max;
    slider.dispatchEvent(new Event("input"));
    found.after = [...shown(), slider.nextElementSibling.textContent, slider.getAttribute("aria-valuetext")];
  } catch (problem) { found.problem = String(problem.stack); }
  document.title = JSON.stringify(found);
}, 50))</script>
"""


def opened(page: str, folder: Path, width: int, probe: str = PROBE) -> dict[str, Any]:
    """What the probe found on `page` in a window of `width` pixels; fails where the console has an error."""
    (folder / "page.html").write_text(page + probe, encoding="utf-8")
    (folder / "frame.html").write_text(
        "<!doctype html><title>frame</title>"
        f"<iframe src=page.html style='width:{width}px;height:900px;border:0'></iframe>"
        "<script>onload=()=>setInterval(()=>{document.title=frames[0].document.title},20)</script>"
    )
    wide = f"--window-size={max(600, width + 50)},1000"
    found = dump(folder / "frame.html", "--allow-file-access-from-files", wide, budget_ms=3000)
    (title,) = re.findall(r"<title>(.*?)</title>", found)
    return json.loads(unescape(title))


@pytest.mark.parametrize("width", [1300, 400])
def test_the_page_of_a_run(width: int, tmp_path: Path) -> None:
    from test_run_page import drawn

    found = opened(drawn(write_full_run(tmp_path / "run")), tmp_path, width)
    assert "problem" not in found, found["problem"]
    assert found["wider"] == [] and found["tip"].startswith("step ") and "each step: " in found["tip"]
    left, _, across, high = found["zoomed"]
    assert (left, across) == (pytest.approx(250_000, abs=5000), pytest.approx(500_000, abs=10_000)) and high < 100_000
    assert len(found["ticks"]) >= 2 and found["whole"] == "0 0 1000000 100000"
    assert found["key"].startswith("step 1\n") and found["hidden"] == 1 == found["still"] and found["texts"] > 0


def test_a_comparison(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, [record(step) for step in range(1, 9)]) for name in ("a", "b")]
    page = compare.page(compare.named(folders, [read_run(folder) for folder in folders]), now_s=0)
    found = opened(page, tmp_path, 400)
    assert "problem" not in found and found["wider"] == [] and "a: " in found["tip"] and "b: " in found["tip"]


@pytest.mark.parametrize("width", [1300, 400])
def test_the_page_of_plans(width: int, tmp_path: Path) -> None:
    from test_plan_page import drawn_plans

    found = opened(drawn_plans(), tmp_path, width, PROBE_OF_PLANS)
    assert "problem" not in found, found["problem"]
    assert found["wider"] == [] and found["sorted"] == sorted(found["first"]) != found["first"]
    assert found["down"] == [sorted(found["first"], reverse=True), "descending", True]
    assert found["named"].startswith(f"{found['number']}. data=") and found["hovered"][0] and not found["hovered"][1]
    assert found["marked"] and found["before"] == ["8 16"] and found["after"] == ["32 16", "32", "32"]


@pytest.mark.parametrize("width", [1300, 400])
def test_the_page_of_mechanisms(width: int, tmp_path: Path) -> None:
    from test_mechanisms_page import drawn_mechanisms

    found = opened(drawn_mechanisms(), tmp_path, width)
    assert "problem" not in found, found["problem"]
    assert found["wider"] == [] and found["tip"].startswith("rank 1") and found["texts"] > 10


def test_the_page_of_prices(tmp_path: Path) -> None:
    from test_prices import FAST, NONE, SLOW

    page = prices_page("gpt2", [SLOW, FAST, NONE], 8, assumed=False)
    of_prices = PROBE_OF_PLANS.replace("column(3)", "column(2)").replace("heads[3]", "heads[2]")
    found = opened(page, tmp_path, 400, of_prices)
    assert found["wider"] == [] and found["named"].startswith("<4xA100>\n4 s a step")


def test_what_takes_the_place_of_a_page(tmp_path: Path) -> None:
    """The first figures of a live page, as `live.js` puts them in."""
    write_full_run(tmp_path / "run")
    board = Board(tmp_path)
    page = board.page("run", script="window.live = 1;").text.replace("connect-src 'self'", "connect-src 'none'")
    replaced = json.dumps(board.page("run").text).replace("</", "<\\/")
    script = f"<script>document.querySelector('main').innerHTML={replaced};window.evenly.setUp(document)</script>"
    found = opened(page + script, tmp_path, 1300)
    assert "problem" not in found and found["tip"].startswith("step ")


def test_a_picture_as_a_file(tmp_path: Path) -> None:
    """As an image, in which no script runs and nothing is fetched."""
    from test_standalone import bars, curves, rows

    (tmp_path / "picture.svg").write_text(draw.standalone(curves(), rows(), bars()), encoding="utf-8")
    (tmp_path / "page.html").write_text(
        "<!doctype html><img src=picture.svg onload='document.title=`${this.naturalWidth} wide`'>"
    )
    assert "<title>760 wide</title>" in dump(tmp_path / "page.html", budget_ms=2000)
