"""The quick way to the time of a step finds what the whole simulation finds, for any costs."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from evenly.parallel.pipeline.orders import orders
from evenly.plan.schedule import SCHEDULES, Schedule, runnable, stages_per_rank
from evenly.planner import recurrence as recurrence_module
from evenly.planner.recurrence import ENOUGH, recurrence
from evenly.planner.timeline import Costs, simulate, step_seconds

LOOPED = ("interleaved", "looped-bfs", "zero-bubble")
REPEATING = [schedule for schedule in (*SCHEDULES,) if schedule not in ("gpipe", "looped-bfs")]
# How far stages differ: not at all, hardly (a step repeats late), as they like.
SPREADS = (0.0, 0.03, 0.7)


def numbers(schedule: Schedule) -> list[int]:
    return [1, 2, 3] if schedule in LOOPED else [stages_per_rank(schedule, None)]


def unequal(random: Random, stages: int, spread: float, transfer_s: float) -> Costs:
    def around(mean: float) -> list[float]:
        return [mean * random.uniform(1 - spread, 1 + spread) for _ in range(stages)]

    return Costs(
        forward=around(1),
        backward=around(2),
        backward_input=around(1),
        backward_weight=around(1),
        transfer_s=transfer_s,
    )


@pytest.mark.full_but("1f1b", "interleaved", "zbv")
@pytest.mark.parametrize("schedule", (*SCHEDULES,))
def test_a_step_takes_as_long_as_its_simulation(schedule: Schedule) -> None:
    random = Random(schedule)
    for ranks, number, spread, transfer_s in product((1, 2, 3, 4, 8), numbers(schedule), SPREADS, (0.0, 0.1, 3.0)):
        for at_least in (random.randrange(1, 8 * ranks), ranks * random.randrange(5, 12)):
            microbatches = runnable(schedule, ranks, number, at_least)
            costs = unequal(random, ranks * number, spread, transfer_s)
            whole = simulate(orders(schedule, ranks, number, microbatches), costs)
            seconds, busy = step_seconds(schedule, ranks, number, microbatches, costs)
            case = ranks, number, microbatches, costs
            assert seconds == pytest.approx(whole.makespan_s, rel=1e-12), case
            assert busy == pytest.approx(whole.busy_s, rel=1e-12), case


@pytest.mark.parametrize("schedule", REPEATING)
def test_a_longer_step_has_more_rounds_and_nothing_else(schedule: Schedule) -> None:
    for ranks, number in product((*range(1, 9), 16), numbers(schedule)):
        short = recurrence(schedule, ranks, number, ENOUGH * ranks)
        rounds = ranks if schedule in ("interleaved", "zero-bubble") else 1
        longer = recurrence(schedule, ranks, number, ENOUGH * ranks + 3 * rounds)
        assert short.rounds and [*longer.head, *longer.tail] == [*short.head, *short.body * 3, *short.tail], (
            ranks,
            number,
        )


@pytest.mark.parametrize("schedule", REPEATING)
def test_a_thousand_rounds_are_not_gone_through_one_by_one(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[int] = []
    follow = recurrence_module._follow
    monkeypatch.setattr(
        recurrence_module, "_follow", lambda ends, links, *by: (followed.append(len(links)), follow(ends, links, *by))
    )
    number = stages_per_rank(schedule, None)
    costs = unequal(Random(0), 4 * number, 0.0, 0.1)
    short, long = (step_seconds(schedule, 4, number, microbatches, costs)[0] for microbatches in (40, 4040))
    assert sum(followed) < 2 * 40 * 4 * number * 3 and long > 90 * short


def test_costs_that_a_schedule_needs() -> None:
    one = [1.0, 1.0]
    assert step_seconds("1f1b", 2, 1, 4, Costs(forward=one, backward=one)) == (10, [8, 8])
    with pytest.raises(AssertionError):
        step_seconds("zero-bubble", 2, 1, 4, Costs(forward=one, backward=one))
