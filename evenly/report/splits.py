"""What the tensor axis splits of a model, in words: what repeats from block to block is one row.

Works on the document of `evenly plan --explain --json`. The number of a block is a number that stands alone between
the dots of a name, in names as in reasons: `layers.0.up.weight` and `layers.1.up.weight` are `layers.*.up.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from evenly.report.comm import size_in_words

Row = Mapping[str, Any]

GROUP_HEADS = ("parameters[dim]", "groups", "units", "share", "forward", "backward", "")
WHOLE_HEADS = ("parameters", "number", "reason by dim")

NUMBER = re.compile(r"(?<![\w.])\d+(?=\.\w)|(?<=\w\.)\d+(?!\w)")


def group_title(explanation: Row) -> str:
    return (
        f"{explanation['job']}, {explanation['plan']}: what can be split together, its share of the model's elements, "
        "and the bytes that ranks sum for it in the forward and the backward pass of the traced microbatch"
    )


def group_rows(explanation: Row) -> list[tuple[str, ...]]:
    """Parameters, number of groups, units of each, share and bytes of all, and whether they are split."""
    kinds: dict[Any, list[Row]] = {}
    for group in explanation["groups"]:
        kinds.setdefault(_kind(group), []).append(group)
    split = {*_split(explanation)}
    return [_group_row(groups, explanation["elements"], split) for groups in kinds.values()]


def full_rows(explanation: Row) -> list[tuple[str, ...]]:
    kinds: dict[Any, list[tuple[str, Sequence[str]]]] = {}
    for name, reasons in explanation["unsplit"].items():
        kinds.setdefault((_template(name), *map(_template, reasons)), []).append((name, reasons))
    return [
        (abbreviated(name for name, _ in alike), str(len(alike)), _by_dim([reasons for _, reasons in alike]))
        for alike in kinds.values()
    ]


def in_a_line(explanation: Row) -> str:
    names = _split(explanation)
    if not names:
        return f"nothing is split over {explanation['ranks']} ranks; evenly run refuses this plan"
    return (
        f"{explanation['share']:.1%} of the model's elements are split over {explanation['ranks']} ranks; "
        f"tensor_exclude=PATTERN in the plan (several: A|B) keeps parameters whole, as tensor_exclude={names[0]}"
    )


def abbreviated(texts: Iterable[str]) -> str:
    """Texts that differ in numbers of blocks as one, with * where they differ."""
    first, *others = texts
    numbers = [NUMBER.findall(first), *map(NUMBER.findall, others)]
    parts = iter(found[0] if len({*found}) == 1 else "*" for found in zip(*numbers, strict=True))
    return NUMBER.sub(lambda _: next(parts), first)


def _split(explanation: Row) -> list[str]:
    return [one["name"] for group in explanation["groups"] if group["split"] for one in group["parameters"]]


def _template(text: str) -> str:
    return NUMBER.sub("*", text)


def _kind(group: Row) -> Any:
    parameters = dict.fromkeys(map(_layout, group["parameters"]))
    numbers = (group["elements"], group["forward_bytes"], group["backward_bytes"])
    return (*parameters, *numbers, _template(group["reason"]))


def _layout(parameter: Row) -> tuple[Any, ...]:
    return (_template(parameter["name"]), *(parameter[key] for key in ("dim", "outer", "units", "inner")))


def _group_row(groups: Sequence[Row], elements: int, split: set[str]) -> tuple[str, ...]:
    first = groups[0]
    alike: dict[Any, list[str]] = {}
    for group in groups:
        for one in group["parameters"]:
            alike.setdefault(_layout(one), []).append(one["name"])
    names_of_kinds = (
        f"{abbreviated(names)}[{dim}]" + (f" {outer}x" if outer > 1 else "")
        for (_, dim, outer, *_), names in alike.items()
    )
    moved = (sum(group[key] for group in groups) for key in ("forward_bytes", "backward_bytes"))
    return (
        "\n".join(names_of_kinds),
        str(len(groups)),
        str(first["parameters"][0]["units"]),
        f"{sum(group['elements'] for group in groups) / elements:.1%}",
        *map(size_in_words, moved),
        _verdict(groups, split),
    )


def _verdict(groups: Sequence[Row], split: set[str]) -> str:
    if groups[0]["split"]:
        return "split"
    reason = abbreviated(group["reason"] for group in groups)
    otherwise = all(one["name"] in split for group in groups for one in group["parameters"])
    return f"{'otherwise' if otherwise else 'whole'}: {reason}"


def _by_dim(alike: Sequence[Sequence[str]]) -> str:
    """Reasons of like parameters as one: `[0, 1] softmax; [2] cat`; of a single dim the reason alone."""
    dims: dict[str, list[str]] = {}
    for dim, reasons in enumerate(zip(*alike, strict=True)):
        dims.setdefault(abbreviated(reasons), []).append(str(dim))
    if len(alike[0]) < 2:
        return "".join(dims) or "has no dims"
    return "; ".join(f"[{', '.join(numbers)}] {reason}" for reason, numbers in dims.items())


STAGE_HEADS = ("stage", "ranks", "blocks", "cost", "parameters", "weights", "saved", "in flight", "receives")


def stage_title(document: Row) -> str:
    return (
        f"{document['job']}, {document['plan']}:\nthe stages ({document['schedule']}, {document['microbatches']} "
        "microbatches), each with its share of a forward's cost, its parameters, "
        "what one microbatch leaves in it for the backward, how many it holds at once, and what it is sent"
    )


def stage_rows(document: Row) -> list[tuple[str, ...]]:
    return [
        (
            str(stage["stage"]),
            ranks_in_words(stage["ranks"]).partition(" ")[2],
            _blocks(stage["blocks"]),
            f"{stage['cost']:.1%}",
            f"{stage['elements']:,}",
            size_in_words(stage["weight_bytes"]),
            size_in_words(stage["saved_bytes"]),
            str(stage["in_flight"]),
            ", ".join(dict.fromkeys(stage["receives"])) or "the batch",
        )
        for stage in document["stages"]
    ]


def ranks_in_words(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def stages_in_a_line(document: Row) -> str:
    line = f"in the plan this cut is split_points={document['cut']}"
    shared = [f"{name} (stages {', '.join(map(str, stages))})" for name, stages in document["shared"].items()]
    return f"{line}; held by several stages: {', '.join(shared[:5])}{', ...' * (len(shared) > 5)}" if shared else line


def _blocks(names: Sequence[str]) -> str:
    runs: list[list[str]] = []
    for name in names:
        if runs and abbreviated([runs[-1][-1], name]).count("*") == 1:
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
