"""Pictures of what a plan does: a batch dealt, the backward and its buckets, the ring, ZeRO's pieces, cuts. Pure.

All of it is data of `planner.mechanisms`, and of the documents of `evenly plan --explain`; nothing is a sketch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from evenly.report.comm import size_in_words
from evenly.report.draw import Box, ChartAxis, CutMatrix, StackedBar, boxes, matrices, stacked
from evenly.report.page import Section, as_table, document, text
from evenly.report.splits import (
    STAGE_HEADS,
    abbreviated,
    in_a_line,
    ranks_in_words,
    stage_rows,
    stage_title,
    stages_in_a_line,
)

if TYPE_CHECKING:
    from evenly.planner.mechanisms import Mechanisms

RUNS = "runs"
IN_STEPS = {"reduce-scatter": "c0", "all-gather": "c2"}
COMPUTES, FILLS = "backward", "gradients come in"
MOST_SAMPLES, MOST_PARTS, MOST_MATRICES = 12, 400, 24
Document = Mapping[str, Any]


def page(job: str, found: Mechanisms, documents: Sequence[Document]) -> str:
    """The page; documents: of `evenly plan --explain`, of the stages and of what the tensor axis splits."""
    stages = next((one for one in documents if "stages" in one), None)
    splits = next((one for one in documents if "groups" in one), None)
    sections = [_dealt(found), *_buckets(found), *_ring(found), *_pieces(found), *_memory(found)]
    sections += [_stages(stages)] if stages else []
    sections += [_splits(splits, found)] if splits else []
    return document(f"{job}: how {found.plan or 'a single device'} works", *sections, lead=_lead(found))


def _lead(found: Mechanisms) -> str:
    samples = sum(map(len, found.microbatches))
    return (
        f"The first step: {samples:,} samples in {len(found.microbatches):,} microbatches, "
        f"{found.ranks} rank{'s' * (found.ranks != 1)} of the data axis. Every picture is drawn from what the "
        "functions of the engine and the planner return for this plan and this job."
    )


# --- the batch -----------------------------------------------------------------------------------------


def _dealt(found: Mechanisms) -> Section:
    costs = found.costs or [float(len(one)) for one in found.microbatches]
    unit = "padded cost" if found.costs else "samples"
    drawn, rows, longest = list[Box](), list[tuple[str, ...]](), 0.0
    for rank, own in enumerate(found.dealt):
        at = 0.0
        for place, number in enumerate(own):
            words = _of_microbatch(found.microbatches[number], number)
            drawn.append(Box(rank, at, at + costs[number], RUNS, words, pale=place % 2))
            at += costs[number]
        longest = max(longest, at)
        rows.append((f"rank {rank * found.apart}", ", ".join(map(str, own)) or "none", f"{at:,.6g}"))
    picture = boxes(
        [f"rank {rank * found.apart}" for rank in range(found.ranks)],
        drawn,
        {RUNS: "c0"},
        title="microbatches of each rank",
        longest=longest,
        across=ChartAxis(0.0, longest or 1.0, unit),
    )
    words = (
        "The batch is cut into microbatches by a rule that does not know the plan; they are then dealt so that the "
        f"rank with most has as little as can be. A box is as long as its {unit}; its number is that of the microbatch."
    )
    table = as_table(("rank", "microbatches", unit), rows)
    return Section("How the batch is dealt", [text(words), picture, table])


def _of_microbatch(samples: Sequence[int], number: int) -> str:
    shown = " ".join(map(str, samples[:MOST_SAMPLES])) + " ..." * (len(samples) > MOST_SAMPLES)
    return f"microbatch {number}: samples {shown}\t{number}"


# --- the backward --------------------------------------------------------------------------------------


def _buckets(found: Mechanisms) -> list[Section]:
    if not found.buckets:
        return []
    what = "unit" if found.are_units else "bucket"
    drawn = [
        Box(0, 100 * one.begin, 100 * one.end, COMPUTES, one.name, pale=number % 2)
        for number, one in enumerate(found.backward)
    ]
    labels = ["backward"]
    for number, one in enumerate(found.buckets):
        labels.append(f"{what} {number}")
        text_of = f"{size_in_words(one.bytes)}, {len(one.parameters)} parameters, from {one.parameters[0]}"
        drawn.append(Box(number + 1, 100 * one.begin, 100 * max(one.end, one.begin + 0.002), FILLS, f"{text_of}\t"))
    picture = boxes(
        labels,
        drawn,
        {COMPUTES: "c2", FILLS: "c1"},
        title=f"{what}s under the last backward",
        longest=100.0,
        across=ChartAxis(0.0, 100.0, "share of the backward's operations", 1.0, "%"),
    )
    rows = [
        (str(number), size_in_words(one.bytes), str(len(one.parameters)), f"{one.begin:.0%}", f"{one.end:.0%}")
        for number, one in enumerate(found.buckets)
    ]
    words = (
        f"A {what} is sent as soon as its last gradient is there, while the backward goes on: "
        f"{_before_its_end(found)}. What a message takes depends on the link: evenly report draws it as measured."
    )
    table = as_table((what, "size", "parameters", "first gradient at", "sent at"), rows)
    return [Section(f"{what.capitalize()}s of gradients under the backward", [text(words), picture, table])]


def _before_its_end(found: Mechanisms) -> str:
    early = sum(one.bytes for one in found.buckets if one.end < 1 - 1e-6)
    share = early / (sum(one.bytes for one in found.buckets) or 1)
    if not early:
        return "here all is full only when it ends"
    return f"{share:.0%} of the bytes before its end" if share >= 0.01 else "less than 1% of the bytes before its end"


# --- the ring ------------------------------------------------------------------------------------------


def _ring(found: Mechanisms) -> list[Section]:
    if not found.ring or not found.chunk_bytes:
        return []
    ranks, steps = found.ranks, len(found.ring[0])
    sums = summed(found)
    drawn = [
        Box(
            rank,
            at,
            at + 0.94,
            step.phase,
            _of_chunk(step.sent, sums[at][rank][step.sent], (rank + 1) % ranks * found.apart),
        )
        for rank, own in enumerate(found.ring)
        for at, step in enumerate(own)
    ]
    picture = boxes(
        [f"rank {rank * found.apart}" for rank in range(ranks)],
        drawn,
        IN_STEPS,
        title="what each rank sends to the next one, step by step",
        longest=steps,
        across=ChartAxis(0.0, float(steps), "step of the ring"),
    )
    first = sum(found.chunk_bytes)
    sent = sum(found.chunk_bytes[step.sent] for step in found.ring[0])
    words = (
        f"A ring all-reduce of the first sum ({size_in_words(first)}) over {ranks} ranks, as evenly.comm.ring runs it: "
        f"cut into {ranks} chunks, each rank sends one at a time to its neighbour, {size_in_words(sent)} in all, "
        f"{sent / (first or 1):.2f} times the sum. In the first half chunks are added up, in the second handed round."
    )
    return [Section("The steps of a ring", [text(words), picture])]


def _of_chunk(number: int, ranks: int, to: int) -> str:
    return f"chunk {number}, the sum of {ranks} rank{'s' * (ranks != 1)}, to rank {to}\t{number}"


def summed(found: Mechanisms) -> list[list[list[int]]]:
    """Before each step, and after the last, of each rank how many ranks' values are in each of its chunks."""
    states = [[[1] * found.ranks for _ in range(found.ranks)]]
    for at in range(len(found.ring[0])):
        before = states[-1]
        after = [[*row] for row in before]
        for rank, own in enumerate(found.ring):
            step, came = own[at], before[(rank - 1) % found.ranks]
            adds = before[rank][step.received] if step.phase == "reduce-scatter" else 0
            after[rank][step.received] = adds + came[step.received]
        states.append(after)
    return states


