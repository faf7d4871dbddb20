"""The page of a run: all sections, no name as markup, small whatever the run."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from made_runs import MIB, PREDICTED, lines, plan, record, write_full_run, write_run

from evenly.observe.sinks import finite
from evenly.report.analysis import SMOOTHED
from evenly.report.draw import ROOM
from evenly.report.growing import GrowingFile
from evenly.report.page import MOST_ROWS, Figure, document, head, table
from evenly.report.predicted import predicted_of, step_rows
from evenly.report.run import RunReader, RunSummary, course_rows, logged_curves, read_run
from evenly.report.runpage import figures, page
from evenly.report.spans import read_recorded
from evenly.report.timeline import pipeline_of, sections_of, step_of


def drawn(folder: Path) -> str:
    run, recorded = read_run(folder), read_recorded(folder)
    sections = sections_of(pipeline_of(recorded, run.plan), step_of(recorded, run.plan)) if recorded else []
    return page(run, folder, *sections, now_s=run.changed_s + 1)


def titles(text: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", text)


def test_a_page_has_all_that_is_known(tmp_path: Path) -> None:
    text = drawn(write_full_run(tmp_path))
    assert titles(text) == [
        "Loss",
        "Learning rate and gradient",
        "Time of steps",
        "Where time goes",
        "The timeline of a step",
        "Memory",
        "Predicted and measured",
        "Starts, faults and restarts",
        "The run in words",
    ]
    assert text.count("<details>") >= 6 and "rank 1 computed for 800 ms" in text
    assert "under way between ranks" in text
    assert "alert(1)" in text and "<script>alert" not in text
    assert text.count("<script>") == 1 and not re.findall(r"<(?:script|img|iframe|link)[^>]*\ssrc=", text)


def test_the_head_says_what_matters(tmp_path: Path) -> None:
    run = read_run(write_full_run(tmp_path))
    found = {one.name: (one.value, one.note) for one in figures(run, run.changed_s)}
    assert found["state"] == ("ended", "step 40 of 40") and found["loss"] == ("0.8000", "from 3.6364")
    assert found["evaluation loss"] == ("0.8400", "best 0.8400")
    assert found["speed"] == ("320 tokens/s", "200 ms a step, 40 samples/s")
    assert found["peak memory"] == ("680 MiB", "17% of 4 GiB")
    assert found["computing"][0].endswith("%") and "waiting" in found["computing"][1]
    assert found["communication hidden"] == ("55%", "data 55%")
    going = RunSummary(run.plan, run.steps[:20], (), (), events=run.events[:1], changed_s=run.changed_s)
    left = next(one for one in figures(going, run.changed_s + 1) if one.name == "time left")
    assert left.value == "0:04"


def test_figures_of_a_head_fill_its_rows() -> None:
    in_a_row = [re.findall(r"--in-a-row:(\d+)", head([Figure("loss", "1.2 s")] * count))[0] for count in (6, 7, 8, 15)]
    assert in_a_row == ["6", "7", "4", "5"]
    values = ("4,742 samples/s", "3 d 4 h", "not finite", "0:07", "8xH100")
    found = re.findall(r"</dt><dd>(.*?)</dd>", head([Figure("", value) for value in values]))
    assert found == ["4,742 <small>samples/s</small>", *values[1:]]


def test_a_curve_is_smoothed_where_that_is_another(tmp_path: Path) -> None:
    for count, named in ((SMOOTHED, False), (SMOOTHED + 1, True)):
        text = drawn(write_run(tmp_path / str(count), [record(step, loss=step % 7) for step in range(1, count + 1)]))
        assert (text.count('data-line="smoothed"') > 0) == named
        assert text.count('data-line="each step"') == (6 if named else 3)  # a curve, and its button in a legend


def test_a_page_says_one_time_of_a_step(tmp_path: Path) -> None:
    """The usual steps' in its head, its table and next to the prediction, however long the first one took."""
    counted = [{"parameters": MIB}] * 2
    records = [record(1, step_s=5.0), record(2, step_s=3.0, memory=counted), record(3, step_s=0.25)]
    run = read_run(write_run(tmp_path, records, of_plan=plan(predicted=PREDICTED)))
    found = {one.name: one.note for one in figures(run, run.changed_s)}
    assert found["speed"].startswith("250 ms a step")
    assert dict(course_rows(run))["seconds per step"] == "0.25 (median)"
    prediction = predicted_of(run)
    assert prediction is not None and step_rows(run, prediction)[0][:3] == ("seconds per step", "0.15", "0.25")


def test_a_run_that_has_done_nothing_has_a_page(tmp_path: Path) -> None:
    text = drawn(write_run(tmp_path, []))
    assert titles(text) == ["The run in words"] and "not begun" in text


