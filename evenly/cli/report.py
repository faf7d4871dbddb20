"""`evenly report`: tells what a run's folder holds, and draws it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evenly.errors import UserError
from evenly.report import predicted as prediction
from evenly.report.run import MEMORY_HEADS, RunSummary, balance, course_rows, memory_rows, page, read_run
from evenly.report.spans import read_recorded
from evenly.report.timeline import HEADS, PipelineView, figures, pipeline_of, pipeline_rows, section, title
from evenly.report.timeline import trace as trace_of

WIDTH_OF_FILES = 160  # columns, where the output is read by no terminal


def report(folder: Path, *, json_only: bool) -> int:
    """Shows the run in `folder`; writes its report.html, and of a pipeline timeline.json. Returns the exit code."""
    run, recorded = read_run(folder), read_recorded(folder)
    pipeline = pipeline_of(recorded, run.plan) if recorded else None
    predicted = prediction.predicted_of(run)
    sections = [prediction.section(run, predicted)] if predicted else []
    sections += [section(pipeline)] if pipeline else []
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
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise UserError(f"write {path}", str(problem), "make the folder writable") from None


def _show(run: RunSummary, predicted: prediction.Predicted | None, pipeline: PipelineView | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES)
    course = Table(box=None, show_header=False)
    for row in course_rows(run):
        course.add_row(*row)
    console.print(course)
    if run.memory:
        heads = f"tensors at the peak, MiB; {balance(run.memory)}"
        console.print(_table(heads, MEMORY_HEADS, memory_rows(run.memory)))
    if predicted:
        console.print(_table(prediction.STEP_TITLE, prediction.STEP_HEADS, prediction.step_rows(run, predicted)))
    if predicted and run.memory:
        rows = prediction.memory_rows(run, predicted)
        console.print(_table(prediction.MEMORY_TITLE, prediction.MEMORY_HEADS, rows))
    if pipeline:
        console.print(_table(title(pipeline), HEADS, pipeline_rows(pipeline)))


def _table(words: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=SIMPLE_HEAD, title=words)
    for head in heads:
        shown.add_column(head, overflow="fold")
    for row in rows:
        shown.add_row(*map(Text, row))  # a [ in a name opens no markup
    return shown
