"""What ranks of a pipeline wrote, as a table, a picture and a trace; and files of another kind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from evenly.errors import UserError
from evenly.parallel.pipeline.orders import orders
from evenly.plan.schedule import Schedule
from evenly.planner.timeline import Costs, Span, simulate
from evenly.report.spans import read_recorded
from evenly.report.timeline import (
    figures,
    pipeline_of,
    pipeline_rows,
    section,
    step_figures,
    step_of,
    step_rows,
    step_section,
    title,
    trace,
)

NOON = 1_700_000_000.0


def spans_of(schedule: Schedule, ranks: int, number: int, microbatches: int, seconds: float = 1.0) -> list[Span]:
    one = [seconds] * (ranks * number)
    costs = Costs(forward=one, backward=[2 * seconds] * len(one), backward_input=one, backward_weight=one)
    return [*simulate(orders(schedule, ranks, number, microbatches), costs).spans]


def lines(spans: Iterable[Span], step: int, *, rank: int = 0, ranks_per_position: int = 1) -> dict[int, list[str]]:
    """By rank; `rank` is the first of the group's, whose ranks lie `ranks_per_position` apart."""
    files: dict[int, list[str]] = {}
    for span in spans:
        own = rank + span.rank * ranks_per_position
        row = {
            "step": step, "rank": own, "position": span.rank, "kind": span.kind, "stage": span.stage,
            "microbatch": span.microbatch, "begin_s": NOON + 1000 * step + span.begin_s,
            "end_s": NOON + 1000 * step + span.end_s,
        }  # fmt: skip
        files.setdefault(own, []).append(json.dumps(row) + "\n")
    return files


def write(folder: Path, *steps: dict[int, list[str]]) -> None:
    (folder / "timeline").mkdir(exist_ok=True)
    for files in steps:
        for rank, rows in files.items():
            with (folder / "timeline" / f"rank{rank}.jsonl").open("a") as file:
                file.writelines(rows)


def shown(folder: Path, plan: str, world: int) -> Any:
    recorded = read_recorded(folder)
    assert recorded is not None
    return pipeline_of(recorded, {"plan": plan, "world": world})


def test_the_step_of_median_length_is_shown(tmp_path: Path) -> None:
    for step, seconds in enumerate((9.0, 1.0, 2.0, 1.5, 2.5), 1):
        write(tmp_path, lines(spans_of("1f1b", 2, 1, 4, seconds), step))
    pipeline = shown(tmp_path, "pipeline=2 schedule=1f1b", 2)
    assert pipeline.step == 3 and pipeline.steps == 5
    assert title(pipeline) == "pipeline 1f1b: 2 stages, 4 microbatches; step 3, 30 s, the median of 5"
    assert pipeline_rows(pipeline) == [("0", "0", "24 s", "20.0%", "20.0%", "20.0%"),
                                       ("1", "1", "24 s", "20.0%", "20.0%", "20.0%")]  # fmt: skip


def test_what_runs_late_shows_beside_the_simulation(tmp_path: Path) -> None:
    spans = spans_of("gpipe", 2, 1, 2)
    late = [
        Span(s.rank, s.kind, s.stage, s.microbatch, s.begin_s + 3 * (s.rank == 1), s.end_s + 3 * (s.rank == 1))
        for s in spans if s.rank == 1 or s.kind == "forward"
    ] + [Span(0, "backward", 0, at, 9.0 + 2 * at, 11.0 + 2 * at) for at in range(2)]  # fmt: skip
    write(tmp_path, lines(late, 1))
    ranks = figures(shown(tmp_path, "schedule=gpipe", 2))["ranks"]
    assert [row["busy_s"] for row in ranks] == [6, 6]
    assert [row["bubble"] for row in ranks] == pytest.approx([1 - 6 / 13] * 2)
    assert [row["simulated_bubble"] for row in ranks] == pytest.approx([1 / 3] * 2)
    assert [row["ideal_bubble"] for row in ranks] == pytest.approx([1 / 3] * 2)


def test_replicas_are_told_apart_and_may_run_different_microbatches(tmp_path: Path) -> None:
    """Two replicas of two stages of a V, on ranks 0, 2 and 1, 3; the second has more to do."""
    write(tmp_path, lines(spans_of("zbv", 2, 2, 3), 1, ranks_per_position=2))
    write(tmp_path, lines(spans_of("zbv", 2, 2, 8), 1, rank=1, ranks_per_position=2))
    pipeline = shown(tmp_path, "data=2 pipeline=2 schedule=zbv", 4)
    assert [group.ranks for group in pipeline.groups] == [(0, 2), (1, 3)]
    rows = figures(pipeline)["ranks"]
    assert [(row["rank"], row["stages"], row["busy_s"]) for row in rows] == [
        (0, [0, 3], 18.0), (1, [0, 3], 48.0), (2, [1, 2], 18.0), (3, [1, 2], 48.0)
    ]  # fmt: skip
    assert [row["bubble"] for row in rows] == pytest.approx([1 / 19, 1 / 49, 1 / 19, 1 / 49])
    assert {row["ideal_bubble"] for row in rows} == {None} and pipeline_rows(pipeline)[0][-1] == "-"


