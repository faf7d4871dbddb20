"""Pictures by plotly: curves, stacked bars, and the schedule of a pipeline as boxes in rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenly.plan.schedule import COMPUTE, LETTERS, Kind
from evenly.planner.timeline import Span, Timeline

# Tol's light scheme, which the colour-blind tell apart.
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
MARGIN, ROW, BAR = 110, 24, 46  # pixels of a picture around its rows, of a row, of a bar

Points = tuple[Sequence[Any], Sequence[Any]]


@dataclass(frozen=True)
class StackedBar:
    """One bar: its label, and how long each of its parts is."""

    label: str
    parts: Mapping[str, float]


def new_figure(**layout: Any) -> Any:
    """An empty plotly figure with this layout."""
    from plotly import graph_objects  # half a second

    figure: Any = graph_objects.Figure()
    return figure.update_layout(template="plotly_white", margin={"t": 20}, **layout)


def curves(named: Mapping[str, Points], *, x: str, y: str = "", mode: str = "lines+markers", log: bool = False) -> Any:
    """Curves through (x, y), by name; `x` and `y` are the titles of the axes, both logarithmic if `log`."""
    figure, scale = new_figure(height=480), "log" if log else "linear"
    for name, (across, up) in named.items():
        figure.add_scatter(x=[*across], y=[*up], name=name, mode=mode)
    figure.update_xaxes(type=scale, title=x)
    return figure.update_yaxes(type=scale, title=y)


def stacked(bars: Sequence[StackedBar], words: Callable[[float], str], *, limit: float | None = None) -> Any:
    """The bars below each other on one scale, their parts in the same order and colours.

    words: a length in words. limit: where a line is drawn across all bars.
    """
    figure = new_figure(barmode="stack", height=MARGIN + BAR * len(bars))
    labels = [f"{bar.label}: {words(sum(bar.parts.values()))}" for bar in bars]
    for part in dict.fromkeys(part for bar in bars for part in bar.parts):
        lengths = [bar.parts.get(part, 0.0) for bar in bars]
        if any(lengths):
            texts = [f"{part}: {words(length)}" for length in lengths]
            figure.add_bar(orientation="h", x=lengths, y=labels, name=part, hovertext=texts, hoverinfo="text")
    if limit is not None:
        figure.add_vline(limit, line_color="#cc3311", annotation_text=f"{words(limit)} per device")
    figure.update_xaxes(showticklabels=False)
    return figure.update_yaxes(autorange="reversed", automargin=True)


def schedule(replicas: Sequence[tuple[Sequence[int], Timeline]], *, longest_s: float) -> Any:
    """Of every replica its ranks and their spans: a row per rank, a box per span, the microbatch's number in it.

    A rank's later stages are paler. Empty where a rank waits unseen, grey where it waits for a message.
    """
    ranks = sum(len(of_replica) for of_replica, _ in replicas)
    figure = new_figure(barmode="overlay", bargap=0.1, height=MARGIN + ROW * ranks)
    figure.update_layout(uniformtext={"mode": "hide", "minsize": 8}, legend={"orientation": "h"})
    boxes = [(f"rank {of[span.rank]}", span, timeline) for of, timeline in replicas for span in timeline.spans]
    for kind, colour in COLOURS.items():
        _add_boxes(figure, [box for box in boxes if box[1].kind == kind], IN_WORDS[kind], colour)
    _add_boxes(figure, [box for box in boxes if box[1].kind not in COMPUTE], "waiting for a message", MESSAGES)
    figure.update_xaxes(range=[0, longest_s], title="s")
    return figure.update_yaxes(autorange="reversed")


def _add_boxes(figure: Any, boxes: Sequence[tuple[str, Span, Timeline]], name: str, colour: str) -> None:
    if not boxes:
        return
    figure.add_bar(
        orientation="h",
        name=name,
        y=[label for label, _, _ in boxes],
        base=[span.begin_s - timeline.begin_s for _, span, timeline in boxes],
        x=[span.seconds for _, span, _ in boxes],
        text=["" if colour == MESSAGES else str(span.microbatch) for _, span, _ in boxes],
        textposition="inside",
        insidetextanchor="middle",
        hovertext=[f"{LETTERS[s.kind]}{s.stage}.{s.microbatch}: {s.seconds:.4g} s" for _, s, _ in boxes],
        hoverinfo="text",
        marker={"color": colour, "opacity": [max(0.25, 1 - 0.5 * _place(s, timeline)) for _, s, timeline in boxes]},
    )


def _place(span: Span, timeline: Timeline) -> int:
    """How many stages before the span's are on its rank."""
    return len({other.stage for other in timeline.spans if other.rank == span.rank and other.stage < span.stage})
