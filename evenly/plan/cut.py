"""Where a chain of blocks is cut into stages, so that the slowest is as fast as it can be. Pure; imports no torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from evenly.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What bounds a cut, in bytes: a stage keeps its weights once, and its activations per microbatch in flight.

    weight_bytes:     of every block: parameters with gradients, state of the optimizer and whatever else stays.
    activation_bytes: of every block, what one microbatch leaves for its backward pass.
    in_flight:        for every stage, the most microbatches whose activations it holds (`plan.schedule.in_flight`).
    limit_bytes:      for every stage, what it may take.
    before, after:    weight and activation bytes of what lies before the first block and after the last.
    """

    weight_bytes: Sequence[int]
    activation_bytes: Sequence[int]
    in_flight: Sequence[int]
    limit_bytes: Sequence[int]
    before: tuple[int, int] = (0, 0)
    after: tuple[int, int] = (0, 0)


class BlockRange(NamedTuple):
    """A stage as a candidate: its number, its first block, and the one after its last."""

    stage: int
    first: int
    end: int


Counts = tuple[int, ...]
# A number that is to be small, infinite where it may not be.
Score = Callable[[BlockRange], float]


def cut(
    costs: Sequence[float], parts: int, *, before: float = 0.0, after: float = 0.0, memory: Memory | None = None
) -> tuple[int, ...]:
    """How many blocks each of `parts` stages gets: contiguous, at least one each, in the model's order.

    costs:         of every block, at least 0, in any unit (predicted seconds).
    before, after: of what the first and the last stage have besides: embeddings before, the head after the blocks.
    memory:        what every stage has to fit into.

    The largest cost of a stage is as small as can be, by dynamic programming over all cuts; among such cuts the sum of
    squares is least, then the first stages have fewest blocks. Of n blocks n log n parts are looked at for each stage.
    Every stage is judged by itself, with several stages per rank too: stages of equal cost are equal ranks, and each
    stage works on a different microbatch at the same time, so that the slowest sets the pace.

    Raises `PlanError` where there are fewer blocks than stages, or where nothing fits: it names the stage that takes
    most beyond its limit in the cut where that is least.
    """
    if len(costs) < parts:
        raise PlanError(
            f"cut {len(costs)} blocks into {parts} stages",
            "every stage needs a block",
            f"use at most {len(costs)} stages, or a model with more blocks",
        )
    cost = _sums(costs, parts, before, after)
    fits = _fits(memory, parts)
    slowest, _ = _least_largest(len(costs), parts, lambda part: cost(part) if fits(part) else inf)
    if memory and slowest == inf:
        raise _too_large(len(costs), parts, memory)
    return _most_even(len(costs), parts, cost, lambda part: fits(part) and cost(part) <= slowest)


