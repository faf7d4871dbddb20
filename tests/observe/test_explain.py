"""Causes are found from records alone; the same with processes in tests/launcher/test_watch.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenly.observe.diagnosis import explain, number_ranges, numbers_of, ranks_in_words, ranks_of_group
from evenly.observe.recorder import CollectiveCall, Entry, RankRecord

NOW_S = 1000.0
CALL = CollectiveCall(
    "all_reduce", "data [0-3]", "float32", (1000,), "sum", "gradient of blocks.7", "train (train.py:88)"
)


def record(
    rank: int, *calls: CollectiveCall | tuple[int, CollectiveCall], inside: bool = True, **changed: object
) -> RankRecord:
    """A rank that made these calls and is inside the last of them."""
    numbered = [(number, call) if isinstance(call, CollectiveCall) else call for number, call in enumerate(calls, 455)]
    entries = [Entry(i, number, 900.0 + i, 900.5 + i, call) for i, (number, call) in enumerate(numbered, 1)]
    if inside and entries:
        entries[-1] = replace(entries[-1], left_s=None)
    plain = RankRecord(rank, NOW_S - 0.2, NOW_S - 40, "Lines.__getitem__ (data.py:31)", "running", tuple(entries))
    return replace(plain, **changed)


def text_of(*records: RankRecord, **exit_reasons: str) -> str:
    diagnosis = explain(
        records, now_s=NOW_S, exit_reasons={int(rank[1:]): reason for rank, reason in exit_reasons.items()}
    )
    return "" if diagnosis is None else diagnosis.text


def test_a_missing_rank_is_named_with_operation_line_and_its_own_place() -> None:
    waiting = [record(rank, CALL, CALL) for rank in (0, 1, 2)]
    assert text_of(*waiting, record(3, CALL, inside=False)) == (
        "rank 3 did not reach all_reduce #456 (train (train.py:88), gradient of blocks.7); "
        "rank 3 is in Lines.__getitem__ (data.py:31) since 40 s; ranks 0-2 wait"
    )


def test_a_rank_that_is_gone_or_silent_or_at_its_end() -> None:
    waiting = record(0, CALL, CALL)
    late = record(1, CALL, inside=False)
    assert "rank 1 was killed by SIGKILL, last seen in Lines" in text_of(waiting, late, r1="was killed by SIGKILL")
    assert "rank 1 has come to its end, after 1 operations" in text_of(waiting, replace(late, state="ended"))
    assert "rank 1 has been silent since 30 s" in text_of(waiting, replace(late, beat_s=NOW_S - 30))
    assert "rank 2 raised ValueError: no; rank 0 waits" in text_of(waiting, r2="raised ValueError: no")


@pytest.mark.parametrize(
    "other",
    [
        CALL._replace(shape=(500,)),
        CALL._replace(dtype="float64"),
        CALL._replace(operation="broadcast", detail="from 0"),
        CALL._replace(detail="max"),
    ],
)
def test_the_first_difference_is_the_cause(other: CollectiveCall) -> None:
    other = other._replace(where="train (train.py:91)")
    records = [record(0, CALL, CALL, CALL), record(1, CALL, other, CALL), record(2, CALL, CALL, CALL)]
    text = text_of(*records)
    assert "different things in operation #456 of group data [0-3]" in text
    assert f"rank 1: {other.asked()} at train (train.py:91)" in text
    assert "ranks 0, 2: all_reduce of float32 [1000], sum at train (train.py:88)" in text


def test_lengths_that_may_differ_are_no_difference() -> None:
    gather = CALL._replace(operation="all_gather", shape=(None, 3), detail="along 0")
    assert text_of(record(0, gather), record(1, gather)) == ""


def test_of_two_groups_the_one_whose_ranks_do_not_wait_themselves() -> None:
    files = CALL._replace(group="files [0-1]", operation="gather_values", label="", where="")
    data = CALL._replace(group="data [1-2]")
    records = [record(0, (9, files)), record(1, (7, data)), record(2, inside=False)]
    assert text_of(*records).startswith("rank 2 did not reach all_reduce #7")


def test_two_groups_in_another_order() -> None:
    files = CALL._replace(group="files [0-1]", operation="barrier")
    data = CALL._replace(group="data [0-1]")
    text = text_of(record(0, (1, files)), record(1, (1, data)))
    assert "did not reach" in text and "of group" in text


def test_point_to_point() -> None:
    recv = CollectiveCall("recv", "data [0-1]", "float32", (3,), "from 1, tag 0", "", "pass_on (train.py:12)")
    text = text_of(record(0, (0, recv)), record(1, inside=False))
    assert text.startswith("rank 0 waits in recv from 1, tag 0 (pass_on (train.py:12)); rank 1 is in Lines")


def test_a_rank_that_reads_ahead_is_the_one_that_its_peer_waits_for() -> None:
    recv = CollectiveCall("recv", "pipeline [0-1]", "float32", (3,), "from 1, tag 0", "", "pass_on (train.py:12)")
    ahead, waits = record(0, (0, recv), in_own_code=True), record(1, (0, recv._replace(detail="from 0, tag 0")))
    assert text_of(ahead, waits).endswith("; rank 0 is in Lines.__getitem__ (data.py:31) since 40 s")


def test_a_rank_that_waits_for_another_is_not_the_cause() -> None:
    recv = CollectiveCall("recv", "pipeline [1, 3]", "float32", (3,), "from 1, tag 0", "", "pass_on (train.py:12)")
    sums = CALL._replace(group="data [0-1]")
    loops = record(3, in_own_code=True)
    assert "; rank 3 is in Lines" in text_of(record(0, sums), record(1, (0, recv)), record(2, inside=False), loops)


def test_nothing_wrong_is_nothing() -> None:
    assert text_of(record(0, CALL, CALL), record(1, CALL, CALL)) == ""
    assert text_of(record(0, CALL, inside=False), record(1, CALL, CALL, inside=False)) == ""
    assert text_of() == ""


def test_numbers_in_words() -> None:
    assert number_ranges([5, 0, 1, 2]) == "0-2, 5" and numbers_of("0-2, 5") == [0, 1, 2, 5]
    assert number_ranges([]) == "" and numbers_of("") == []
    assert ranks_in_words([3]) == "rank 3" and ranks_in_words([0, 1]) == "ranks 0-1"
    assert ranks_of_group("tensor [0, 4-5]") == [0, 4, 5] and ranks_of_group("none") == []
