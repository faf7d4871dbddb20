"""Draws docs/pictures/pipeline.svg: schedules of a pipeline on four ranks, as `evenly` runs them, simulated.

    python docs/pictures/pipeline.py

A forward pass through a rank's part of the model takes one unit of time and a backward pass two, messages none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape
from pathlib import Path

from evenly.parallel.pipeline.orders import orders
from evenly.plan.schedule import COMPUTE, LETTERS, Kind, Schedule, stages_per_rank
from evenly.planner.timeline import Costs, Span, Timeline, simulate
from evenly.report.pictures import COLOURS, IN_WORDS, MESSAGES

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
ROW, BOX, FONT = 18, 15, 10


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


def svg(width: float, height: float, parts: Sequence[str]) -> str:
    """The elements `parts` as one picture, on white, that shrinks with its page; width and height in pixels."""
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:100%"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="{FONT}">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"])


def rows(timeline: Timeline, labels: Sequence[str], *, x: float, y: float, pixels_per_s: float) -> list[str]:
    """A row for every rank, below each other from (x, y), which is the step's beginning; labels lie left of that.

    A rank's later stages are paler. Empty where a rank waits unseen, grey where it waits for a message.
    """
    names = [text(x - 6, y + rank * ROW + 11, label, anchor="end") for rank, label in enumerate(labels)]
    places = _places(timeline)
    boxes: list[str] = []
    numbers: list[str] = []
    for span in timeline.spans:
        left, top = x + (span.begin_s - timeline.begin_s) * pixels_per_s, y + span.rank * ROW
        width, number = span.seconds * pixels_per_s, str(span.microbatch)
        if width:
            boxes.append(_box(span, left, top, width, place=places[span.stage]))
        if span.kind in COMPUTE and width > 0.65 * FONT * len(number):
            numbers.append(f'<text x="{left + width / 2:.5g}" y="{top + 11:g}">{number}</text>')
    frame = '<g stroke="white" stroke-width="0.5">'
    return [*names, frame, *boxes, "</g>", '<g text-anchor="middle">', *numbers, "</g>"]


def _places(timeline: Timeline) -> dict[int, int]:
    """For every stage how many stages before it are on its rank."""
    held = [sorted({span.stage for span in timeline.spans if span.rank == rank}) for rank in range(timeline.ranks)]
    return {stage: place for stages in held for place, stage in enumerate(stages)}


def _box(span: Span, x: float, y: float, width: float, *, place: int) -> str:
    shade = f' fill-opacity="{max(0.25, 1 - 0.5 * place):g}"' if place and span.kind in COMPUTE else ""
    name = f"{LETTERS[span.kind]}{span.stage}.{span.microbatch}: {span.seconds:.4g} s"
    return (
        f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{BOX}" fill="{COLOURS.get(span.kind, MESSAGES)}"'
        f"{shade}><title>{name}</title></rect>"
    )


def legend(kinds: Collection[Kind], *, x: float, y: float) -> list[str]:
    """What the colours of `kinds` mean, in a row."""
    entries = [(colour, IN_WORDS[kind]) for kind, colour in COLOURS.items() if kind in kinds]
    if not COMPUTE.issuperset(kinds):
        entries.append((MESSAGES, "waiting for a message"))
    parts: list[str] = []
    for colour, words in entries:
        parts += [
            f'<rect x="{x:.0f}" y="{y:.0f}" width="12" height="12" fill="{colour}"/>',
            text(x + 17, y + 10, words),
        ]
        x += 17 + 6 * len(words) + 20
    return parts


def text(x: float, y: float, words: str, *, anchor: str = "start") -> str:
    """`words` with their base line at y; `anchor` says what of them lies at x: start, middle or end."""
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.5g}" y="{y:.5g}"{where}>{escape(words)}</text>'


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw() + "\n")
