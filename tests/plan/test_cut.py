"""The exact cut against brute force, on random chains, with and without bounds on memory."""

from __future__ import annotations

from collections.abc import Iterator
from cProfile import Profile
from itertools import combinations, pairwise
from pstats import Stats
from random import Random

import pytest

from evenly.errors import PlanError
from evenly.plan.cut import Memory, cut


def every_cut(blocks: int, parts: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, blocks), parts - 1):
        yield tuple(end - first for first, end in pairwise((0, *inner, blocks)))


def sums(values: list[int], counts: tuple[int, ...], before: int, after: int) -> list[int]:
    ends = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
    totals = [sum(values[first:end]) for first, end in pairwise(ends)]
    totals[0] += before
    totals[-1] += after
    return totals


def fits(memory: Memory, counts: tuple[int, ...]) -> bool:
    weights = sums([*memory.weight_bytes], counts, memory.before[0], memory.after[0])
    activations = sums([*memory.activation_bytes], counts, memory.before[1], memory.after[1])
    taken = [w + a * held for w, a, held in zip(weights, activations, memory.in_flight, strict=True)]
    return all(size <= limit for size, limit in zip(taken, memory.limit_bytes, strict=True))


def drawn_memory(random: Random, blocks: int, parts: int) -> Memory:
    return Memory(
        weight_bytes=[random.randint(0, 9) for _ in range(blocks)],
        activation_bytes=[random.randint(0, 3) for _ in range(blocks)],
        in_flight=[*range(parts, 0, -1)],
        limit_bytes=[random.randint(10, 90) for _ in range(parts)],
        before=(random.randint(0, 9), random.randint(0, 2)),
        after=(random.randint(0, 9), 0),
    )


@pytest.mark.parametrize("bounded", [False, True])
def test_no_cut_is_better(bounded: bool) -> None:
    random, refused = Random(7), 0
    for _ in range(1000):
        blocks = random.randint(1, 14)
        parts = random.randint(1, min(blocks, 8))
        costs, ends = [random.randint(0, 12) for _ in range(blocks)], (random.randint(0, 15), random.randint(0, 15))
        memory = drawn_memory(random, blocks, parts) if bounded else None
        cuts = [counts for counts in every_cut(blocks, parts) if memory is None or fits(memory, counts)]
        best = min(
            ((max(of), sum(x * x for x in of), counts) for counts in cuts for of in [sums(costs, counts, *ends)]),
            default=None,
        )
        if best is None:
            refused += 1
            with pytest.raises(PlanError, match=r"stage \d+ \(blocks"):
                cut(costs, parts, before=ends[0], after=ends[1], memory=memory)
        else:
            assert cut(costs, parts, before=ends[0], after=ends[1], memory=memory) == best[2]
    assert 100 < refused < 900 if bounded else refused == 0


def test_what_lies_at_the_ends_counts() -> None:
    assert cut([1.0] * 6, 2) == (3, 3)
    assert cut([1.0] * 6, 2, after=3.0) == (4, 2)
    assert cut([0.1] * 10, 4, before=0.2) == (1, 3, 3, 3)


def test_among_cuts_with_the_same_slowest_stage_the_others_are_even() -> None:
    assert cut([9, 1, 1, 1, 1, 1, 1], 3) == (1, 3, 3)


def test_a_stage_that_fits_nowhere_is_named_with_its_bytes() -> None:
    memory = Memory(
        weight_bytes=[10, 10, 10],
        activation_bytes=[1, 1, 1],
        in_flight=[4, 2],
        limit_bytes=[100, 1500],
        after=(2000, 5),
    )
    with pytest.raises(PlanError) as refused:
        cut([1, 1, 1], 2, memory=memory)
    assert "stage 1 (blocks 2 to 2, 2 microbatches in flight) takes 2,022 bytes" in refused.value.found
    assert "limit is 1,500" in refused.value.found


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(PlanError, match="every stage needs a block"):
        cut([1, 2], 3)


def test_the_work_grows_hardly_faster_than_the_blocks() -> None:
    def calls(blocks: int) -> int:
        profile = Profile()
        limits = Memory(
            weight_bytes=[3] * blocks, activation_bytes=[1] * blocks, in_flight=[2] * 8, limit_bytes=[blocks] * 8
        )
        assert sum(profile.runcall(cut, [0.1] * blocks, 8, after=9.0, memory=limits)) == blocks
        return Stats(profile).total_calls  # type: ignore[attr-defined]

    assert calls(1_000) < 6 * calls(250)
