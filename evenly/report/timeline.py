"""Steps as run, drawn and as a trace; those of a pipeline compared with their simulation.

Ranks with the stages of one replica of the model are a *group*; each is simulated with the mean times of its own
stages and messages. What is shown is the step of median length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median_low
from typing import Any

from evenly.observe.timings import covered
from evenly.plan.schedule import COMPUTE, SCHEDULES, Action, Kind, Schedule
from evenly.planner.timeline import Span, Timeline, costs_of, ideal_bubble, simulate
from evenly.report.comm import time_in_words
from evenly.report.page import Section, table, text
from evenly.report.pictures import OTHERS
from evenly.report.pictures import schedule as drawn
from evenly.report.pictures import step as drawn_step
from evenly.report.spans import OtherSpan, RecordedSpans, Row

HEADS = ("rank", "stages", "busy", "bubble as run", "simulated", "in theory")
STEP_HEADS = (
    "rank",
    "computes",
    "communicates",
    "of that waited for",
    *(OTHERS[kind] for kind in ("loading", "update")),
)


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


def pipeline_of(recorded: RecordedSpans, plan: Row) -> PipelineView | None:
    """The step to be shown; `plan` is what plan.json holds. None where no step was recorded whole by all ranks, or they
    are no pipeline.
    """
    groups = recorded.groups
    if not has_pipeline(recorded) or not _are_all(recorded, plan):
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


def has_pipeline(recorded: RecordedSpans) -> bool:
    return not any(
        one.kind != "operation" for steps in recorded.others.values() for found in steps.values() for one in found
    )


def _are_all(recorded: RecordedSpans, plan: Row) -> bool:
    world, ranks = plan.get("world"), {*recorded.positions}
    return not isinstance(world, int) or (len(ranks) == world and ranks == {*range(len(ranks))})


@dataclass(frozen=True)
class StepView:
    """The step of median length among the `steps` that all ranks have recorded, number `step`, without a pipeline.

    ranks: of each its passes, and what else it did. From `begin_s` on, `seconds` long.
    """

    step: int
    steps: int
    begin_s: float
    seconds: float
    ranks: Mapping[int, tuple[Sequence[Span], Sequence[OtherSpan]]]


def step_of(recorded: RecordedSpans, plan: Row) -> StepView | None:
    """The step to be shown of ranks without a pipeline; None where there is none."""
    if has_pipeline(recorded) or not _are_all(recorded, plan):
        return None
    ranks = sorted(recorded.positions)
    common = set[int].intersection(*({*recorded.others[rank]} & {*recorded.steps[rank]} for rank in ranks))
    views = [_view(recorded, ranks, step, len(common)) for step in sorted(common)]
    median = median_low([view.seconds for view in views]) if views else 0.0
    return next((view for view in views if view.seconds == median), None)


def _view(recorded: RecordedSpans, ranks: Sequence[int], step: int, steps: int) -> StepView:
    found = {rank: (recorded.steps[rank][step], recorded.others[rank][step]) for rank in ranks}
    spans = [span for both in found.values() for of_kind in both for span in of_kind]
    begin_s = min(span.begin_s for span in spans)
    return StepView(step, steps, begin_s, max(span.end_s for span in spans) - begin_s, found)


def _schedule(plan: Row) -> Schedule | None:
    words = str(plan.get("plan")).split()
    named = next((word.removeprefix("schedule=") for word in words if word.startswith("schedule=")), "1f1b")
    return named if named in SCHEDULES else None


def _run(recorded: RecordedSpans, group: Sequence[int], step: int) -> Timeline:
    spans = (replace(span, rank=at) for at, rank in enumerate(group) for span in recorded.steps[rank].get(step, ()))
    return Timeline(len(group), sorted(spans, key=lambda span: (span.rank, span.begin_s)))


def _is_whole(run: Timeline) -> bool:
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


def section(pipeline: PipelineView) -> Section:
    """The step as a part of a page: as run, simulated, and both in numbers."""
    groups = pipeline.groups
    longest_s = max(max(group.run.makespan_s, group.simulated.makespan_s) for group in groups)
    run, simulated = (
        drawn([(group.ranks, which(group)) for group in groups], title=words, longest_s=longest_s)
        for words, which in (("as run", _as_run), ("the same order, simulated with mean times", _as_simulated))
    )
    return Section(
        "The timeline of a step",
        [
            text(f"{title(pipeline)}. A row for each rank, the number of the microbatch in its box{_paler(pipeline)}."),
            run,
            simulated,
            table(HEADS, pipeline_rows(pipeline), label="the step in numbers"),
        ],
    )


def _paler(pipeline: PipelineView) -> str:
    shown = figures(pipeline)
    return "; paler: a rank's later stages" if any(len(row["stages"]) > 1 for row in shown["ranks"]) else ""


def _as_run(group: RankRow) -> Timeline:
    return group.run


def _as_simulated(group: RankRow) -> Timeline:
    return group.simulated


def step_title(view: StepView) -> str:
    return f"step {view.step}, {time_in_words(view.seconds)}, the median of {view.steps}"


def step_figures(view: StepView) -> list[dict[str, Any]]:
    """Of each rank what a step's seconds went to; `waited_s`: those of communication in which the rank waited for it,
    None where that is not recorded.
    """
    rows: list[dict[str, Any]] = []
    for rank, (passes, others) in view.ranks.items():
        operations = [one for one in others if one.kind == "operation"]
        waits = [(one.end_s - one.waited_s, one.end_s) for one in operations if one.waited_s is not None]
        rest = {kind: sum(one.end_s - one.begin_s for one in others if one.kind == kind) for kind in OTHERS}
        rows.append(
            {
                "rank": rank,
                "passes_s": covered([(span.begin_s, span.end_s) for span in passes]),
                "communication_s": covered([(one.begin_s, one.end_s) for one in operations]),
                "waited_s": covered(waits) if len(waits) == len(operations) else None,
                "loading_s": rest["loading"],
                "update_s": rest["update"],
            }
        )
    return rows


def step_rows(view: StepView) -> list[tuple[str, ...]]:
    rows = [[*row.values()] for row in step_figures(view)]
    return [(str(rank), *(time_in_words(one) if one else "-" for one in seconds)) for rank, *seconds in rows]


def step_section(view: StepView) -> Section:
    words = (
        f"{step_title(view)}. A row for each rank: its passes with the number of the microbatch, and below them what "
        "was under way between ranks. Operations that are waited for within a pass make that pass longer."
    )
    picture = drawn_step(view.ranks, title="as run", begin_s=view.begin_s, longest_s=view.seconds)
    return Section(
        "The timeline of a step",
        [text(words), picture, table(STEP_HEADS, step_rows(view), label="the step in numbers")],
    )


def sections_of(pipeline: PipelineView | None, step: StepView | None) -> list[Section]:
    return [section(pipeline)] if pipeline else [step_section(step)] if step else []


def trace(recorded: RecordedSpans) -> dict[str, Any]:
    """All spans in the trace format of Chrome, which ui.perfetto.dev opens: a thread per rank, microseconds.

    What else ranks did is in a second thread of each.
    """
    passes = [(step, span) for steps in recorded.steps.values() for step, found in steps.items() for span in found]
    others = [
        (rank, step, one) for rank, steps in recorded.others.items() for step, found in steps.items() for one in found
    ]
    first_s = min([span.begin_s for _, span in passes] + [one.begin_s for _, _, one in others])
    ranks = sorted(recorded.positions)
    names = [_thread(rank, f"rank {rank}") for rank in ranks]
    names += [_thread(_second(rank), f"rank {rank}: other") for rank in ranks if recorded.others[rank]]
    events = [
        {
            "name": str(Action(span.kind, span.stage, span.microbatch)),
            "cat": span.kind,
            **_times(span, first_s),
            "tid": span.rank,
            "args": {"step": step, "stage": span.stage, "microbatch": span.microbatch},
        }
        for step, span in passes
    ]
    events += [
        {
            "name": one.name or one.kind,
            "cat": one.kind,
            **_times(one, first_s),
            "tid": _second(rank),
            "args": {"step": step},
        }
        for rank, step, one in others
    ]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def _second(rank: int) -> int:
    return 1_000_000 + rank


def _thread(number: int, name: str) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": name}}


def _times(span: Span | OtherSpan, first_s: float) -> dict[str, Any]:
    begin, length = round((span.begin_s - first_s) * 1e6, 3), round((span.end_s - span.begin_s) * 1e6, 3)
    return {"ph": "X", "ts": begin, "dur": length, "pid": 0}
