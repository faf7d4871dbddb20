"""Samplers and DataLoaders: their order is kept, drawn from the job's seed alone; what cannot be kept is named."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Points, classifier_job, pad
from jobs_streams import PointStream
from kept_ranks import KeptRanks
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, WeightedRandomSampler

import evenly
from evenly.data.loader import indices_of_step, microbatches_of_step
from evenly.data.sampler_order import SamplerOrder
from evenly.errors import UserError
from evenly.verify.compare import RankComparison, judge
from evenly.verify.data_rules import broken_data_rule
from evenly.verify.ranks import compare_job, keep_reference
from evenly.verify.shorten import shortened

STEPS = 4


def batches(sampler: Any, count: int, *, seed: int = 0, length: int = 37, batched: bool = False) -> list[list[int]]:
    order = SamplerOrder(sampler, seed=seed, size=10, length=length, batched=batched)
    return [order.batch(step) for step in range(count)]


def weighted(generator: torch.Generator | None = None) -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0 + n % 5 for n in range(37)], 25, generator=generator)


class Uneven:
    """A batch sampler whose batches differ in size; another in every epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([self.epoch], [1, 2, 3], [*range(10)])


class Drawing:
    """With Python's generator."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(37), 37))


class Counting:
    """Remembers how often it was iterated."""

    times = 0

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return iter(range(self.times, 12))


@pytest.mark.parametrize("make", [weighted, lambda: RandomSampler(range(37)), Drawing])
def test_an_order_follows_from_the_seed_and_the_epoch(make: Any) -> None:
    first = batches(make(), 9)
    torch.rand(3), random.random()
    assert first == batches(make(), 9)
    assert first != batches(make(), 9, seed=1)
    assert first[:3] != first[3:6]
    order = SamplerOrder(make(), seed=0, size=10, length=37)
    assert [order.batch(step) for step in (7, 2)] == [first[7], first[2]]  # resumed there


def test_weights_repeat_samples_in_batches_that_end_with_the_epoch() -> None:
    found = batches(weighted(), 6)
    assert [len(batch) for batch in found] == [10, 10, 5] * 2
    assert len({*chain(*found[:3])}) < 25


def test_batches_of_any_size_are_as_the_sampler_has_them() -> None:
    assert batches(Uneven(), 5, batched=True) == [[0], [1, 2, 3], [*range(10)], [1], [1, 2, 3]]


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (Counting(), "drawn again for the same epoch"),
        (range(0), "it yields nothing"),
        (range(30, 40), "it yields 37"),
        ([[1, 2]], "it yields lists"),
    ],
)
def test_a_sampler_that_cannot_be_followed_is_named(sampler: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        batches(sampler, 1)


@pytest.mark.parametrize(
    ("sampler", "words"),
    [([[*range(11)]], "a batch of 11 samples, and global_batch is 10"), (range(3), "it yields 0, no batch")],
)
def test_a_batch_sampler_that_cannot_be_followed_is_named(sampler: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        batches(sampler, 1, batched=True)


# ------------------------------------------------------------------------------------------- jobs
def test_a_loader_stands_for_its_parts() -> None:
    data = Points(37)
    job = classifier_job(
        data=DataLoader(data, batch_size=8, shuffle=True, drop_last=True, collate_fn=pad), global_batch=0
    )
    assert job.data is data and job.global_batch == 8 and job.collate is pad
    epoch = [indices_of_step(job, step) for step in range(4)]
    assert [len(batch) for batch in epoch] == [8] * 4
    assert len({*chain(*epoch)}) == 32
    assert len(indices_of_step(job, 4)) == 8  # of the next epoch
    assert [n for group in microbatches_of_step(job, 0) for n in group] == epoch[0]
    assert broken_data_rule(job) == ""


def test_a_loader_of_a_stream_stands_for_the_stream() -> None:
    stream = PointStream(23)
    job = classifier_job(data=DataLoader(stream, batch_size=10), global_batch=0)
    assert job.streams and job.data is stream and job.global_batch == 10 and job.collate is None


def test_a_shortened_sampler_ends_an_epoch_within_the_steps() -> None:
    for sampler in (weighted(), BatchSampler(weighted(), 10, drop_last=False)):
        job = shortened(classifier_job(sampler=sampler), 3)
        assert [len(indices_of_step(job, step)) for step in range(3)] == [10, 5, 10]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": DataLoader(Points(37), batch_size=8)}, "batches of 8 samples, and global_batch is 10"),
        ({"data": DataLoader(Points(37), batch_size=10, worker_init_fn=print)}, "worker_init_fn"),
        ({"data": DataLoader(Points(37), batch_size=None)}, "batch_size=None"),
        ({"data": DataLoader(PointStream(37), batch_size=10, drop_last=True)}, "drop_last"),
        ({"data": DataLoader(Points(37), batch_size=10), "sampler": weighted()}, "sampler is given"),
        ({"data": DataLoader(Points(37), batch_size=10, collate_fn=pad), "collate": pad}, "collate is given"),
        ({"eval_data": DataLoader(Points(37))}, "eval_data is a DataLoader; give its dataset"),
        ({"sampler": DistributedSampler(Points(37), num_replicas=2, rank=0)}, "deals samples to ranks"),
        ({"sampler": weighted(), "data": PointStream(37)}, "a stream, which has its own order"),
        ({"sampler": [1, 2]}, "not a torch.utils.data.Sampler"),
    ],
)
def test_what_a_job_cannot_keep_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        classifier_job(**changes)


def sampled() -> evenly.Job:
    return classifier_job(sampler=weighted(), precision="float64")


def reference(folder: Path) -> None:
    keep_reference(sampled(), STEPS, folder / "reference")


def compare(folder: Path) -> RankComparison:
    return compare_job(sampled(), "zero3", STEPS, folder)


def test_a_weighted_order_has_the_numbers_of_one_device(ranks: KeptRanks, tmp_path: Path) -> None:
    ranks.run(reference, tmp_path, size=1)
    row = judge("zero3", ranks.run(compare, tmp_path, size=2))
    assert (row.status, row.reason) == ("equal", "")
