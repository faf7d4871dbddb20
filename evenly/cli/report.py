"""`evenly report`: summarizes a run from its folder, as tables and as a page."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from evenly.cli.tables import print_table
from evenly.errors import UserError
from evenly.report import predicted as prediction
from evenly.report.run import MEMORY_HEADS, RunSummary, balance, course_rows, memory_rows, page, read_run
from evenly.report.spans import read_recorded
from evenly.report.timeline import HEADS, PipelineView, figures, pipeline_of, pipeline_rows, section, title
from evenly.report.timeline import trace as trace_of


def report(folder: Path, *, json_only: bool) -> int:
    """Shows the run in `folder`; writes its report.html, and of a pipeline timeline.json. Returns the exit code."""
    run, recorded = read_run(folder), read_recorded(folder)
    pipeline = pipeline_of(recorded, run.plan) if recorded else None
    predicted = prediction.predicted_of(run)
    sections = [prediction.section(run, predicted)] if predicted else []
    sections += section(pipeline) if pipeline else []
    _write(folder / "report.html", page(run, *sections))
    if recorded:
        _write(folder / "timeline.json", json.dumps(trace_of(recorded)))
    if json_only:
        print(json.dumps({**asdict(run), "pipeline": figures(pipeline) if pipeline else None}))
        return 0

    _show(run, predicted, pipeline)
    if recorded and not pipeline:
        print("no step of the pipeline was recorded whole by all ranks", file=sys.stderr)
    print(f"pictures in {folder / 'report.html'}", file=sys.stderr)
    if recorded:
        print(f"every span in {folder / 'timeline.json'}, for ui.perfetto.dev", file=sys.stderr)
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", errors="replace")  # a name may hold what is no letter
    except OSError as problem:
        raise UserError(f"write {path}", str(problem), "make the folder writable") from None


def _show(run: RunSummary, predicted: prediction.Predicted | None, pipeline: PipelineView | None) -> None:
    print_table("", ("", ""), course_rows(run))
    if run.memory:
        print_table(
            f"tensors at the peak, MiB; {balance(run.memory)}", MEMORY_HEADS, memory_rows(run.memory), wrapping=()
        )
    if predicted:
        print_table(prediction.STEP_TITLE, prediction.STEP_HEADS, prediction.step_rows(run, predicted), wrapping=())
    if predicted and run.memory:
        print_table(prediction.MEMORY_TITLE, prediction.MEMORY_HEADS, prediction.memory_rows(run, predicted))
    if pipeline:
        print_table(title(pipeline), HEADS, pipeline_rows(pipeline))
