"""`evenly plan --explain`: how a plan splits and cuts a job's model, as tables, JSON, and pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evenly.cli.tables import print_table, print_wrapped
from evenly.data.alone import looking
from evenly.jobfile import load_job, parse_settings, read_with
from evenly.plan import PlanSpec, parse_plan


def explain(job: Path, only: str, settings: list[str], *, json_only: bool, html: Path | None = None) -> int:
    """Explains; returns the exit code. html: where pictures go."""
    parsed, values = read_with(job, lambda: parse_plan(only)), parse_settings(settings)
    with looking():
        cuts = parsed.splits_tensors or parsed.splits_blocks
        documents = _explained(job, parsed, values) if cuts or html is None else []
        page = None if html is None else _pictures(job, parsed, values, documents)
    if json_only:
        print(json.dumps({key: value for document in documents for key, value in document.items()}))
    for document in () if json_only else documents:
        (_print_stages if "stages" in document else _print_tables)(document)
    if html is not None and page is not None:
        from evenly.cli.pages import write_page

        write_page(html, page)
    return 0


def _pictures(job: Path, plan: PlanSpec, values: dict[str, Any], documents: list[dict[str, Any]]) -> str:
    from evenly.planner.mechanisms import mechanisms_of
    from evenly.report.mechanisms import page

    return page(str(job), mechanisms_of(load_job(job, values), plan), documents)


def _explained(job: Path, plan: PlanSpec, values: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if plan.splits_tensors or not plan.splits_blocks:
        from evenly.engine.find_splits import explain_splits

        found.append({"job": str(job), **asdict(explain_splits(load_job(job, values), plan))})
    if plan.splits_blocks:
        from evenly.engine.find_stages import explain_stages

        found.append({"job": str(job), **asdict(explain_stages(load_job(job, values), plan))})
    return found


def _print_stages(document: Mapping[str, Any]) -> None:
    from evenly.report.splits import STAGE_HEADS, stage_rows, stage_title, stages_in_a_line

    print_table(stage_title(document), STAGE_HEADS, stage_rows(document), wrapping=("blocks", "receives"))
    print_wrapped(stages_in_a_line(document))


def _print_tables(document: Mapping[str, Any]) -> None:
    from evenly.report.splits import GROUP_HEADS, WHOLE_HEADS, full_rows, group_rows, group_title, in_a_line

    print_table(group_title(document), GROUP_HEADS, group_rows(document), wrapping=(GROUP_HEADS[0], ""))
    print_table(
        "in no group, and so whole", WHOLE_HEADS, full_rows(document), wrapping=(WHOLE_HEADS[0], WHOLE_HEADS[-1])
    )
    print_wrapped(in_a_line(document))
