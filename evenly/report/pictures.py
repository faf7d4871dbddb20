"""The schedule of a pipeline, and a step of ranks without one, as boxes in rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from evenly.plan.schedule import COMPUTE, LETTERS, Kind
from evenly.planner.timeline import Span, Timeline
from evenly.report.draw import Box, boxes
from evenly.report.spans import OtherSpan

IN_WORDS: dict[Kind, str] = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward, gradient of the input",
    "backward_weight": "backward, gradients of weights",
}
MESSAGES = "waiting for a message"
OTHERS: dict[str, str] = {
    "loading": "waiting for samples",
    "update": "update and the rest",
    "operation": "communication",
}
COLOURS = {
    IN_WORDS["forward"]: "c0",
    IN_WORDS["backward"]: "c2",
    IN_WORDS["backward_input"]: "c5",
    IN_WORDS["backward_weight"]: "c4",
    OTHERS["update"]: "c3",
    MESSAGES: "c7",
    OTHERS["loading"]: "c7",
    OTHERS["operation"]: "c1",
}


def schedule(replicas: Sequence[tuple[Sequence[int], Timeline]], *, title: str, longest_s: float) -> str:
    """Of every replica its ranks and their spans: a row per rank, a box per span, the microbatch's number in it.

    A rank's later stages are paler. Empty where a rank waits unseen, grey where it waits for a message.
    """
    labels = [f"rank {rank}" for ranks, _ in replicas for rank in ranks]
    found: list[Box] = []
    first_row = 0
    for ranks, timeline in replicas:
        found += _boxes_of(timeline, first_row)
        first_row += len(ranks)
    return boxes(labels, found, COLOURS, title=title, longest=longest_s)


def _boxes_of(timeline: Timeline, first_row: int) -> Iterator[Box]:
    places = _places(timeline)
    for span in timeline.spans:
        passes = span.kind in COMPUTE
        yield Box(
            row=first_row + span.rank,
            begin=span.begin_s - timeline.begin_s,
            end=span.end_s - timeline.begin_s,
            kind=IN_WORDS[span.kind] if passes else MESSAGES,
            text=f"{LETTERS[span.kind]}{span.stage}.{span.microbatch}" if passes else "",
            pale=min(2, places[span.rank, span.stage]) if passes else 0,
        )


def _places(timeline: Timeline) -> dict[tuple[int, int], int]:
    """Of each rank and each of its stages, how many of its stages come before."""
    stages: dict[int, set[int]] = {}
    for span in timeline.spans:
        stages.setdefault(span.rank, set()).add(span.stage)
    return {(rank, stage): place for rank, of in stages.items() for place, stage in enumerate(sorted(of))}


def step(
    ranks: Mapping[int, tuple[Sequence[Span], Sequence[OtherSpan]]], *, title: str, begin_s: float, longest_s: float
) -> str:
    """Of every rank its passes, above its operations with other ranks, in the step that begins at `begin_s`."""
    found: list[Box] = []
    for row, (passes, others) in enumerate(ranks.values()):
        for span in passes:
            text = f"{LETTERS[span.kind]}{span.stage}.{span.microbatch}"
            kind = IN_WORDS.get(span.kind, MESSAGES)
            found.append(Box(row, span.begin_s - begin_s, span.end_s - begin_s, kind, text))
        for other in others:
            below = other.kind == "operation"
            begin, end = other.begin_s - begin_s, other.end_s - begin_s
            found.append(Box(row, begin, end, OTHERS[other.kind], other.name, lower=below))
    return boxes([f"rank {rank}" for rank in ranks], found, COLOURS, title=title, longest=longest_s)