# --- ZeRO ----------------------------------------------------------------------------------------------


def _pieces(found: Mechanisms) -> list[Section]:
    if not found.pieces:
        return []
    drawn, labels = list[Box](), [f"rank {rank * found.apart}" for rank in range(len(found.pieces))]
    elements = {name: max(own[name][1] for own in found.pieces) for name in found.pieces[0]}
    whole = sum(elements.values())
    for rank, own in enumerate(found.pieces):
        at = 0
        for number, (name, (begin, end)) in enumerate(own.items()):
            if end > begin and number < MOST_PARTS:
                words = f"{name}: elements {begin:,} to {end - 1:,}\t"
                drawn.append(Box(rank, at + begin, at + end, "keeps", words, pale=number % 2))
            at += elements[name]
    picture = boxes(
        labels,
        drawn,
        {"keeps": "c4"},
        title="the part of each parameter that a rank keeps",
        longest=whole,
        across=ChartAxis(0.0, float(whole or 1), "elements of the model, parameter by parameter"),
    )
    words = (
        "Each parameter is cut along its first dim, a piece for each rank; the optimizer's state, the gradients and "
        "the parameters are kept by piece, as far as the stage of ZeRO goes."
    )
    return [Section("What each rank keeps under ZeRO", [text(words), picture])]


