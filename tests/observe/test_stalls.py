"""Who stands still, for how long, and who is the cause: from records alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenly.observe.recorder import CollectiveCall, Entry, RankRecord
from evenly.observe.stalls import LIMIT_S, STEP_LIMIT_S, Standstills, explain_stall, limit_of

NOW_S = 1000.0
CALL = CollectiveCall("all_reduce", "data [0-1]", "float32", (3,), "sum", "gradient of a", "train (train.py:88)")
INSIDE = (Entry(1, 7, 900.0, None, CALL),)


def record(rank: int, state: str = "step", **changed: object) -> RankRecord:
    plain = RankRecord(rank, NOW_S, NOW_S - 40, "Lines.__getitem__ (data.py:31)", state, (), ticks=5)
    return replace(plain, **changed)


def watched(
    records: list[RankRecord], looks: int, *, limit_s: float | None = None, passed_s: float = 1.0
) -> Standstills:
    """After `looks` looks at ranks that stand still and beat."""
    standstills = Standstills(limit_s)
    for look in range(looks + 1):
        standstills.look([replace(one, beat_s=one.beat_s + look) for one in records], passed_s)
    return standstills


def test_limits_follow_what_a_rank_does() -> None:
    assert limit_of(record(0), None) == STEP_LIMIT_S < LIMIT_S
    for state in ("first step", "evaluating", "saving", "running"):
        assert limit_of(record(0, state), None) == LIMIT_S
        assert limit_of(record(0, state), 7.0) == 7.0
    assert limit_of(record(0, longest_step_s=500.0), None) == limit_of(record(0, longest_step_s=500.0), 7.0) == 1500.0


def test_a_rank_that_gets_on_is_not_overdue() -> None:
    standstills = Standstills(10.0)
    for tick in range(100):
        standstills.look([record(0, ticks=tick)], 1.0)
    assert standstills.overdue([record(0, ticks=99)]) == {}
    for _ in range(11):
        standstills.look([record(0, ticks=99)], 1.0)
    assert standstills.overdue([record(0, ticks=99)]) == {0: 11.0}
    assert standstills.overdue([record(0, "ended", ticks=99)]) == {}


def test_the_slowest_of_the_limits_holds_for_all() -> None:
    """Rank 0 waits in its step for rank 1, which still saves."""
    records = [record(0, entries=INSIDE), record(1, "saving")]
    assert watched(records, 200).overdue(records) == {}
    assert watched(records, 600).overdue(records) == {0: 600.0, 1: 600.0}


def test_time_in_which_nobody_looked_is_nobodys() -> None:
    """A machine that was suspended for an hour."""
    records = [record(0)]
    assert watched(records, 1, limit_s=10.0, passed_s=3600.0).overdue(records) == {}


def test_ranks_whose_heart_stands_still_are_silent() -> None:
    standstills = Standstills(3.0)
    for look in range(8):
        standstills.look([record(0, beat_s=NOW_S + look), record(1)], 1.0)
    assert standstills.silent([0, 1]) == {1: 7.0}


def test_a_stopped_or_silent_rank_is_the_cause_also_where_all_have_entered_the_same() -> None:
    records = [record(0, entries=INSIDE), record(1, entries=INSIDE)]
    overdue = {0: 20.0, 1: 20.0}
    stopped = explain_stall(records, overdue, {1: 19.6}, [1], now_s=NOW_S)
    assert stopped is not None and stopped.ranks == (1,)
    assert stopped.text == (
        "rank 1's process is stopped (SIGSTOP or the like), silent since 20 s, last seen in all_reduce #7 "
        "(train (train.py:88), gradient of a); rank 0 waits in all_reduce #7 (train (train.py:88), gradient of a)"
    )
    silent = explain_stall(records, overdue, {0: 19.6}, [], now_s=NOW_S)
    assert silent is not None and silent.text.startswith("rank 0 is frozen, silent since 20 s, last seen in all_reduce")
    joining = explain_stall([record(0)], {0: 20.0}, {}, [1], now_s=NOW_S)
    assert joining is not None and joining.ranks == (1,)


@pytest.mark.parametrize("state", ["first step", "step", "evaluating"])
def test_a_rank_that_waits_for_nobody_is_named_with_its_place(state: str) -> None:
    found = explain_stall([record(0, state, in_own_code=True)], {0: 190.0}, {}, [], now_s=NOW_S)
    assert found is not None and found.ranks == (0,)
    assert found.text.startswith("rank 0 has not got on for 190 s: it is in Lines.__getitem__ (data.py:31)")


@pytest.mark.parametrize("state", ["running", "saving"])
def test_what_may_take_any_time_is_left_alone(state: str) -> None:
    assert explain_stall([record(0, state)], {0: 1900.0}, {}, [], now_s=NOW_S) is None


def test_a_rank_that_reads_ahead_is_where_it_reads() -> None:
    """Its operation is under way, and the others are in the next."""
    others = (Entry(1, 7, 900.0, 901.0, CALL), Entry(2, 8, 902.0, None, CALL))
    records = [record(0, entries=others), record(1, entries=INSIDE, in_own_code=True)]
    found = explain_stall(records, {0: 20.0, 1: 20.0}, {}, [], now_s=NOW_S)
    assert found is not None and found.ranks == (1,)
    assert "rank 1 is in Lines.__getitem__ (data.py:31) since 40 s" in found.text


def test_waiting_that_nothing_explains_is_left_to_the_backend() -> None:
    """Two ranks here wait for one of another node."""
    call = CALL._replace(group="data [0-2]")
    records = [record(rank, entries=(Entry(1, 7, 900.0, None, call),)) for rank in (0, 1)]
    assert explain_stall(records, {0: 900.0, 1: 900.0}, {}, [], now_s=NOW_S) is None


def test_a_rank_whose_checkpoint_does_not_get_on_is_the_cause() -> None:
    """The other waits for it in a collective that nothing records, or in one that is."""
    writing = record(0, "saving", writing="step-00000006", entries=())
    for other in (record(1, "saving"), record(1, "saving", entries=INSIDE)):
        found = explain_stall([writing, other], {0: 6.0, 1: 6.0}, {}, [], now_s=NOW_S)
        assert found is not None and found.ranks == (0,)
        assert "rank 0 writes the checkpoint step-00000006, and has not got on for 6 s" in found.text
    assert explain_stall([writing, record(1, "saving")], {1: 6.0}, {}, [], now_s=NOW_S) is None


def test_a_rank_that_waits_unseen_is_not_named_before_one_in_the_users_code_is_overdue_too() -> None:
    waits, loops = record(1, where="Pending.wait (transport.py:81)"), record(0, in_own_code=True)
    assert explain_stall([loops, waits], {1: 5.2}, {}, [], now_s=NOW_S) is None
    found = explain_stall([loops, waits], {0: 5.1, 1: 5.7}, {}, [], now_s=NOW_S)
    assert found is not None and found.ranks == (0,)
    alone = explain_stall([waits], {1: 5.2}, {}, [], now_s=NOW_S)
    assert alone is not None and alone.ranks == (1,)
