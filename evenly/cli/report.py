"""`evenly report`: summarizes a run from its folder, as tables and as a page; or compares several."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from evenly.cli.tables import print_table
from evenly.errors import UserError
from evenly.report import analysis, compare
from evenly.report import predicted as prediction
from evenly.report.run import MEMORY_HEADS, RunSummary, balance, course_rows, memory_rows, read_run
from evenly.report.runpage import page
from evenly.report.spans import RecordedSpans, read_recorded
from evenly.report.timeline import (
    HEADS,
    STEP_HEADS,
    PipelineView,
    StepView,
    figures,
    pipeline_of,
    pipeline_rows,
    sections_of,
    step_figures,
    step_of,
    step_rows,
    step_title,
    title,
)
from evenly.report.timeline import trace as trace_of


def report(folders: Sequence[Path], *, out: Path | None, json_only: bool) -> int:
    """Shows the run in the one folder, or compares those in several. Returns the exit code.

    out: of the page; by default report.html in the run's folder, or comparison.html here.
    """
    return (_one if len(folders) == 1 else _several)(folders, out, json_only=json_only)


def _one(folders: Sequence[Path], out: Path | None, *, json_only: bool) -> int:
    (folder,) = folders
    run, recorded = read_run(folder), read_recorded(folder)
    pipeline = pipeline_of(recorded, run.plan) if recorded else None
    step = step_of(recorded, run.plan) if recorded else None
    path = out or folder / "report.html"
    _write(path, page(run, folder, *sections_of(pipeline, step), now_s=time.time()))
    if recorded:
        _write(folder / "timeline.json", json.dumps(trace_of(recorded)))
    if json_only:
        shown = {"pipeline": figures(pipeline) if pipeline else None, "timeline": step_figures(step) if step else None}
        print(json.dumps({**asdict(run), **shown}))
        return 0

    _show(run, pipeline, step)
    _say_of(recorded, pipeline, step, folder)
    print(f"pictures in {path}", file=sys.stderr)
    return 0


def _say_of(recorded: RecordedSpans | None, pipeline: PipelineView | None, step: StepView | None, folder: Path) -> None:
    if recorded and not pipeline and not step:
        print("no step was recorded whole by all ranks", file=sys.stderr)
    if recorded:
        print(f"every span in {folder / 'timeline.json'}, for ui.perfetto.dev", file=sys.stderr)


def _several(folders: Sequence[Path], out: Path | None, *, json_only: bool) -> int:
    runs = compare.named(folders, [read_run(folder) for folder in folders])
    path = out or Path("comparison.html")
    _write(path, compare.page(runs, now_s=time.time()))
    if json_only:
        print(json.dumps(compare.as_json(runs, time.time())))
        return 0
    print_table("", ("", *runs), compare.rows(runs, time.time(), differing=True))
    print(f"pictures in {path}", file=sys.stderr)
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", errors="replace")  # a name may hold what is no letter
    except OSError as problem:
        raise UserError(f"write {path}", str(problem), "name a file that can be written: --html FILE") from None


def _show(run: RunSummary, pipeline: PipelineView | None, step: StepView | None) -> None:
    print_table("", ("", ""), course_rows(run))
    if run.memory:
        print_table(
            f"tensors at the peak, MiB; {balance(run.memory)}", MEMORY_HEADS, memory_rows(run.memory), wrapping=()
        )
    if predicted := prediction.predicted_of(run):
        print_table(prediction.STEP_TITLE, prediction.STEP_HEADS, prediction.step_rows(run, predicted), wrapping=())
    if predicted and run.memory:
        print_table(prediction.MEMORY_TITLE, prediction.MEMORY_HEADS, prediction.memory_rows(run, predicted))
    if rows := analysis.communication_rows(run):
        print_table("communication, seconds of a step, mean of all ranks", analysis.COMMUNICATION_HEADS, rows)
    if pipeline:
        print_table(title(pipeline), HEADS, pipeline_rows(pipeline))
    if step:
        print_table(step_title(step), STEP_HEADS, step_rows(step))