def test_a_picture_has_a_box_for_every_pass_with_its_microbatch(tmp_path: Path) -> None:
    write(tmp_path, lines(spans_of("interleaved", 2, 2, 4), 1))
    pictures = [part for part in section(shown(tmp_path, "schedule=interleaved", 2)).parts if "<svg" in part]
    assert len(pictures) == 2
    for picture in pictures:
        found = drawn_boxes(picture)
        passes = [(text, classes) for kind, classes, text in found if kind != "waiting for a message"]
        assert len(passes) == 4 * 4 * 2 and len(found) > len(passes)
        assert {text for kind, _, text in found if kind == "waiting for a message"} == {""}
        assert sum(text.endswith(".3") for text, _ in passes) == 8
        assert dict(passes)["F0.0"] == "box c0" and dict(passes)["F2.0"] == "box c0 pale1"  # a rank's later stage


def drawn_boxes(picture: str) -> list[tuple[str, str, str]]:
    """Of every box its kind, its classes and its text."""
    found: list[tuple[str, str, str]] = []
    for classes, kind, texts, path in re.findall(
        r'<path class="([^"]*)" data-kind="([^"]*)" data-texts="([^"]*)" d="([^"]*)"', picture
    ):
        of_path = json.loads(unescape(texts))
        assert len(of_path) == path.count("M")
        found += [(kind, classes, text) for text in of_path]
    return found


def write_steps(folder: Path, rank: int, *steps: int, plan: float = 1.0) -> None:
    (folder / "timeline").mkdir(exist_ok=True)
    with (folder / "timeline" / f"rank{rank}.jsonl").open("a") as file:
        for step in steps:
            at = NOON + 10 * step
            place = {"step": step, "rank": rank, "position": 0}
            for row in (
                {"kind": "forward", "stage": 0, "microbatch": rank, "begin_s": at + 1, "end_s": at + 2},
                {"kind": "backward", "stage": 0, "microbatch": rank, "begin_s": at + 2, "end_s": at + 4},
                {"kind": "loading", "name": "", "begin_s": at, "end_s": at + 1},
                {"kind": "update", "name": "", "begin_s": at + 4, "end_s": at + 4 + plan * step},
                {
                    "kind": "operation",
                    "name": "all_reduce (<w>)",
                    "axis": "data",
                    "begin_s": at + 3,
                    "end_s": at + 5,
                    "waited_s": 0.5,
                },
            ):
                file.write(json.dumps({**place, **row}) + "\n")


def test_a_step_without_a_pipeline_is_drawn_with_what_ranks_exchange(tmp_path: Path) -> None:
    for rank in range(2):
        write_steps(tmp_path, rank, 1, 2, 3)
    recorded = read_recorded(tmp_path)
    assert recorded is not None
    plan = {"plan": "data=2", "world": 2}
    view = step_of(recorded, plan)
    assert view is not None and (view.step, view.steps, view.seconds) == (2, 3, 6.0)
    assert pipeline_of(recorded, plan) is None
    assert step_figures(view)[1] == {
        "rank": 1, "passes_s": 3.0, "communication_s": 2.0, "waited_s": 0.5, "loading_s": 1.0, "update_s": 2.0
    }  # fmt: skip
    found = drawn_boxes(step_section(view).parts[1])
    assert ("communication", "box c1", "all_reduce (<w>)") in found and len(found) == 10
    assert "<w>" not in step_section(view).parts[1]
    events = [event for event in trace(recorded)["traceEvents"] if event["ph"] == "X"]
    assert len(events) == 30 and {event["tid"] for event in events} == {0, 1, 1_000_000, 1_000_001}


def test_a_step_that_is_done_again_replaces_what_was_recorded_of_it(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, 1, 2, 3)
    write_steps(tmp_path, 0, 2, plan=7.0)
    write_steps(tmp_path, 0, 2, plan=0.5)  # the same once more
    recorded = read_recorded(tmp_path)
    assert recorded is not None and {*recorded.steps[0]} == {1, 2} == {*recorded.others[0]}
    assert len(recorded.steps[0][2]) == 2 and len(recorded.others[0][2]) == 3
    view = step_of(recorded, {"world": 1})
    assert view is not None and view.seconds == 5.0
    assert step_of(recorded, {"world": 2}) is None


