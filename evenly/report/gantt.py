"""A pipeline's step as a drawing: one row per rank, a box per span, coloured by kind, its microbatch's number in it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape

from evenly.plan.schedule import COMPUTE, LETTERS, Kind
from evenly.planner.timeline import Span, Timeline

COLOURS: dict[Kind, str] = {
    "forward": "#77aadd",
    "backward": "#44bb99",
    "backward_input": "#bbcc33",
    "backward_weight": "#eedd88",
}
MESSAGES = "#dddddd"
IN_WORDS: dict[Kind, str] = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward, gradient of the input",
    "backward_weight": "backward, gradients of weights",
}
ROW, BOX, FONT = 18, 15, 10


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
