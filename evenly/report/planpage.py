"""Predictions of plans as one self-contained HTML page: all plans and those around what was asked, and of the first
ones memory and time by cause, and the best one's schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby

from evenly.plan import Plan
from evenly.plan.orders import compute_orders
from evenly.plan.schedule import Action, runnable
from evenly.planner.around import Grid
from evenly.planner.costed_plan import costed_plan_of, layers_of
from evenly.planner.prediction import Prediction
from evenly.planner.request import PlanRequest
from evenly.planner.time import StageTime, stage_times
from evenly.planner.timeline import Costs, Orders, Timeline, simulate
from evenly.planner.training_config import TrainingConfig
from evenly.report.comm import size_in_words, time_in_words
from evenly.report.draw import StackedBar, stacked
from evenly.report.page import Section, as_table, document, text
from evenly.report.pictures import schedule
from evenly.report.plans import common, short, title
from evenly.report.plantable import explorer

MOST_TIMES = 12  # plans whose times are drawn


def page(model: str, devices: str, grid: Grid, timeline: Timeline, *, assumed: bool) -> str:
    """The page; `timeline`: the best plan's schedule with a few microbatches. It asks no network."""
    plans = grid.cells[grid.asked].plans[:MOST_TIMES]
    best = plans[0]
    return document(
        f"{model} on {devices}",
        Section("Plans", [explorer(grid)]),
        Section(
            "Memory of every rank of the pipeline",
            [text(f"Plan 1 as asked: {short(best.plan, common(plans))}"), _memory(best)],
        ),
        Section("A step's time, plan by plan", [text("Plans as asked, as they are numbered above."), _times(plans)]),
        Section("The schedule", [text(_of_schedule(best, timeline)), _drawn(timeline)]),
        lead=title(model, devices, plans, assumed=assumed),
    )


def _drawn(timeline: Timeline) -> str:
    return schedule([(range(timeline.ranks), timeline)], title="simulated", longest_s=timeline.makespan_s)


def _memory(one: Prediction) -> str:
    bars: list[StackedBar] = []
    for memory, numbers in groupby(range(len(one.memory)), key=one.memory.__getitem__):
        ranks = [*numbers]
        label = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        bars.append(StackedBar(label, asdict(memory)))
    limit = one.limit_bytes, f"{size_in_words(one.limit_bytes)} per device"
    return stacked(bars, size_in_words, title="memory by cause", limit=limit) + _in_numbers(bars, size_in_words)


def _times(plans: Sequence[Prediction]) -> str:
    above = common(plans)
    bars = [StackedBar(f"{number}. {short(one.plan, above)}", asdict(one.time)) for number, one in enumerate(plans, 1)]
    return stacked(bars, time_in_words, title="time by cause") + _in_numbers(bars, time_in_words)


def _in_numbers(bars: Sequence[StackedBar], words: Callable[[float], str]) -> str:
    causes = [*dict.fromkeys(cause for bar in bars for cause, amount in bar.parts.items() if amount)]
    rows = [(bar.label, *(words(bar.parts.get(cause, 0.0)) for cause in causes)) for bar in bars]
    return as_table(("", *causes), rows)


def _of_schedule(best: Prediction, timeline: Timeline) -> str:
    shown = len({span.microbatch for span in timeline.spans})
    ranks = "one device" if timeline.ranks == 1 else f"the {timeline.ranks} ranks of a pipeline, a row for each"
    return (
        f"Plan 1 on {ranks}, with {shown} microbatches, the number of each in its box (paler: a rank's later stages); "
        "messages, the reduction of gradients and the update are left out: "
        f"{time_in_words(timeline.makespan_s)} of a step of {time_in_words(best.step_s)}"
    )


ROUNDS = 2  # microbatches per rank: a schedule fills up, and empties
ALONE = 6  # microbatches of a device without a pipeline
MOST_SPANS = 3000


def preview(request: PlanRequest, plan: Plan) -> Timeline:
    """The spans of a step of `plan`, which is complete, with a few of its microbatches; messages are not drawn."""
    one = costed_plan_of(request, plan)
    stages = stage_times(one.parts, layers_of(one), one.config, one.machine)
    return simulate(_orders(plan, one.config), _costs(stages))


def _orders(plan: Plan, config: TrainingConfig) -> Orders:
    p, v = config.pipeline, config.stages_per_rank
    if p == 1:
        return [_alone(min(config.microbatches, ALONE))]
    few = max(1, min(config.microbatches, ROUNDS * p, MOST_SPANS // (2 * p * v)))
    return compute_orders(plan.pipeline.schedule, p, v, runnable(plan.pipeline.schedule, p, v, few))


def _alone(microbatches: int) -> Sequence[Action]:
    """The order of one rank: microbatch by microbatch."""
    return [Action(kind, 0, number) for number in range(microbatches) for kind in ("forward", "backward")]


def _costs(stages: Sequence[StageTime]) -> Costs:
    backward, weights = ([getattr(stage.backward, name) for stage in stages] for name in ("seconds", "weights"))
    return Costs(
        forward=[stage.forward.seconds for stage in stages],
        backward=backward,
        backward_input=[whole - later for whole, later in zip(backward, weights, strict=True)],
        backward_weight=weights,
    )