def _sums(values: Sequence[float], parts: int, before: float, after: float) -> Score:
    """What a part has of `values`, which are given per block; exact, so that equal parts are: in a unit of its own."""
    ratios = [one.as_integer_ratio() for one in (*values, before, after)]
    unit = max(denominator for _, denominator in ratios)  # each a power of two
    *each, first, last = (numerator * (unit // denominator) for numerator, denominator in ratios)
    sums = [0, *accumulate(each)]

    def of_part(part: BlockRange) -> int:
        ends = first * (part.stage == 0) + last * (part.stage == parts - 1)
        return sums[part.end] - sums[part.first] + ends

    return of_part


def _bytes(memory: Memory, parts: int) -> Score:
    (weights_before, activations_before), (weights_after, activations_after) = memory.before, memory.after
    weights = _sums(memory.weight_bytes, parts, weights_before, weights_after)
    activations = _sums(memory.activation_bytes, parts, activations_before, activations_after)
    return lambda part: weights(part) + memory.in_flight[part.stage] * activations(part)


def _fits(memory: Memory | None, parts: int) -> Callable[[BlockRange], bool]:
    beyond = _beyond(memory, parts) if memory else None
    return lambda part: beyond is None or beyond(part) <= 0


def _beyond(memory: Memory, parts: int) -> Score:
    """How many bytes a part takes beyond its limit; below 0 where it fits."""
    taken = _bytes(memory, parts)
    return lambda part: taken(part) - memory.limit_bytes[part.stage]


def _least_largest(blocks: int, parts: int, score: Score) -> tuple[float, Counts]:
    following: dict[int, float] = {blocks: 0}  # of the stages that follow, by their first block
    ends: list[dict[int, int]] = []  # of each stage from the last on, by its first block
    for stage in reversed(range(parts)):
        best: dict[int, float] = {}
        ends.append({})
        nearest: list[int] = []  # ends, the last one nearest; each leaves less to follow than all that are nearer
        for first in reversed(range(stage, blocks - parts + stage + 1)):
            if first + 1 in following:
                while nearest and following[nearest[-1]] >= following[first + 1]:
                    nearest.pop()
                nearest.append(first + 1)
            # From one to the next the own score grows, and what follows gets less: the best is where they meet.
            own, places = partial(_of_range, score, stage, first), range(-1, -1 - len(nearest), -1)
            meet = bisect_left(places, True, key=lambda at: own(nearest[at]) >= following[nearest[at]])
            choices = [nearest[at] for at in places[max(meet - 1, 0) : meet + 1]]
            best[first] = most = min(max(own(end), following[end]) for end in choices)
            at = bisect_left(places, True, key=lambda at: following[nearest[at]] <= most)
            ends[-1][first] = nearest[places[at]]
        following = best
    return following[0], _counts(ends)


def _of_range(score: Score, stage: int, first: int, end: int) -> float:
    return score(BlockRange(stage, first, end))


def _most_even(blocks: int, parts: int, score: Score, allowed: Callable[[BlockRange], bool]) -> Counts:
    """How many blocks each part has where the sum of squares of the scores is least; of equals the first have fewest.

    A part within an allowed one is allowed. So the best end never lies further back for a later first block, and half
    of the first blocks bounds the ends of the other half.
    """
    following: dict[int, float] = {blocks: 0}
    ends: list[dict[int, int]] = []
    for stage in reversed(range(parts)):
        columns, rows, last = sorted(following), list[tuple[int, int, int]](), 0
        for first in range(stage, blocks - parts + stage + 1):
            last = max(last, first)
            while last < columns[-1] and allowed(BlockRange(stage, first, last + 1)):
                last += 1
            low, high = bisect_left(columns, first + 1), bisect_right(columns, last)
            rows += [(first, low, high)] * (low < high)
        best: dict[int, float] = {}
        ends.append({})
        waiting = [(0, len(rows), 0, len(columns))]
        while waiting:
            begin, end, least, most = waiting.pop()
            if begin < end:
                middle = (begin + end) // 2
                first, low, high = rows[middle]
                choices = columns[max(low, least) : min(high, most)]
                best[first], at = min(
                    (score(BlockRange(stage, first, one)) ** 2 + following[one], one) for one in choices
                )
                ends[-1][first] = at
                column = bisect_left(columns, at)
                waiting += [(begin, middle, least, column + 1), (middle + 1, end, column, most)]
        following = best
    return _counts(ends)


def _counts(ends: Sequence[dict[int, int]]) -> Counts:
    found = [0]
    for of_stage in reversed(ends):
        found.append(of_stage[found[-1]])
    return tuple(end - begin for begin, end in pairwise(found))


def _too_large(blocks: int, parts: int, memory: Memory) -> PlanError:
    beyond = _beyond(memory, parts)
    _, counts = _least_largest(blocks, parts, beyond)
    worst = max(map(BlockRange, range(parts), accumulate(counts, initial=0), accumulate(counts)), key=beyond)
    limit = memory.limit_bytes[worst.stage]
    return PlanError(
        f"cut {blocks} blocks into {parts} stages that fit into memory",
        f"in the cut that comes nearest, stage {worst.stage} (blocks {worst.first} to {worst.end - 1}, "
        f"{memory.in_flight[worst.stage]} microbatches in flight) takes {beyond(worst) + limit:,.0f} bytes, "
        f"and its limit is {limit:,}",
        "use more stages, smaller microbatches, recompute=full, or a schedule with fewer microbatches in flight",
    )
