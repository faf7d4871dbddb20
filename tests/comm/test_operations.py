"""Operations, groups, pairs and the ring on 2, 3, 4 and 8 ranks, against plain computations."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import operations_ranks
import pairs_ranks
import pytest
import torch
import torch.distributed as dist
from kept_ranks import KeptRanks

from evenly.comm.collectives import gather_to_first
from evenly.comm.groups import Group, mesh_lines
from evenly.comm.operations import all_gather, all_reduce, gather_values
from evenly.comm.transport import WorkOfMessages, even_sizes, post_exchange, watched
from evenly.observe.timings import Timing

SIZES = [2, 3, 4, 8]


def flat(results: list[list[str]]) -> list[str]:
    return [f"rank {rank}: {finding}" for rank, findings in enumerate(results) for finding in findings]


@pytest.mark.full_but("2", "3")
@pytest.mark.parametrize("size", SIZES)
def test_every_operation(ranks: KeptRanks, size: int) -> None:
    assert flat(ranks.run(operations_ranks.contract, size=size)) == []


@pytest.mark.full_but("2", "3")
@pytest.mark.parametrize("size", SIZES)
def test_groups_within_groups(ranks: KeptRanks, size: int) -> None:
    assert flat(ranks.run(operations_ranks.contract_of_subgroups, size=size)) == []


@pytest.mark.full_but("2", "3")
@pytest.mark.parametrize("size", SIZES)
def test_pairs_are_adjoint(ranks: KeptRanks, size: int) -> None:
    assert flat(ranks.run(pairs_ranks.adjoint, size, size=size)) == []


@pytest.mark.full_but("2", "3")
@pytest.mark.parametrize("size", SIZES)
def test_the_ring_sums_in_its_order_and_sends_what_theory_says(ranks: KeptRanks, size: int) -> None:
    assert flat(ranks.run(pairs_ranks.ring, size=size)) == []


@pytest.mark.parametrize("at_once", [100, 1 << 26])
def test_values_of_any_size_come_to_the_first_rank(ranks: KeptRanks, at_once: int) -> None:
    assert flat(ranks.run(operations_ranks.gathered_to_first, at_once, size=3)) == []


def test_differences_are_named_before_anything_is_sent(ranks: KeptRanks) -> None:
    assert flat(ranks.run(operations_ranks.checked, size=3)) == []


@pytest.mark.full_but("2-x86_64", "3-aarch64")
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_sums_in_shared_memory_are_those_of_the_ranks_in_their_order(ranks: KeptRanks, size: int, machine: str) -> None:
    assert flat(ranks.run(operations_ranks.shared_sums, machine, size=size)) == []


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_sum_of_two_lengths_in_shared_memory_is_refused(ranks: KeptRanks, machine: str) -> None:
    assert flat(ranks.run(operations_ranks.lengths_that_differ, machine, size=2)) == []


def test_ranks_with_other_strides_share_memory_all_the_same(ranks: KeptRanks) -> None:
    assert flat(ranks.run(operations_ranks.strides_that_differ, size=2)) == []


@pytest.mark.parametrize("hidden", ["missing", "of another"])
def test_memory_is_shared_by_all_ranks_or_none(ranks: KeptRanks, hidden: str) -> None:
    assert flat(ranks.run(operations_ranks.memory_that_one_rank_does_not_see, hidden, size=3)) == []


def test_it_is_noted_when_an_operation_is_under_way(tmp_path: Path, ranks: KeptRanks) -> None:
    assert flat(ranks.run(operations_ranks.timed, tmp_path, size=3)) == []


def test_what_a_watched_message_raises_comes_to_who_waits_for_it() -> None:
    class Broken(Slow):
        def wait(self, *_: object, **__: object) -> bool:
            raise RuntimeError("the other rank is gone")

    timing = Timing("send", "pipeline", "", 0.0)
    [work] = watched([Broken()], timing, messages=True)
    with pytest.raises(RuntimeError, match="is gone"):
        work.wait()
    assert work.is_completed() and timing.complete_s is None


def test_a_group_of_one_is_the_identity() -> None:
    alone, tensor = Group.alone(), torch.arange(3.0)
    assert all_reduce(tensor, alone, "mean") is tensor
    copy = all_gather(tensor, alone)
    assert copy.equal(tensor) and copy.data_ptr() != tensor.data_ptr()
    assert operations_ranks.moving(alone) + operations_ranks.reducing(alone) + operations_ranks.pieces(alone) == []
    assert operations_ranks.refusals(alone) == []
    assert gather_values("x", alone) == gather_to_first("x", alone) == ["x"]


class Slow(dist.Work):
    """Done at the third time of asking."""

    asked = waited = 0

    def is_completed(self) -> bool:
        self.asked += 1
        return self.asked == 3

    def wait(self, *_: object, **__: object) -> bool:
        self.waited += 1
        return True

    def get_future(self) -> Any:
        raise NotImplementedError


def test_who_waits_for_torchs_work_stays_awake_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenly.comm.transport.POLL_S", 60)
    slow = Slow()
    awake = WorkOfMessages([slow], Group.alone(), 0, polled=True)
    assert isinstance(awake, dist.Work) and awake.wait()
    assert (slow.asked, slow.waited) == (3, 1)


def test_all_that_comes_is_waited_for_before_anything_is_sent() -> None:
    """What two ranks have for each other then crosses at the same time."""

    class Handle:
        def __init__(self) -> None:
            self.posted: list[tuple[str, int]] = []

        def __getattr__(self, name: str) -> object:
            return lambda tensors, position, tag: self.posted.append((name, position))

    group = SimpleNamespace(position=1, size=4, handle=(handle := Handle()))
    going, coming = torch.arange(8, dtype=torch.uint8), torch.zeros(7, dtype=torch.uint8)
    works = post_exchange(going.split([2, 3, 2, 1]), coming.split([3, 3, 0, 1]), group)  # type: ignore[arg-type]
    assert handle.posted == [("recv", 0), ("recv", 3), ("send", 2), ("send", 3), ("send", 0)]
    assert len(works) == 5 and coming.tolist() == [0, 0, 0, 2, 3, 4, 0]


def test_even_sizes() -> None:
    assert even_sizes(7, 3) == [3, 2, 2] and even_sizes(1, 3) == [1, 0, 0] and even_sizes(0, 2) == [0, 0]


def test_lines_of_a_mesh() -> None:
    sizes = {"data": 2, "tensor": 3, "pipeline": 2}
    assert mesh_lines(sizes, "pipeline") == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert mesh_lines(sizes, "tensor") == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert mesh_lines(sizes, "data") == [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]]
