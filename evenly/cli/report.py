"""`evenly report`: tells what a run's folder holds, and draws it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from evenly.errors import UserError
from evenly.report.run import MEMORY_HEADS, balance, course_rows, memory_rows, page, read_run


def report(folder: Path, *, json_only: bool) -> int:
    """Shows the run in `folder` and writes its report.html; returns the exit code."""
    run = read_run(folder)
    path = folder / "report.html"
    try:
        path.write_text(page(run), encoding="utf-8")
    except OSError as problem:
        raise UserError(f"write {path}", str(problem), "make the folder writable") from None
    if json_only:
        print(json.dumps(asdict(run)))
        return 0

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    course = Table(box=None, show_header=False)
    for row in course_rows(run):
        course.add_row(*row)
    console.print(course)
    if run.memory:
        memory = Table(*MEMORY_HEADS, box=SIMPLE_HEAD, title=f"tensors at the peak, MiB; {balance(run.memory)}")
        for row in memory_rows(run.memory):
            memory.add_row(*row)
        console.print(memory)
    print(f"pictures in {path}", file=sys.stderr)
    return 0
