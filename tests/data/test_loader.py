"""Shares of steps and evaluations, and the loader that follows them."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from jobs import Points, classifier_job, language_job

from evenly.data.loader import Loader, microbatches_of_step, share_of_evaluation, share_of_step, worker_count
from evenly.data.nest import map_tensors
from evenly.errors import SampleError


@pytest.mark.parametrize("job", [classifier_job(), language_job()], ids=["counted", "by cost"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 40])
def test_shares_are_the_microbatches_each_once(job: Any, ranks: int) -> None:
    for step in range(6):
        shares = [share_of_step(job, step, rank=rank, ranks=ranks) for rank in range(ranks)]
        assert all(share.microbatches == microbatches_of_step(job, step) for share in shares)
        assert sorted(n for share in shares for n in share.own) == list(range(len(shares[0].microbatches)))


def test_an_epoch_holds_every_sample_once_and_ends_in_a_short_batch() -> None:
    job = classifier_job()
    batches = [[i for m in microbatches_of_step(job, step) for i in m] for step in range(4)]
    assert [len(batch) for batch in batches] == [10, 10, 10, 7]
    assert sorted(i for batch in batches for i in batch) == list(range(37))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_an_evaluation_holds_every_sample_once(ranks: int) -> None:
    job = classifier_job()
    shares = [share_of_evaluation(job, rank=rank, ranks=ranks) for rank in range(ranks)]
    samples = [index for share in shares for n in share.own for index in share.microbatches[n]]
    assert sorted(samples) == list(range(11))


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_filled_shares_run_as_many_microbatches_and_count_each_once(ranks: int) -> None:
    job = classifier_job()
    for step in range(4):
        shares = [share_of_step(job, step, rank=rank, ranks=ranks).filled() for rank in range(ranks)]
        assert {share.runs for share in shares} == {max(len(share.own) for share in shares)}
        read = [list(Loader(job).read(iter([share]))) for share in shares]
        assert [len(own) for own in read] == [share.runs for share in shares]
        counted = [m.number for own in read for m in own if m.counts]
        assert sorted(counted) == list(range(len(shares[0].microbatches)))
        assert all(m.counts for own, share in zip(read, shares, strict=True) for m in own[: len(share.own)])


def read(job: Any, rank: int, ranks: int, workers: int) -> dict[tuple[int, int], torch.Tensor]:
    shares = [share_of_step(job, step, rank=rank, ranks=ranks) for step in range(3)]
    keys = [(share.step, number) for share in shares for number in share.own]
    microbatches = Loader(job, workers=workers).read(iter(shares))
    return {key: microbatch.batch[0] for key, microbatch in zip(keys, microbatches, strict=True)}


def test_what_is_read_depends_neither_on_ranks_nor_on_workers() -> None:
    job = classifier_job()  # its samples are drawn upon when read
    alone = read(job, 0, 1, 0)
    shared = {**read(job, 0, 2, 0), **read(job, 1, 2, 2)}
    assert alone.keys() == shared.keys()
    assert all(torch.equal(alone[key], shared[key]) for key in alone)


def test_reading_ahead_changes_neither_order_nor_content() -> None:
    job = classifier_job()
    shares = [share_of_step(job, step, rank=0, ranks=1) for step in range(3)]
    reading, found = Loader(job).read(iter(shares)), []
    for _ in read(job, 0, 1, 0):
        reading.ahead()
        reading.ahead()  # once is enough
        found.append(next(reading).batch[0])
    reading.ahead()
    assert next(reading, None) is None
    assert all(torch.equal(a, b) for a, b in zip(found, read(job, 0, 1, 0).values(), strict=True))


class Broken(Points):
    def __getitem__(self, index: int) -> Any:
        if index == 17:
            raise OSError("disk gone")
        return super().__getitem__(index)


class Odd(Points):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return (x[:4], y) if index == 23 else (x, y)


def test_a_bad_sample_read_ahead_is_told_in_its_place() -> None:
    job = classifier_job(data=Broken(37), shuffle=False)
    reading = Loader(job).read(iter([share_of_step(job, step, rank=0, ranks=1) for step in range(4)]))
    for _ in range(4 + 3):
        next(reading)
    reading.ahead()
    with pytest.raises(SampleError, match="sample 17"):
        next(reading)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("data", "index", "what"), [(Broken(37), 17, "disk gone"), (Odd(37), 23, "does not fit the others")]
)
def test_an_error_names_the_sample(data: Any, index: int, what: str, workers: int) -> None:
    job = classifier_job(data=data)
    shares = [share_of_step(job, step, rank=0, ranks=1) for step in range(4)]
    try:
        found = str([*Loader(job, workers=workers).read(iter(shares))])
    except SampleError as problem:
        found = str(problem)
    assert f"sample {index}" in found and what in found


class Drawn(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3)


def test_workers_that_are_not_forked_draw_what_the_rank_would() -> None:
    job = classifier_job(data=Drawn())
    multiprocessing.set_start_method("spawn", force=True)
    torch.set_default_dtype(torch.float64)
    try:
        here, there = (
            next(Loader(job, workers=n).read(iter([share_of_step(job, 0, rank=0, ranks=1)]))) for n in (0, 1)
        )
        assert here.batch.dtype is torch.float64 and torch.equal(here.batch, there.batch)
    finally:
        torch.set_default_dtype(torch.float32)
        multiprocessing.set_start_method(None, force=True)


def test_workers_follow_the_stated_rule() -> None:
    assert worker_count(cores=64, local_ranks=8, device="cuda:0") == 4
    assert worker_count(cores=16, local_ranks=8, device="cuda:0") == 2
    assert worker_count(cores=4, local_ranks=8, device="cuda:0") == 0
    assert worker_count(cores=2, local_ranks=2, device="cpu") == 0
    assert worker_count(cores=16, local_ranks=4, device="cpu") == 0


def test_nests_keep_their_form() -> None:
    import collections
    import dataclasses

    pair = collections.namedtuple("pair", "a b")

    @dataclasses.dataclass
    class Record:
        x: torch.Tensor
        name: str

    nest = {"l": [torch.ones(1), 2], "p": pair(torch.ones(1), "s"), "r": Record(torch.ones(1), "n")}
    moved = map_tensors(lambda t: t + 1, nest)
    assert moved["l"] == [torch.full((1,), 2.0), 2]
    assert moved["p"] == pair(torch.full((1,), 2.0), "s")
    assert moved["r"] == Record(torch.full((1,), 2.0), "n")
