"""What schedules place where, and what they refuse."""

from __future__ import annotations

from itertools import product

import pytest

from evenly.errors import PlanError
from evenly.plan.schedule import Action, Schedule, rank_of_stage, runnable, splits_backward, stages_per_rank

# Those of the package; others can be registered.
SCHEDULES: tuple[Schedule, ...] = (
    "naive",
    "gpipe",
    "1f1b",
    "interleaved",
    "looped-bfs",
    "zero-bubble",
    "zbv",
    "dualpipev",
)


def test_stages_go_round_the_ranks_or_there_and_back() -> None:
    assert rank_of_stage("1f1b", 3, 1) == (0, 1, 2)
    assert rank_of_stage("interleaved", 3, 2) == (0, 1, 2, 0, 1, 2)
    assert rank_of_stage("zbv", 3, 2) == rank_of_stage("dualpipev", 3, 2) == (0, 1, 2, 2, 1, 0)


def test_every_rank_has_its_number_of_stages() -> None:
    for schedule, ranks in product(SCHEDULES, range(1, 6)):
        number = stages_per_rank(schedule, None)
        placed = rank_of_stage(schedule, ranks, number)
        assert [placed.count(rank) for rank in range(ranks)] == [number] * ranks


def test_stages_per_rank_that_nobody_states() -> None:
    numbers = {schedule: stages_per_rank(schedule, None) for schedule in SCHEDULES}
    assert numbers == {
        "naive": 1, "gpipe": 1, "1f1b": 1, "interleaved": 2, "looped-bfs": 2, "zero-bubble": 1, "zbv": 2, "dualpipev": 2
    }  # fmt: skip
    assert stages_per_rank("interleaved", 3) == 3 and stages_per_rank("zero-bubble", 2) == 2


@pytest.mark.parametrize(
    ("schedule", "asked", "message"),
    [
        ("naive", 2, "exactly 1 stage per rank"),
        ("gpipe", 2, "exactly 1 stage per rank"),
        ("1f1b", 0, "exactly 1 stage per rank"),
        ("zbv", 1, "exactly 2 stages per rank"),
        ("dualpipev", 3, "exactly 2 stages per rank"),
        ("interleaved", 0, "at least one"),
    ],
)
def test_stages_per_rank_that_a_schedule_cannot(schedule: Schedule, asked: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        stages_per_rank(schedule, asked)


def test_microbatches_are_filled_up_to_what_runs() -> None:
    assert [runnable("1f1b", 4, 1, number) for number in range(1, 6)] == [1, 2, 3, 4, 5]
    assert [runnable("interleaved", 2, 2, number) for number in range(1, 10)] == [1, 2, 3, 4, 6, 6, 8, 8, 10]
    assert [runnable("zero-bubble", 4, 1, number) for number in (3, 8, 9, 11)] == [3, 8, 10, 12]
    assert [runnable("dualpipev", 3, 2, number) for number in (1, 6, 7)] == [6, 6, 7]


def test_which_schedules_split_the_backward_pass() -> None:
    assert {schedule for schedule in SCHEDULES if splits_backward(schedule)} == {"zero-bubble", "zbv", "dualpipev"}


def test_an_action_in_short() -> None:
    assert str(Action("forward", 3, 0)) == "F3.0" and str(Action("recv_backward", 1, 12)) == "RB1.12"
