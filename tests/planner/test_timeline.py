"""The simulated step against the literature's formulas, and what stages hold in memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from evenly.errors import UserError
from evenly.parallel.pipeline.orders import orders
from evenly.plan.schedule import COMPUTE, SCHEDULES, Action, Schedule, in_flight, runnable, stages_per_rank
from evenly.planner.timeline import Costs, Span, Timeline, costs_of, ideal_bubble, simulate, unevenness


def equal(stages: int, transfer_s: float = 0.0) -> Costs:
    one = [1.0] * stages
    return Costs(forward=one, backward=[2.0] * stages, backward_input=one, backward_weight=one, transfer_s=transfer_s)


def simulated(schedule: Schedule, ranks: int, microbatches: int, number: int | None = None) -> Timeline:
    number = stages_per_rank(schedule, number)
    return simulate(orders(schedule, ranks, number, microbatches), equal(ranks * number))


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble"])
def test_a_step_of_equal_stages_has_the_bubble_of_the_literature(schedule: Schedule) -> None:
    numbers = (1,) if schedule in ("naive", "gpipe", "1f1b") else (1, 2, 3)
    checked = 0
    for ranks, number, microbatches in product((1, 2, 3, 4), numbers, range(1, 13)):
        ideal = ideal_bubble(schedule, ranks, number, microbatches)
        if ideal is not None and runnable(schedule, ranks, number, microbatches) == microbatches:
            found = simulated(schedule, ranks, microbatches, number).bubble
            assert found == pytest.approx([ideal] * ranks), (ranks, number, microbatches)
            checked += 1
    assert checked > 25


def test_the_literature_says_nothing_of_some() -> None:
    assert ideal_bubble("zbv", 4, 2, 8) is None and ideal_bubble("dualpipev", 4, 2, 8) is None
    assert ideal_bubble("interleaved", 4, 2, 3) is None and ideal_bubble("zero-bubble", 4, 1, 3) is None


def test_the_schedules_of_a_v_have_the_smallest_bubble() -> None:
    """With 4 ranks and 8 microbatches: 6 units of work per microbatch, and 3 in which the ranks begin and end."""
    assert simulated("zbv", 4, 8).makespan_s == simulated("dualpipev", 4, 8).makespan_s == 51
    assert simulated("zbv", 4, 8).bubble == pytest.approx([3 / 51] * 4)


def test_unequal_stages_and_messages_that_take_time() -> None:
    costs = Costs(forward=[1, 2], backward=[2, 4], transfer_s=0.5)
    timeline = simulate(orders("1f1b", 2, 1, 2), costs)
    compute = [(span.begin_s, span.end_s) for span in timeline.spans if span.kind in COMPUTE]
    assert compute == [(0, 1), (1, 2), (8, 10), (14, 16), (1.5, 3.5), (3.5, 7.5), (7.5, 9.5), (9.5, 13.5)]
    assert timeline.makespan_s == 16 and timeline.busy_s == [6, 12] and timeline.bubble == [1 - 6 / 16, 1 - 12 / 16]
    waits = [span for span in timeline.spans if span.kind == "recv_backward"]
    assert waits == [Span(0, "recv_backward", 0, 0, 2, 8), Span(0, "recv_backward", 0, 1, 10, 14)]


def test_microbatches_that_differ_make_ranks_wait_for_each_other() -> None:
    assert unevenness("1f1b", 2, 1, ((1.0, 1.0, 1.0, 1.0),), 4) == 1.0
    costs = Costs(forward=[1, 1], backward=[2, 2], sizes=[2, 4])
    timeline = simulate(orders("1f1b", 2, 1, 2), costs)
    even = simulate(orders("1f1b", 2, 1, 2), replace(costs, sizes=[3, 3]))
    assert [span.seconds for span in timeline.spans if span.kind == "backward"] == [4, 8, 4, 8]
    assert timeline.makespan_s > even.makespan_s
    assert unevenness("1f1b", 2, 1, ((2.0, 4.0),), 2) == pytest.approx(timeline.makespan_s / even.makespan_s)


def test_what_fills_up_a_schedule_takes_time() -> None:
    assert runnable("interleaved", 2, 2, 5) == 6
    filled = unevenness("interleaved", 2, 2, ((1.0,) * 5, (1.0,) * 3), 4)
    steps = [simulate(orders("interleaved", 2, 2, n), equal(4)).makespan_s for n in (6, 3, 4)]
    assert filled == pytest.approx((steps[0] + steps[1]) / 2 / steps[2])


def test_orders_without_messages_take_the_same_time() -> None:
    for schedule in ("interleaved", "dualpipev"):
        whole = orders(schedule, 4, 2, 8)
        computing = [[action for action in order if action.kind in COMPUTE] for order in whole]
        costs = equal(8, transfer_s=0.25)
        spans = [span for span in simulate(whole, costs).spans if span.kind in COMPUTE]
        assert [*simulate(computing, costs).spans] == spans


@pytest.mark.parametrize("schedule", (*SCHEDULES,))
def test_costs_are_found_again_in_a_step_that_they_make(schedule: Schedule) -> None:
    number = stages_per_rank(schedule, None)
    varied = [1 + stage / 8 for stage in range(4 * number)]
    costs = Costs(forward=varied, backward=[2 * one for one in varied], backward_input=varied, backward_weight=varied,
                  transfer_s=0.25, send_s=0.125)  # fmt: skip
    found = costs_of(simulate(orders(schedule, 4, number, 8), costs))
    assert found.transfer_s == pytest.approx(0.25) and found.send_s == pytest.approx(0.125)
    for name in ("forward", "backward", "backward_input", "backward_weight"):
        done = [(one, known) for one, known in zip(getattr(found, name), getattr(costs, name), strict=True) if one]
        assert [one for one, _ in done] == pytest.approx([known for _, known in done])
        assert done or name.startswith("backward")


def test_a_receive_that_comes_late_does_not_tell_how_long_a_message_takes() -> None:
    spans = [Span(0, "forward", 0, 0, 0, 1), Span(0, "send_forward", 0, 0, 1, 1.25), Span(0, "forward", 0, 1, 1.25, 2),
             Span(0, "send_forward", 0, 1, 2, 2.25), Span(1, "recv_forward", 1, 0, 0, 1.5),
             Span(1, "forward", 1, 0, 1.5, 9), Span(1, "recv_forward", 1, 1, 9, 9)]  # fmt: skip
    found = costs_of(Timeline(2, spans))
    assert found.transfer_s == 0.5 and found.send_s == 0.25 and found.forward == [0.875, 7.5]
    assert costs_of(Timeline(1, ())).forward == []


def test_sending_keeps_a_rank_from_its_next_action() -> None:
    costs = Costs(forward=[1, 1], backward=[1, 1], transfer_s=2, send_s=0.5)
    first = [span for span in simulate(orders("gpipe", 2, 1, 2), costs).spans if span.kind == "forward"]
    assert [(span.begin_s, span.end_s) for span in first] == [(0, 1), (1.5, 2.5), (3, 4), (4.5, 5.5)]


def test_a_pass_through_neighbours_on_one_rank_takes_no_transfer() -> None:
    assert simulate(orders("zbv", 1, 2, 1), equal(2, transfer_s=100.0)).makespan_s == 6


def test_orders_that_wait_for_each_other_are_refused() -> None:
    stuck = [[Action("recv_backward", 0, 0), Action("forward", 0, 0)], [Action("forward", 1, 0)]]
    with pytest.raises(UserError, match=r"rank 0 waits for ever at RB0\.0, its action 1 of 2"):
        simulate(stuck, equal(2))


def test_a_step_in_which_nothing_is_done() -> None:
    timeline = simulate([(), ()], equal(0))
    assert timeline.makespan_s == 0 and timeline.bubble == [0, 0]


def test_microbatches_in_flight() -> None:
    for ranks, microbatches in product((1, 2, 4), (1, 3, 8)):
        gpipe, naive = orders("gpipe", ranks, 1, microbatches), orders("naive", ranks, 1, microbatches)
        assert in_flight(gpipe) == [[microbatches]] * ranks and in_flight(naive) == [[1]] * ranks
        alternating = in_flight(orders("1f1b", ranks, 1, microbatches))
        assert alternating == [[min(microbatches, ranks - stage)] for stage in range(ranks)]
    assert in_flight(orders("looped-bfs", 2, 2, 4)) == [[4, 4], [4, 4]]


def test_activations_are_held_until_the_gradients_of_weights_are_computed() -> None:
    order = [
        [Action("forward", 0, 0), Action("backward_input", 0, 0), Action("forward", 0, 1),
         Action("backward_weight", 0, 0), Action("backward", 0, 1)]
    ]  # fmt: skip
    assert in_flight(order) == [[2]]
