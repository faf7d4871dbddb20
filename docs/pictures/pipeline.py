"""Draws docs/pictures/pipeline.svg: schedules of a pipeline on four ranks, as `evenly` runs them, simulated.

    python docs/pictures/pipeline.py

A forward pass through a rank's part of the model takes one unit of time and a backward pass two, messages none.
"""

from __future__ import annotations

from pathlib import Path

from evenly.parallel.pipeline.orders import orders
from evenly.plan.schedule import Schedule, stages_per_rank
from evenly.planner.timeline import Costs, Timeline, simulate
from evenly.report.gantt import ROW, legend, rows, svg, text

RANKS, UNIT = 4, 10
NAMES: dict[Schedule, str] = {
    "naive": "naive",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved, 2 stages per rank",
    "zero-bubble": "zero-bubble",
}
# Numbers of microbatches that are drawn next to each other.
BANDS = ((1, 4), (8,))
LEFT, TOP, GAP = 14, 34, 24


def simulated(schedule: Schedule, microbatches: int) -> Timeline:
    """The step in units of time."""
    number = stages_per_rank(schedule, None)
    part = [1 / number] * (RANKS * number)
    costs = Costs(forward=part, backward=[2 * cost for cost in part], backward_input=part, backward_weight=part)
    return simulate(orders(schedule, RANKS, number, microbatches), costs)


def panel(schedule: Schedule, microbatches: int, x: float, y: float) -> tuple[list[str], float]:
    """A schedule's step with its title, and how wide it is in pixels."""
    timeline = simulated(schedule, microbatches)
    words = f"{NAMES[schedule]}, {timeline.bubble[0]:.0%} idle"
    labels = [str(rank) for rank in range(RANKS)]
    drawn = rows(timeline, labels, x=x, y=y + 16, pixels_per_s=UNIT)
    return [text(x, y + 11, words), *drawn], timeline.makespan_s * UNIT


def draw() -> str:
    """All schedules below each other, on one scale of time."""
    parts = legend(["forward", "backward", "backward_input", "backward_weight", "recv_forward"], x=LEFT, y=8)
    y, width = TOP, 0.0
    for band in BANDS:
        x = LEFT
        for microbatches in band:
            parts.append(text(x, y + 11, f"{microbatches} microbatch{'es' * (microbatches > 1)}"))
            widest = 0.0
            for place, schedule in enumerate(NAMES):
                drawn, wide = panel(schedule, microbatches, x, y + 18 + place * (RANKS * ROW + GAP))
                parts += drawn
                widest = max(widest, wide)
            x += widest + 4 * GAP
        width = max(width, x)
        y += len(NAMES) * (RANKS * ROW + GAP) + 34
    return svg(width, y, parts)


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw() + "\n")
