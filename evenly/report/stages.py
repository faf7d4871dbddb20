"""Where a plan cuts a model into stages, in words. Works on the document of `evenly plan --explain --json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evenly.report.comm import size_in_words
from evenly.report.splits import abbreviated

Row = Mapping[str, Any]

STAGE_HEADS = ("stage", "rank", "blocks", "cost", "parameters", "weights", "kept", "in flight", "receives")


def stage_title(document: Row) -> str:
    """What is shown, and what its columns are."""
    return (
        f"{document['job']}, {document['plan']}:\nthe stages ({document['schedule']}, {document['microbatches']} "
        "microbatches), each with its share of a forward's cost, its parameters,\n"
        "what one microbatch leaves in it for the backward, how many it holds at once, and what it is sent"
    )


def stage_rows(document: Row) -> list[tuple[str, ...]]:
    return [
        (
            str(stage["stage"]),
            str(stage["rank"]),
            _blocks(stage["blocks"]),
            f"{stage['cost']:.1%}",
            f"{stage['elements']:,}",
            size_in_words(stage["weight_bytes"]),
            size_in_words(stage["kept_bytes"]),
            str(stage["in_flight"]),
            ", ".join(dict.fromkeys(stage["receives"])) or "the batch",
        )
        for stage in document["stages"]
    ]


def stages_in_a_line(document: Row) -> str:
    """Where the stages begin, as a plan has it, and what several hold."""
    line = f"in the plan this cut is split_points={document['cut']}"
    shared = [f"{name} (stages {', '.join(map(str, stages))})" for name, stages in document["shared"].items()]
    return f"{line}; held by several stages: {', '.join(shared[:5])}{', ...' * (len(shared) > 5)}" if shared else line


def _blocks(names: Sequence[str]) -> str:
    """The first and the last of each run of blocks of one list."""
    runs: list[list[str]] = []
    for name in names:
        if runs and abbreviated([runs[-1][-1], name]).count("*") == 1:
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
