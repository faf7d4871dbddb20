"""Where a chain of blocks is cut into stages, so that the slowest is as fast as it can be. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from operator import add
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
    squares is least, then the first stages have fewest blocks. Every stage is judged by itself, with several stages per
    rank too: stages of equal cost are equal ranks, and each stage works on a different microbatch at the same time,
    so that the slowest sets the pace.

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
    slowest, _ = _best(len(costs), parts, lambda part: cost(part) if fits(part) else inf, max)
    if memory and slowest == inf:
        raise _too_large(len(costs), parts, memory)

    def square(part: BlockRange) -> float:
        return cost(part) ** 2 if fits(part) and cost(part) <= slowest else inf

    return _best(len(costs), parts, square, add)[1]


def _sums(values: Sequence[float], parts: int, before: float, after: float) -> Score:
    """What a part has of `values`, which are given per block."""
    sums = [[0, *accumulate(values[first:])] for first in range(len(values))]

    def of_part(part: BlockRange) -> float:
        ends = before * (part.stage == 0) + after * (part.stage == parts - 1)
        return sums[part.first][part.end - part.first] + ends

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


def _best(blocks: int, parts: int, score: Score, join: Callable[[float, float], float]) -> tuple[float, Counts]:
    """The least score of a cut, joined over its parts, and how many blocks each of these has."""
    best: dict[int, tuple[float, Counts]] = {blocks: (0.0, ())}  # of the stages that follow, by their first block
    for stage in reversed(range(parts)):
        following, best = best, {}
        for first in range(stage, blocks - parts + stage + 1):
            best[first] = min(
                (join(score(BlockRange(stage, first, end)), rest), (end - first, *counts))
                for end, (rest, counts) in following.items()
                if end > first
            )
    return best[0]


def _too_large(blocks: int, parts: int, memory: Memory) -> PlanError:
    beyond = _beyond(memory, parts)
    _, counts = _best(blocks, parts, beyond, max)
    worst = max(map(BlockRange, range(parts), accumulate(counts, initial=0), accumulate(counts)), key=beyond)
    limit = memory.limit_bytes[worst.stage]
    return PlanError(
        f"cut {blocks} blocks into {parts} stages that fit into memory",
        f"in the cut that comes nearest, stage {worst.stage} (blocks {worst.first} to {worst.end - 1}, "
        f"{memory.in_flight[worst.stage]} microbatches in flight) takes {beyond(worst) + limit:,.0f} bytes, "
        f"and its limit is {limit:,}",
        "use more stages, smaller microbatches, recompute=full, or a schedule with fewer microbatches in flight",
    )
