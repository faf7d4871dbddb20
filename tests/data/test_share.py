"""Shares are the best there are where that can be proved, and never worse than simple rules elsewhere."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenly.data.share import SLACK, deal, deal_by_speed

COSTS = st.one_of(st.integers(0, 60), st.floats(0, 60))


def largest_load(costs: list[float], shares: list[list[int]]) -> float:
    return max(sum(costs[microbatch] for microbatch in share) for share in shares)


def least_load(costs: list[float], ranks: int) -> float:
    """By trying every deal that gives the first microbatch to rank 0."""
    best = sum(costs)
    for owners in product(range(ranks), repeat=max(len(costs) - 1, 0)):
        loads = [0.0] * ranks
        for cost, owner in zip(costs, (0, *owners), strict=False):
            loads[owner] += cost
        best = min(best, max(loads))
    return best


def in_turn(costs: list[float], ranks: int) -> list[list[int]]:
    return [list(range(rank, len(costs), ranks)) for rank in range(ranks)]


def planted(ranks: int, pieces: int, seed: int) -> tuple[list[float], float]:
    """Costs that a perfect deal shares into equal loads, and that load."""
    draw, load = random.Random(seed), 10_000
    costs: list[float] = []
    for _ in range(ranks):
        ends = sorted(draw.sample(range(1, load), pieces - 1))
        costs += [end - begin for begin, end in zip([0, *ends], [*ends, load], strict=True)]
    draw.shuffle(costs)
    return costs, load


@settings(max_examples=100, deadline=None)
@given(costs=st.lists(COSTS, min_size=1, max_size=7), ranks=st.integers(1, 4))
def test_few_microbatches_are_dealt_as_well_as_can_be(costs: list[float], ranks: int):
    assert largest_load(costs, deal(costs, ranks)) <= least_load(costs, ranks) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("costs", "ranks", "least"),
    [
        ([3, 3, 2, 2, 2], 2, 6),  # costliest first gives 7
        ([5, 5, 4, 4, 3, 3, 3], 3, 9),  # and here 11
        ([7, 7, 6, 6, 5, 5, 4, 4, 4], 4, 12),  # and here 15
        ([10, 9, 1, 1], 2, 11),
    ],
)
def test_where_the_costliest_first_fails(costs: list[float], ranks: int, least: float):
    assert largest_load(costs, deal(costs, ranks)) == least


@settings(max_examples=80, deadline=None)
@given(costs=st.lists(COSTS, max_size=80), ranks=st.integers(1, 12))
def test_every_microbatch_runs_once_and_no_deal_is_worse_than_in_turn(costs: list[float], ranks: int):
    shares = deal(costs, ranks)
    assert len(shares) == ranks
    assert sorted(microbatch for share in shares for microbatch in share) == list(range(len(costs)))
    assert all(share == sorted(share) for share in shares)
    assert largest_load(costs, shares) <= largest_load(costs, in_turn(costs, ranks)) * (1 + 1e-12)


@settings(max_examples=100, deadline=None)
@given(costs=st.lists(COSTS, min_size=1, max_size=80), ranks=st.integers(1, 12))
def test_no_rank_is_ahead_of_the_mean_by_more_than_one_microbatch(costs: list[float], ranks: int):
    bound = sum(costs) / ranks + max(costs) * (1 - 1 / ranks)
    assert largest_load(costs, deal(costs, ranks)) <= bound * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(ranks=st.integers(2, 16), pieces=st.integers(2, 6), seed=st.integers(0, 10**6))
def test_load_is_within_a_third_of_the_least_possible(ranks: int, pieces: int, seed: int):
    costs, least = planted(ranks, pieces, seed)
    assert least <= largest_load(costs, deal(costs, ranks)) <= 4 / 3 * least


@pytest.mark.parametrize("seed", range(10))
def test_a_perfect_deal_of_few_microbatches_is_found(seed: int):
    costs, least = planted(3, 4, seed)
    assert largest_load(costs, deal(costs, 3)) == least


def test_exchanges_come_close_where_there_are_too_many_microbatches_to_search():
    excess: list[float] = []
    for seed in range(10):
        costs, least = planted(10, 6, seed)
        excess.append(largest_load(costs, deal(costs, 10)) / least - 1)
    assert sum(excess) / len(excess) < 0.004  # the costliest first alone: 0.01


@settings(max_examples=50, deadline=None)
@given(count=st.integers(0, 50), ranks=st.integers(1, 12), cost=COSTS)
def test_equal_costs_give_consecutive_runs_of_like_count(count: int, ranks: int, cost: float):
    shares = deal([cost] * count, ranks)
    counts = [len(share) for share in shares]
    assert [microbatch for share in shares for microbatch in share] == list(range(count))
    assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1


@settings(max_examples=50, deadline=None)
@given(costs=st.lists(COSTS, max_size=8), more=st.integers(0, 5))
def test_ranks_beyond_the_microbatches_have_empty_shares(costs: list[float], more: int):
    shares = deal(costs, len(costs) + more + 1)
    assert all(len(share) == 1 for share in shares[: len(costs)])
    assert shares[len(costs) :] == [[]] * (more + 1)


def test_every_rank_comes_to_the_same_answer():
    draw = random.Random(1)
    for count in (10, 24, 100):
        costs = [draw.random() for _ in range(count)]
        assert deal(costs, 5) == deal(tuple(costs), 5)


def test_many_microbatches_are_dealt_close_to_the_mean():
    draw = random.Random(2)
    costs = [draw.randint(1, 2048) for _ in range(4096)]
    assert largest_load(costs, deal(costs, 64)) < 1.001 * sum(costs) / 64


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 60), st.floats(0, 60)), max_size=40), st.integers(1, 8))
def test_a_second_cost_is_evened_out_within_the_slack(pairs: list[tuple[float, float]], ranks: int):
    costs, second = [a for a, _ in pairs], [b for _, b in pairs]
    plain, shares = deal(costs, ranks), deal(costs, ranks, second)
    assert sorted(microbatch for share in shares for microbatch in share) == list(range(len(costs)))
    assert largest_load(costs, shares) <= largest_load(costs, plain) * SLACK * (1 + 1e-9)
    if len(set(costs)) > 1:
        assert largest_load(second, shares) <= largest_load(second, plain) * (1 + 1e-9)


def test_work_that_grows_with_the_square_is_even_too():
    draw = random.Random(3)
    lengths = sorted(draw.randint(16, 1024) for _ in range(30))
    costs = [float(2048 // length * length) for length in lengths]
    second = [cost * length for cost, length in zip(costs, lengths, strict=True)]
    for ranks in (2, 4):
        shares = deal(costs, ranks, second)
        assert largest_load(costs, shares) < 1.03 * sum(costs) / ranks
        assert largest_load(second, shares) < 1.03 * sum(second) / ranks


@pytest.mark.parametrize(("costs", "ranks"), [([1, 2], 0), ([1, -2], 2), ([1, float("nan")], 2)])
def test_impossible_deals_are_refused(costs: list[float], ranks: int):
    with pytest.raises(ValueError, match="cannot deal"):
        deal(costs, ranks)


def test_shares_follow_speeds() -> None:
    assert deal_by_speed([1.0] * 12, [1.0, 0.5]) == [[0, 1, 3, 4, 6, 7, 9, 10], [2, 5, 8, 11]]
    assert [*map(len, deal_by_speed([1.0] * 12, [0.25, 1, 1]))] == [1, 6, 5]
    assert deal_by_speed([1.0], [0.5, 1.0]) == [[], [0]]


@given(st.integers(1, 12), st.lists(st.sampled_from([0.25, 0.5, 1.0]), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_equal_costs_are_dealt_by_speed_as_well_as_can_be(count: int, speeds: list[float]) -> None:
    shares = deal_by_speed([1.0] * count, speeds)
    assert sorted(n for share in shares for n in share) == list(range(count))
    every = [c for c in product(range(count + 1), repeat=len(speeds)) if sum(c) == count]
    best = min(max(n / speed for n, speed in zip(counts, speeds, strict=True)) for counts in every)
    assert max(len(share) / speed for share, speed in zip(shares, speeds, strict=True)) == best
