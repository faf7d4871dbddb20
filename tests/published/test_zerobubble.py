"""Zero-bubble orders made for given times: complete, within their limit, and without gaps where there can be none."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from benchmarks.published.zerobubble import greedy_orders
from evenly.plan.orders import in_flight_of
from evenly.plan.schedule import in_flight
from evenly.planner.timeline import Costs, Timeline, ideal_bubble, simulate


def equal(ranks: int, transfer_s: float = 0.0) -> Costs:
    one = [0.1] * ranks
    return Costs(forward=one, backward=[0.2] * ranks, backward_input=one, backward_weight=one, transfer_s=transfer_s)


def unequal(ranks: int, random: Random) -> Costs:
    seconds = [[random.uniform(0.5, 2.0) for _ in range(ranks)] for _ in range(4)]
    return Costs(
        forward=seconds[0],
        backward=seconds[1],
        backward_input=seconds[2],
        backward_weight=seconds[3],
        transfer_s=random.choice([0.0, 0.2, 2.0]),
    )


def gaps(timeline: Timeline) -> list[float]:
    """For every rank the share of the time from its own beginning to its own end in which it waits."""
    own = [[span for span in timeline.spans if span.rank == rank] for rank in range(timeline.ranks)]
    return [1 - busy / (spans[-1].end_s - spans[0].begin_s) for busy, spans in zip(timeline.busy_s, own, strict=True)]


def test_every_rank_runs_all_and_holds_no_more_than_the_limit() -> None:
    random = Random(1)
    for ranks, microbatches, limit in product((1, 2, 4, 7), (1, 5, 20), (1, 2, 4, 8)):
        costs = unequal(ranks, random)
        order = greedy_orders(ranks, microbatches, costs, limit)
        assert [len({*actions}) for actions in order] == [3 * microbatches] * ranks
        assert max(held for of_rank in in_flight(order) for held in of_rank) <= limit
        assert len(simulate(order, costs).spans) == 3 * microbatches * ranks


def test_a_rank_works_without_a_gap_where_it_may_hold_twice_as_many_as_there_are_ranks() -> None:
    for ranks, microbatches in product((2, 4, 8), (16, 24, 64)):
        timeline = simulate(greedy_orders(ranks, microbatches, equal(ranks), 2 * ranks), equal(ranks))
        assert gaps(timeline) == pytest.approx([0.0] * ranks, abs=1e-9)
        assert timeline.bubble == pytest.approx([ideal_bubble("zero-bubble", ranks, 1, microbatches)] * ranks)


def test_a_rank_that_may_hold_fewer_waits() -> None:
    costs = equal(4, transfer_s=0.01)
    waits = [max(gaps(simulate(greedy_orders(4, 24, costs, limit), costs))) for limit in (1, 4, 8)]
    assert waits == sorted(waits, reverse=True) and waits[0] > 0.5 and waits[-1] < 0.03


def test_the_order_of_two_ranks() -> None:
    order = greedy_orders(2, 3, equal(2), 4)
    assert " ".join(map(str, order[1])) == "F1.0 I1.0 F1.1 I1.1 F1.2 I1.2 W1.0 W1.1 W1.2"


def test_it_is_registered_as_a_schedule_that_holds_twice_as_many_as_there_are_ranks() -> None:
    held = in_flight_of("zb-2p", 4, 1, 32)
    assert [max(of_rank) for of_rank in held] == [8, 8, 8, 8]