def test_a_page_is_small_however_long_the_run(tmp_path: Path) -> None:
    chance = random.Random(0)
    metrics = {f"metric {at}": 0.0 for at in range(30)}
    records = [
        record(
            step,
            loss=chance.random(),
            grad_norm=chance.random(),
            step_s=0.1 + 0.1 * chance.random(),
            memory_bytes=[(500 + chance.randrange(100)) * MIB for _ in range(64)],
            busy_s=[0.05 + 0.01 * chance.random() for _ in range(64)],
            metrics={name: chance.random() for name in metrics},
        )
        for step in range(1, 4001)
    ]
    records[1234]["loss"] = 7777.0
    counted = [{"parameters": MIB, "activations": MIB} for _ in range(64)]
    records[1]["memory"] = counted
    text = drawn(write_run(tmp_path, records, of_plan=plan(world=64, job="x" * 100_000)))
    assert len(text.encode()) < 1_000_000
    (loss,) = re.findall(r'<path class="line c0 faint" data-line="each step" d="([^"]*)"', text)
    places = [(int(x), int(y)) for x, y in re.findall(r"[ML](\d+),(\d+)", loss)]
    assert min(places, key=lambda place: place[1])[0] == round(1_000_000 * 1234 / 3999)
    assert "6 further metrics" in text and "8 of 64 devices" in text


def test_what_a_run_names_is_cut_and_escaped() -> None:
    text = document("a<b", table(["<x>"], [["<y>", "z" * 10_000]] * (MOST_ROWS + 5)), lead="<lead>")
    assert not {"<x>", "<y>", "<lead>", "a<b"} & {*re.findall(r"<\w+>|a<b", text)}
    assert "z" * 601 not in text and "and 5 more" in text


# --- reading while it grows ----------------------------------------------------------------------------


def test_no_line_is_read_twice(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text('{"a": 1}\n{"b": ')
    file = GrowingFile(path)
    assert file.lines() == ['{"a": 1}'] and file.lines() == []
    with path.open("a") as more:
        more.write('{"c": {}}')  # is within b, which has not ended
    assert file.lines() == []
    with path.open("a") as more:
        more.write('}\n{"d": 1}')
    assert file.lines() == ['{"b": {"c": {}}}', '{"d": 1}'] and not file.begun_again
    path.write_text('{"e": 1}\n')
    assert file.lines() == ['{"e": 1}'] and file.begun_again


def test_the_tail_of_a_long_file_has_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1000)))
    file = GrowingFile(path, tail_bytes=40)
    assert file.lines() == ['{"step": 998}', '{"step": 999}']
    with path.open("a") as more:
        more.write('{"step": 1000}\n')
    assert file.lines() == ['{"step": 1000}']


@pytest.mark.parametrize("tail_bytes", [None, 2000])
def test_a_reader_follows_a_run(tail_bytes: int | None, tmp_path: Path) -> None:
    folder = write_run(tmp_path, [record(step) for step in range(1, 101)])
    reader = RunReader(folder, tail_bytes=tail_bytes)
    assert reader.read().steps[-1]["step"] == 100
    for step in range(101, 171):
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(lines([record(step)]))
        found = reader.read().steps
    assert found[-1]["step"] == 170 and len(found) == (170 if tail_bytes is None else 40)
    write_run(tmp_path, [record(1)])  # another run in the same folder
    assert [row["step"] for row in reader.read().steps] == [1]


def test_what_a_job_logs_is_drawn(tmp_path: Path) -> None:
    records = [record(step) for step in range(1, 9)]
    logged = [{"step": step, "<reward>": step / 4, "phase": "warm", "on": True, "each": [1, 2]} for step in (0, 2, 6)]
    run = read_run(write_run(tmp_path / "run", [*logged[:1], *records[:4], logged[1], *records[4:], *logged[2:]]))
    assert logged_curves(run) == {"<reward>": ([0, 2, 6], [0.0, 0.5, 1.5])}
    text = drawn(tmp_path / "run")
    section = re.findall(r"<h2>What the job logged</h2>(.*?)</section>", text, re.DOTALL)[0]
    assert section.count("<figure ") == 1 and "&lt;reward&gt;" in section and "<reward>" not in text
    top = round(1e5 * (1 - 1.5 / (1.5 + ROOM * 1.5)))
    assert "M0,100000h0" in section and f"M{round(1e6 * 6 / 8)},{top}h0" in section
    assert "What the job logged" not in drawn(write_run(tmp_path / "none", records))


def test_what_a_job_logs_again_is_drawn_once(tmp_path: Path) -> None:
    def both(*steps: int) -> list[dict[str, object]]:
        return [row for step in steps for row in (record(step), {"step": step, "reward": float(step)})]

    run = read_run(write_run(tmp_path, [*both(1, 2, 3), {"step": 3, "reward": None}, *both(3, 4)]))
    assert logged_curves(run) == {"reward": ([1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0])}
    assert [*read_run(tmp_path).evaluations] == []


@pytest.mark.parametrize(
    ("logged", "read"),
    [(None, None), (10**25, 10**25), (-(10**25), -(10**25)), (-(10**40), -1e40), (10**400, None), (float("nan"), None)],
    ids=("null", "whole", "negative", "beyond 30 digits", "beyond floats", "not finite"),
)
def test_any_number_that_a_job_logs_has_a_page(tmp_path: Path, logged: float | None, read: float | None) -> None:
    """10**400 is whole and no float; what is not finite is in the file as null."""
    strict = {**finite({"step": 1, "count": logged})}
    run = read_run(write_run(tmp_path, [record(1), {"step": 0, "count": 7}, strict, record(2)]))
    assert logged_curves(run) == {"count": ([0, 1], [7, read])} and len(run.steps) == 2
    assert "<h2>What the job logged</h2>" in drawn(tmp_path)
