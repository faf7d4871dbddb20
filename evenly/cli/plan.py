"""`evenly plan`: what a plan makes of a job, as tables or as JSON; so far, how it splits and cuts the job's model."""

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
from evenly.plan import Plan, parse_plan

WIDTH_OF_FILES = 160  # columns, where the output is read by no terminal


def plan(job: Path, only: str, *, explain: bool, settings: list[str], json_only: bool) -> int:
    """Explains; returns the exit code."""
    if not explain:
        raise UserError(
            "evenly plan without --explain",
            "the prediction of memory and time is not part of this version yet",
            "add --explain, which tells what the tensor axis splits of the model, and where the pipeline cuts it",
        )
    parsed, values = parse_plan(only), parse_settings(settings)
    with redirect_stdout(sys.stderr):  # what the job prints is no part of the answer
        documents = _explained(job, parsed, values)
    if json_only:
        print(json.dumps({key: value for document in documents for key, value in document.items()}))
    for document in () if json_only else documents:
        (_print_stages if "stages" in document else _print_tables)(document)
    return 0


def _explained(job: Path, plan: Plan, values: dict[str, Any]) -> list[dict[str, Any]]:
    """What the axes of `plan` do to the job's model."""
    found: list[dict[str, Any]] = []
    if plan.splits_tensors or not plan.splits_blocks:
        from evenly.train.splitting import explain_splits

        found.append({"job": str(job), **asdict(explain_splits(load_job(job, values), plan))})
    if plan.splits_blocks:
        from evenly.train.staging import explain_stages

        found.append({"job": str(job), **asdict(explain_stages(load_job(job, values), plan))})
    return found


def _print_stages(document: Mapping[str, Any]) -> None:
    from evenly.report.stages import STAGE_HEADS, stage_rows, stage_title, stages_in_a_line

    _print_table(stage_title(document), STAGE_HEADS, stage_rows(document))
    print(stages_in_a_line(document))


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
