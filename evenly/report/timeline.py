"""A pipeline's steps as run: compared with their simulation, drawn, and as a trace.

Ranks with the stages of one replica of the model are a *group*; each is simulated with the mean times of its own
stages and messages. What is shown is the step of median length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median_low
from typing import Any

from evenly.plan.schedule import COMPUTE, SCHEDULES, Action, Kind, Schedule
from evenly.planner.timeline import Timeline, costs_of, ideal_bubble, simulate
from evenly.report.comm import time_in_words
from evenly.report.page import heading, table
from evenly.report.pictures import schedule as drawn
from evenly.report.spans import RecordedPipeline, Row

HEADS = ("rank", "stages", "busy", "bubble as run", "simulated", "in theory")


@dataclass(frozen=True)
class RankRow:
    """A step of one replica, as run and simulated; a span's rank counts within `ranks`. `ideal`: the literature's."""

    ranks: tuple[int, ...]
    run: Timeline
    simulated: Timeline
    ideal: float | None


@dataclass(frozen=True)
class PipelineView:
    """The step of median length among the `steps` that are whole, number `step`, of every group."""

    schedule: Schedule | None
    step: int
    steps: int
    groups: Sequence[RankRow]


# --- choosing a step, and simulating it ----------------------------------------------------------------


def pipeline_of(recorded: RecordedPipeline, plan: Row) -> PipelineView | None:
    """The step to be shown; `plan` is what plan.json holds. None where no step was recorded whole by all ranks."""
    groups, world = recorded.groups, plan.get("world")
    ranks = {rank for group in groups for rank in group}
    if isinstance(world, int) and (len(ranks) != world or ranks != {*range(len(ranks))}):
        return None
    steps = set[int].intersection(*({*of_rank} for of_rank in recorded.steps.values()))
    runs = {step: [_run(recorded, group, step) for group in groups] for step in sorted(steps)}
    runs = {step: of_step for step, of_step in runs.items() if all(map(_is_whole, of_step))}
    if not runs:
        return None
    lengths = {step: max(run.makespan_s for run in of_step) for step, of_step in runs.items()}
    median = median_low(lengths.values())
    step = next(step for step, length in lengths.items() if length == median)
    schedule = _schedule(plan)
    shown = [_group(ranks, run, schedule) for ranks, run in zip(groups, runs[step], strict=True)]
    return PipelineView(schedule, step, len(runs), shown)


def _schedule(plan: Row) -> Schedule | None:
    words = str(plan.get("plan")).split()
    named = next((word.removeprefix("schedule=") for word in words if word.startswith("schedule=")), "1f1b")
    return named if named in SCHEDULES else None


def _run(recorded: RecordedPipeline, group: Sequence[int], step: int) -> Timeline:
    spans = (replace(span, rank=at) for at, rank in enumerate(group) for span in recorded.steps[rank].get(step, ()))
    return Timeline(len(group), sorted(spans, key=lambda span: (span.rank, span.begin_s)))


def _is_whole(run: Timeline) -> bool:
    """Whether every rank has spans, and every stage its passes on all microbatches."""
    done: dict[Kind, set[tuple[int, int]]] = {kind: set() for kind in COMPUTE}
    for span in run.spans:
        done.get(span.kind, set()).add((span.stage, span.microbatch))
    forward = done["forward"]
    everything = {*product(range(1 + max((at for at, _ in forward), default=0)), {number for _, number in forward})}
    back = done["backward"] | done["backward_input"]
    all_ranks = len({span.rank for span in run.spans if span.kind in COMPUTE}) == run.ranks
    return all_ranks and everything == forward == back and done["backward_input"] == done["backward_weight"]


def _group(ranks: tuple[int, ...], run: Timeline, schedule: Schedule | None) -> RankRow:
    orders = [
        [Action(span.kind, span.stage, span.microbatch) for span in run.spans if span.rank == at]
        for at in range(run.ranks)
    ]
    stages, microbatches = 1 + max(span.stage for span in run.spans), len({span.microbatch for span in run.spans})
    ideal = ideal_bubble(schedule, run.ranks, stages // run.ranks, microbatches) if schedule else None
    return RankRow(ranks, run, simulate(orders, costs_of(run)), ideal)


# --- showing -------------------------------------------------------------------------------------------


def figures(pipeline: PipelineView) -> dict[str, Any]:
    """What is shown as one JSON document; shares of the step are 0 to 1."""
    ranks: list[dict[str, Any]] = [
        {
            "rank": rank,
            "stages": sorted({span.stage for span in group.run.spans if span.rank == at}),
            "busy_s": group.run.busy_s[at],
            "bubble": group.run.bubble[at],
            "simulated_bubble": group.simulated.bubble[at],
            "ideal_bubble": group.ideal,
        }
        for group in pipeline.groups
        for at, rank in enumerate(group.ranks)
    ]
    return {
        "schedule": pipeline.schedule,
        "stages": sum(len(row["stages"]) for row in ranks) // len(pipeline.groups),
        "microbatches": max(len({span.microbatch for span in group.run.spans}) for group in pipeline.groups),
        "step": pipeline.step,
        "steps": pipeline.steps,
        "step_s": max(group.run.makespan_s for group in pipeline.groups),
        "ranks": sorted(ranks, key=lambda row: row["rank"]),
    }


def title(pipeline: PipelineView) -> str:
    """What the table is of."""
    shown = figures(pipeline)
    return (
        f"pipeline {shown['schedule'] or ''}: {_counted(shown['stages'], 'stage')}, "
        f"{_counted(shown['microbatches'], 'microbatch', 'es')}; "
        f"step {shown['step']}, {time_in_words(shown['step_s'])}, the median of {shown['steps']}"
    )


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number != 1 else ''}"


def pipeline_rows(pipeline: PipelineView) -> list[tuple[str, ...]]:
    """Per rank: its stages, how long it computes, and its idle share of the step: as run, simulated, in theory."""
    return [
        (
            str(row["rank"]),
            ", ".join(map(str, row["stages"])),
            time_in_words(row["busy_s"]),
            f"{row['bubble']:.1%}",
            f"{row['simulated_bubble']:.1%}",
            "-" if row["ideal_bubble"] is None else f"{row['ideal_bubble']:.1%}",
        )
        for row in figures(pipeline)["ranks"]
    ]


def section(pipeline: PipelineView) -> list[Any]:
    """The step as parts of a page: as run, simulated, and both in numbers."""
    groups = pipeline.groups
    longest_s = max(max(group.run.makespan_s, group.simulated.makespan_s) for group in groups)
    return [
        heading(title(pipeline)),
        "<p>As run: a row per rank, the number of the microbatch in its box</p>",
        drawn([(group.ranks, group.run) for group in groups], longest_s=longest_s),
        "<p>The same order with the mean times of every stage and message</p>",
        drawn([(group.ranks, group.simulated) for group in groups], longest_s=longest_s),
        table(HEADS, pipeline_rows(pipeline)),
    ]


def trace(recorded: RecordedPipeline) -> dict[str, Any]:
    """All spans in the trace format of Chrome, which ui.perfetto.dev opens: a thread per rank, microseconds."""
    spans = [(step, span) for steps in recorded.steps.values() for step, of_step in steps.items() for span in of_step]
    first_s = min(span.begin_s for _, span in spans)
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted(recorded.positions)
    ]
    events = [
        {
            "name": str(Action(span.kind, span.stage, span.microbatch)),
            "cat": span.kind,
            "ph": "X",
            "ts": round((span.begin_s - first_s) * 1e6, 3),
            "dur": round(span.seconds * 1e6, 3),
            "pid": 0,
            "tid": span.rank,
            "args": {"step": step, "stage": span.stage, "microbatch": span.microbatch},
        }
        for step, span in spans
    ]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}