def test_of_runs_that_recorded_no_waits_none_are_shown(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, 1)
    path = tmp_path / "timeline" / "rank0.jsonl"
    path.write_text(path.read_text().replace("waited_s", "other"))
    recorded = read_recorded(tmp_path)
    assert recorded is not None
    view = step_of(recorded, {"world": 1})
    assert view is not None and step_figures(view)[0]["waited_s"] is None and "-" in step_rows(view)[0]


def test_a_pipeline_stays_one_with_operations_along_other_axes(tmp_path: Path) -> None:
    for step in (1, 2, 2):  # the second was done again
        files = lines(spans_of("1f1b", 2, 1, 4), step)
        row = {"step": step, "rank": 0, "position": 0, "kind": "operation", "name": "all_reduce", "axis": "data"}
        row |= {"begin_s": NOON + 1000 * step + 1, "end_s": NOON + 1000 * step + 2, "waited_s": 0.5}
        files[0].append(json.dumps(row) + "\n")
        write(tmp_path, files)
    recorded = read_recorded(tmp_path)
    assert recorded is not None
    view = pipeline_of(recorded, {"plan": "data=2 pipeline=2", "world": 2})
    assert view is not None and view.steps == 2 and step_of(recorded, {"world": 2}) is None
    assert [len(found) for found in recorded.others[0].values()] == [1, 1]
    assert "all_reduce" in {event["name"] for event in trace(recorded)["traceEvents"]}


def test_steps_that_a_resumed_run_did_again_count_once(tmp_path: Path) -> None:
    once, again = spans_of("1f1b", 2, 1, 2), spans_of("1f1b", 2, 1, 2, 3.0)
    write(tmp_path, lines(once, 1), lines(once, 2), lines(once, 3), lines(again, 2))
    assert shown(tmp_path, "schedule=1f1b", 2).steps == 2
    write(tmp_path, lines(once[:3], 3), lines(again, 3))  # the step was repeated
    pipeline = shown(tmp_path, "schedule=1f1b", 2)
    assert (pipeline.steps, pipeline.step) == (3, 2)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_step_that_a_rank_did_not_end_is_not_shown(missing: int, tmp_path: Path) -> None:
    files = lines(spans_of("1f1b", 2, 1, 2), 1)
    write(tmp_path, {**files, missing: files[missing][:-2]})
    assert shown(tmp_path, "schedule=1f1b", 2) is None
    (tmp_path / "timeline" / f"rank{missing}.jsonl").unlink()
    assert shown(tmp_path, "schedule=1f1b", 2) is None


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, lines(spans_of("1f1b", 2, 1, 2), 1), {0: ['{"step": 2, "ra']})
    assert shown(tmp_path, "pipeline=2", 2).steps == 1


def test_a_trace_has_every_span_in_microseconds(tmp_path: Path) -> None:
    write(tmp_path, lines(spans_of("1f1b", 2, 1, 1), 1), lines(spans_of("1f1b", 2, 1, 1), 2))
    recorded = read_recorded(tmp_path)
    assert recorded is not None
    events = trace(recorded)["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == ["rank 0", "rank 1"]
    found = {(e["name"], e["args"]["step"]): (e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert found["F1.0", 1] == (1, 1e6, 1e6) and found["B0.0", 2] == (0, 1004e6, 2e6) and len(found) == 16


def test_a_run_without_a_pipeline_has_none(tmp_path: Path) -> None:
    assert read_recorded(tmp_path) is None


GOOD = {
    "step": 1, "rank": 0, "position": 0, "kind": "forward", "stage": 0, "microbatch": 0, "begin_s": 1.0, "end_s": 2.0
}  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "no JSON object"),
        ("{'step': 1}", "line 2 is no span"),
        (json.dumps({**GOOD, "step": "one"}), "step is 'one'"),
        (json.dumps({**GOOD, "stage": -1}), "stage is -1"),
        (json.dumps({**GOOD, "kind": "sideways"}), "kind is 'sideways'"),
        (json.dumps({**GOOD, "kind": ["forward"]}), "kind is"),
        (json.dumps({**GOOD, "begin_s": None}), "begin_s is None"),
        (json.dumps({**GOOD, "end_s": float("nan")}), "end_s is nan"),
        (json.dumps({**GOOD, "end_s": 0.5}), "ends before it begins"),
        (json.dumps({**GOOD, "rank": 1}), "of rank 1"),
        (json.dumps({**GOOD, "kind": "operation", "name": 3}), "name is 3"),
    ],
)
def test_files_of_another_kind_are_refused(line: str, message: str, tmp_path: Path) -> None:
    write(tmp_path, {0: [json.dumps(GOOD) + "\n", line + "\n", json.dumps(GOOD)]})
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        read_recorded(tmp_path)
    assert "rank0.jsonl" in refused.value.asked and "line 2" in refused.value.found
