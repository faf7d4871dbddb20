"""`evenly plan`: what a plan makes of a job, as tables or as JSON; so far, what the tensor axis splits of its model."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evenly.errors import UserError
from evenly.jobfile import load_job, parse_settings
from evenly.plan import parse_plan

WIDTH_OF_FILES = 160  # columns, where the output is read by no terminal


def plan(job: Path, only: str, *, explain: bool, settings: list[str], json_only: bool) -> int:
    """Explains; returns the exit code."""
    if not explain:
        raise UserError(
            "evenly plan without --explain",
            "the prediction of memory and time is not part of this version yet",
            "add --explain, which tells what the tensor axis splits of the model, and why",
        )
    parsed, values = parse_plan(only), parse_settings(settings)
    from evenly.train.splitting import explain_splits

    with redirect_stdout(sys.stderr):  # what the job prints is no part of the answer
        explanation = explain_splits(load_job(job, values), parsed)
    document = {"job": str(job), **asdict(explanation)}
    if json_only:
        print(json.dumps(document))
    else:
        _print_tables(document)
    return 0


def _print_tables(document: Mapping[str, Any]) -> None:
    from evenly.report.splits import GROUP_HEADS, WHOLE_HEADS, group_rows, group_title, in_a_line, whole_rows

    _print_table(group_title(document), GROUP_HEADS, group_rows(document))
    _print_table("in no group, and so whole", WHOLE_HEADS, whole_rows(document))
    print(in_a_line(document))


def _print_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # a [ in a name opens no markup
    Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES).print(table)
