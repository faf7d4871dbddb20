"""When a run whose ranks have failed is started again."""

from __future__ import annotations

from evenly.launcher.restarts import Failure, error_raised, pause_before_restart


def test_a_pause_doubles_until_there_is_a_new_checkpoint() -> None:
    failures = [Failure(10.0 * number, 4) for number in range(9)]
    assert [pause_before_restart(failures[:n], most=99) for n in range(1, 10)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert pause_before_restart([*failures, Failure(99.0, 6)], most=99) == 1
    assert pause_before_restart([Failure(0.0, None), Failure(1.0, None), Failure(2.0, 2)], most=99) == 1


def test_restarts_end_after_so_many_failures_within_an_hour() -> None:
    often = [Failure(60.0 * number, number) for number in range(3)]
    assert pause_before_restart(often, most=3) == 1
    assert "3 failures within an hour" in str(pause_before_restart(often, most=2))
    seldom = [Failure(3600.0 * number, number) for number in range(9)]
    assert pause_before_restart(seldom, most=1) == 1


def test_an_error_that_comes_twice_is_no_bad_luck_and_a_kill_may_be() -> None:
    error = Failure(0.0, 4, "rank 1 failed at step 5: ValueError: bad")
    kill = Failure(60.0, 4)
    assert pause_before_restart([error], most=9) == 1
    assert "the same error" in str(pause_before_restart([error, kill, Failure(99.0, 4, error.error)], most=9))
    assert pause_before_restart([error, Failure(99.0, 6, "rank 1 failed at step 7: ValueError: bad")], most=9) == 1
    assert pause_before_restart([kill, kill], most=9) == 2


def test_an_error_is_the_same_on_whichever_rank_and_from_wherever_it_is_raised() -> None:
    first, second = (f"Traceback ...\n  File {file}\nValueError: bad\n\n  on two lines\n" for file in ("a.py", "b.py"))
    assert error_raised("error", 5, first) == error_raised("error", 5, second) == "step 5: ValueError: bad"
    assert error_raised("error", 6, first) != error_raised("error", 5, first)
    assert error_raised("peer", 5, first) == error_raised("killed", 5, "") == ""
