"""Which rank is steadily slow, from the times of steps."""

from __future__ import annotations

import random

import pytest

from evenly.observe.slow import SPAN_S, SPANS, SlowRank, SlowRanks


def found_in(steps: list[list[float]], alike: list[int] | None = None) -> list[SlowRank]:
    slow = SlowRanks(alike or [0] * len(steps[0]))
    return [one for number, own_s in enumerate(steps, 1) for one in slow.add(own_s, number * SPAN_S)]


def test_a_rank_that_takes_twice_as_long_is_named_once() -> None:
    assert found_in([[1.0, 1.0, 2.0]] * 100) == [SlowRank(2, 2.0)]
    assert found_in([[3.0, 1.5]] * 100) == [SlowRank(0, 2.0)]
    assert found_in([[3.0, 1.5]] * (SPANS - 1)) == []
    assert str(SlowRank(2, 2.0)) == "rank 2 is slow: its own computing takes 2.0 x as long as that of the others"


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_slowness(seed: int) -> None:
    """Now one is slower for a while and now the other, as on a machine with other work."""
    chance = random.Random(seed)
    steps: list[list[float]] = []
    while len(steps) < 400:
        steps += [[chance.uniform(1, 3), 1.0]] * chance.randint(1, 6) + [[1.0, 2.0]] * chance.randint(2, 6)
    assert found_in(steps) == []
    steady = [[own * chance.uniform(0.9, 1.1) for own in (1.0, 1.0, 1.1)] for _ in range(400)]
    assert found_in(steady) == []


def test_a_slow_rank_is_found_in_noise_and_after_a_good_begin() -> None:
    chance = random.Random(3)
    steps = [[own * chance.uniform(0.85, 1.15) for own in (1.0, 1.0 if n < 50 else 1.8)] for n in range(100)]
    [slow] = found_in(steps)
    assert slow.rank == 1 and found_in(steps[:50]) == []


def test_short_steps_are_taken_together() -> None:
    """A slow second of a thousand steps is no slow rank, ten seconds are."""
    slow = SlowRanks([0, 0])
    ends = [number / 1000 for number in range(1, 20001)]
    found = [(end, one) for end in ends for one in slow.add([1.0, 3.0 if 2 < end < 3 or end > 5 else 1.0], end)]
    assert [one for _, one in found] == [SlowRank(1, 3.0)] and found[0][0] > 13


def test_only_ranks_that_do_the_same_are_compared() -> None:
    """The last stage of a pipeline has more to do."""
    assert found_in([[1.0, 3.0]] * 50, [0, 1]) == []
    assert found_in([[1.0, 3.0, 2.0, 3.0]] * 50, [0, 1, 0, 1]) == [SlowRank(2, 2.0)]


def test_a_rank_whose_time_is_not_known_is_not_judged() -> None:
    assert found_in([[0.0, 3.0]] * 50) == [] and found_in([[1.0]] * 50) == []
