"""Predictions of plans as one self-contained HTML page: memory and time by cause, and the best plan's schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from itertools import groupby

from evenly.plan import Plan
from evenly.plan.orders import compute_orders
from evenly.plan.schedule import Action, runnable
from evenly.planner.costed_plan import costed_plan_of, layers_of
from evenly.planner.prediction import Prediction
from evenly.planner.request import PlanRequest
from evenly.planner.time import StageTime, stage_times
from evenly.planner.timeline import Costs, Orders, Timeline, simulate
from evenly.planner.training_config import TrainingConfig
from evenly.report.bars import StackedBar, drawing, stacked
from evenly.report.gantt import ROW, legend, rows
from evenly.report.page import document, heading, table
from evenly.report.plans import common, duration, heads, plan_rows, reasons, short, size, title

LEFT, WIDTH = 60, 760

STYLE = (
    ":root{color-scheme:light dark}body{background:Canvas;color:CanvasText}"
    "svg{display:block;max-width:100%;height:auto}svg text{fill:currentColor}svg g text{fill:#111}"
    "table{font-size:13px}td{vertical-align:top}td:nth-child(2),th:nth-child(2),td:last-child,th:last-child"
    "{text-align:left}tr{border-top:1px solid #8885}pre{white-space:pre-wrap}"
)


def page(model: str, devices: str, plans: Sequence[Prediction], timeline: Timeline, *, assumed: bool) -> str:
    """The page; `timeline`: the first plan's schedule with a few microbatches. Without scripts, and asks no network."""
    best = plans[0]
    return document(
        f"{model} on {devices}",
        f"<p>{escape(title(model, devices, plans, assumed=assumed))}</p>",
        table(heads(plans), plan_rows(plans)),
        f"<pre>{escape(chr(10).join(reasons(plans)))}</pre>",
        heading(f"Memory of every rank of the pipeline: {short(best.plan, common(plans))}"),
        _memory(best),
        heading("A step's time, plan by plan"),
        _times(plans),
        heading("The schedule"),
        f"<p>{_of_schedule(best, timeline)}</p>",
        _schedule(timeline),
        style=STYLE,
    )


def _memory(one: Prediction) -> str:
    """A bar for every run of ranks that hold the same."""
    bars: list[StackedBar] = []
    for memory, numbers in groupby(range(len(one.memory)), key=one.memory.__getitem__):
        ranks = [*numbers]
        label = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        bars.append(StackedBar(label, asdict(memory)))
    return stacked(bars, size, words="memory by cause", limit=one.limit_bytes)


def _times(plans: Sequence[Prediction]) -> str:
    said = common(plans)
    bars = [StackedBar(f"{number}. {short(one.plan, said)}", asdict(one.time)) for number, one in enumerate(plans, 1)]
    return stacked(bars, duration, words="time of a step by cause")


def _of_schedule(best: Prediction, timeline: Timeline) -> str:
    shown = len({span.microbatch for span in timeline.spans})
    ranks = "one device" if timeline.ranks == 1 else f"the {timeline.ranks} ranks of a pipeline, a row for each"
    return (
        f"Plan 1 on {ranks}, with {shown} microbatches, the number of each in its box (paler: a rank's later stages); "
        "messages, the reduction of gradients and the update are left out: "
        f"{duration(timeline.makespan_s)} of a step of {duration(best.step_s)}"
    )


def _schedule(timeline: Timeline) -> str:
    pixels_per_s = WIDTH / timeline.makespan_s if timeline.makespan_s else 0.0
    labels = [f"rank {rank}" for rank in range(timeline.ranks)]
    parts = legend({span.kind for span in timeline.spans}, x=LEFT, y=4)
    parts += rows(timeline, labels, x=LEFT, y=26, pixels_per_s=pixels_per_s)
    return drawing(LEFT + WIDTH + 4, 26 + ROW * timeline.ranks + 4, parts, words="schedule of the first plan")


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