def _memory(found: Mechanisms) -> list[Section]:
    if not found.held:
        return []
    bars = [bar for stage, ranks in found.held.items() for bar in _bars_of(stage, ranks)]
    causes = [*dict.fromkeys(cause for bar in bars for cause, size in bar.parts.items() if size)]
    rows = [(bar.label, *(size_in_words(bar.parts.get(cause, 0.0)) for cause in causes)) for bar in bars]
    refused = [text(f"zero={stage}: {why}", kind="note") for stage, why in found.refused.items()]
    words = "The peak of each rank in the first step by what takes it, as the planner counts it, under every stage."
    picture = stacked(bars, size_in_words, title="memory at the peak")
    return [Section("Memory under each stage of ZeRO", [text(words), picture, as_table(("", *causes), rows), *refused])]


def _bars_of(stage: int, ranks: Sequence[Mapping[str, float]]) -> Iterator[StackedBar]:
    for parts, numbers in groupby(range(len(ranks)), key=ranks.__getitem__):
        alike = [*numbers]
        of = f"rank {alike[0]}" if len(alike) == 1 else f"ranks {alike[0]} to {alike[-1]}"
        yield StackedBar(f"zero={stage}, {of}", parts)


# --- cuts of the model ---------------------------------------------------------------------------------


def _stages(one: Document) -> Section:
    drawn, at = list[Box](), 0.0
    for row in one["stages"]:
        width = 100 * row["cost"]
        names = f"{row['blocks'][0]} to {row['blocks'][-1]}" if row["blocks"] else "no block"
        words = f"{names}, {row['elements']:,} parameters\t{row['stage']}"
        drawn.append(Box(row["rank"], at, at + width, "stage", words, pale=row["stage"] % 2))
        at += width
    ranks = {row["rank"]: ranks_in_words(row["ranks"]) for row in one["stages"]}
    picture = boxes(
        [ranks[rank] for rank in sorted(ranks)],
        drawn,
        {"stage": "c0"},
        title="the stages along the model",
        longest=100.0,
        across=ChartAxis(0.0, 100.0, "share of a forward's cost", 1.0, "%"),
    )
    memory = [
        StackedBar(
            f"stage {row['stage']}, {ranks_in_words(row['ranks'])}",
            {"weights": row["weight_bytes"], "saved by microbatches in flight": row["saved_bytes"] * row["in_flight"]},
        )
        for row in one["stages"]
    ]
    bars = stacked(memory, size_in_words, title="what each stage holds")
    table = as_table(STAGE_HEADS, stage_rows(one))
    words = text(stage_title(one)), text(stages_in_a_line(one))
    return Section("The model cut into stages", [words[0], picture, bars, table, words[1]])


def _splits(one: Document, found: Mechanisms) -> Section:
    drawn = dict[tuple[Any, ...], list[str]]()
    for group in one["groups"]:
        for parameter in group["parameters"] if group["split"] else ():
            shape = found.shapes.get(parameter["name"], ())
            drawn.setdefault((shape, parameter["dim"], parameter["outer"]), []).append(parameter["name"])
    cut = [CutMatrix(_one_name(names), shape, dim, one["ranks"], times) for (shape, dim, times), names in drawn.items()]
    parts = [text(in_a_line(one)), matrices(cut[:MOST_MATRICES], title="how weights are split over the ranks")]
    if len(cut) > MOST_MATRICES:
        parts.append(text(f"{len(cut) - MOST_MATRICES} further kinds of weights are not drawn", kind="note"))
    return Section("Weights split by the tensor axis", parts)


def _one_name(names: Sequence[str]) -> str:
    """What parameters of one shape are called; those that differ in more than numbers of blocks are counted."""
    alike = [name for name in names if abbreviated([names[0], name]).count("*") <= 1]
    return abbreviated(alike) + (f" and {len(names) - len(alike)} more" if len(alike) < len(names) else "")
