"""Which rank speaks where ranks fail: decided in a store, here without processes."""

from __future__ import annotations

from torch.distributed import HashStore

from evenly.comm.last_words import LastWords


def words_of(size: int) -> list[LastWords]:
    store = HashStore()
    return [LastWords(store, rank, size) for rank in range(size)]


def test_the_first_to_fail_speaks_and_the_others_only_where_they_say_something_else() -> None:
    zero, one, two = words_of(3)
    assert one.speaks("the plan does not fit")
    assert not zero.speaks("the plan does not fit")
    assert two.speaks("its disk is full")
    assert one.speaks("the plan does not fit")  # asked once more


def test_ranks_that_have_lost_another_keep_quiet_where_it_has_spoken() -> None:
    zero, one, _ = words_of(3)
    assert not zero.anything_said(0.1)
    one.speaks("this loss cannot be computed")
    assert zero.anything_said(0.0)


def test_the_rank_that_has_the_store_waits_until_all_have_asked() -> None:
    zero, one = words_of(2)
    zero.speaks("a mistake")
    zero.wait_for_others(0.1)  # in vain
    one.speaks("a mistake")
    zero.wait_for_others(60.0)
