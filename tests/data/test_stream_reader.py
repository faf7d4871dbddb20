"""Reading a stream: batches in its order, epoch after epoch, the same draws wherever reading begins; its errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from jobs_streams import PointStream, ResumableStream, buffered_job, points_job, sentences_job

from evenly.data.loader import CutStreamBatch, holding_first, share_of_step
from evenly.data.shuffle_buffer import shuffled
from evenly.data.stream import stream_key
from evenly.data.stream_reader import StreamBatch, StreamPlace, StreamReader
from evenly.errors import RunError, SampleError, UserError
from evenly.verify.data_rules import broken_data_rule


# ------------------------------------------------------------------------------------------- the buffer
@pytest.mark.parametrize("size", [1, 2, 7, 40])
@pytest.mark.parametrize("length", [0, 1, 6, 7, 25])
def test_a_buffer_delivers_every_sample_once_and_none_too_early(size: int, length: int) -> None:
    order = [*shuffled(iter(range(length)), size, partial(stream_key, 3, "shuffle", 0))]
    assert sorted(order) == [*range(length)]
    assert all(number < place + size for place, number in enumerate(order))
    assert size > 1 or order == [*range(length)]


def test_a_buffer_reads_no_further_than_it_must() -> None:
    read: list[int] = []
    arrivals = (read.append(n) or n for n in range(100))
    assert len([*islice(shuffled(arrivals, 5, lambda n: n), 10)]) == 10
    assert len(read) == 5 + 9


def test_the_first_delivery_is_any_of_the_buffer_alike() -> None:
    first = [next(shuffled(iter(range(9)), 4, partial(stream_key, seed, "shuffle", 0))) for seed in range(400)]
    assert {*first} == {0, 1, 2, 3}
    assert min(first.count(n) for n in range(4)) > 60


# ------------------------------------------------------------------------------------------- batches
def read(job: Any, count: int) -> list[StreamBatch]:
    reader = StreamReader.of(job)
    return [reader.read() for _ in range(count)]


def test_batches_are_cut_in_order_and_end_with_the_epoch() -> None:
    batches = read(points_job(), 4)
    assert [batch.numbers for batch in batches] == [[*range(10)], [*range(10, 20)], [20, 21, 22], [*range(10)]]
    assert [(batch.after.epoch, batch.after.samples) for batch in batches] == [(0, 10), (0, 20), (0, 23), (1, 10)]


def test_an_epoch_that_ends_with_a_batch_is_followed_by_the_next() -> None:
    batches = read(points_job(data=PointStream(20)), 3)
    assert [len(batch.numbers) for batch in batches] == [10, 10, 10]
    assert batches[2].after == StreamPlace(1, 10)


def test_epochs_draw_other_numbers_and_are_told_to_the_stream() -> None:
    first, *_, again = read(points_job(), 4)
    assert not torch.equal(first.samples[0][0], again.samples[0][0])
    orders = [batch.samples[0][1] for batch in read(points_job(data=ResumableStream(23)), 4)]
    stream = ResumableStream(23)
    assert orders[3] == stream._points[4][1]  # the second epoch begins three further


def test_a_buffer_gives_every_epoch_an_order() -> None:
    batches = read(buffered_job(), 6)
    orders = [[n for batch in batches[at : at + 3] for n in batch.numbers] for at in (0, 3)]
    assert sorted(orders[0]) == sorted(orders[1]) == [*range(23)]
    assert orders[0] != orders[1] != [*range(23)]


def same(one: StreamBatch, other: StreamBatch) -> bool:
    pairs = zip(one.samples, other.samples, strict=True)
    return one.numbers == other.numbers and all(torch.equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("make", [points_job, buffered_job, partial(points_job, data=ResumableStream(23))])
@pytest.mark.parametrize("done", range(1, 7))
def test_reading_goes_on_with_the_very_next_sample(make: Any, done: int) -> None:
    job = make()
    batches = read(job, 8)
    reader = StreamReader.of(job)
    reader.go_to(batches[done - 1].after)
    for expected in batches[done:]:
        found = reader.read()
        assert same(found, expected) and found.digest == expected.digest
    assert batches[0].digest != batches[1].digest


def test_a_state_spares_reading_what_comes_before() -> None:
    stream = ResumableStream(23)
    place = read(points_job(data=stream), 2)[1].after
    assert place.state == {"done": 20}
    reader = StreamReader.of(points_job(data=stream))
    reader.go_to(place)
    stream._points.x[1:21] = torch.nan
    assert not any(torch.isnan(x).any() for x, _ in reader.read().samples)


# ------------------------------------------------------------------------------------------- microbatches
def test_ragged_samples_come_together_by_their_length() -> None:
    job = sentences_job()
    batch = StreamReader.of(job).read()
    cut = CutStreamBatch(job, 0, batch)
    assert sorted(n for group in cut.microbatches for n in group) == batch.numbers
    lengths = [len(batch.samples[n]) for group in cut.microbatches for n in group]
    assert lengths == sorted(lengths)
    shares = cut.shares(3)
    assert sorted(n for share in shares for n in share.own) == [*range(len(cut.microbatches))]
    assert broken_data_rule(job) == ""


def test_the_first_batch_is_read_once_for_all_who_look_at_it() -> None:
    reads: list[int] = []

    def points() -> Iterator[Any]:
        reads.append(1)
        yield from PointStream(23)

    job = holding_first(points_job(data=points, eval_data=None))
    shares = [share_of_step(job, 0, rank=rank, ranks=2) for rank in range(2)]
    share_of_step(replace(job, microbatch=2), 0, rank=0, ranks=2)
    assert holding_first(job) is job and len(reads) == 1
    assert sorted(n for share in shares for m in share.own for n in share.microbatches[m]) == [*range(10)]


# ------------------------------------------------------------------------------------------- bad input
def failing() -> Iterator[Any]:
    for number in range(30):
        if number == 13:
            raise OSError("the line was cut")
        yield number


def few_then_none() -> Any:
    iterator = iter(PointStream(12))
    return lambda: iterator


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        (failing, SampleError, r"sample 13 of the stream, in epoch 1\n.*OSError: the line was cut \(test_"),
        (lambda: iter([]), UserError, "it has no samples"),
        (lambda: iter(PointStream(7)), UserError, "global_batch is 10 but the stream has only 7 samples"),
        (few_then_none(), RunError, r"epoch 2 of the stream\n.*iterated again, it has no samples"),
        (lambda: 3, SampleError, "'int' object is not iterable"),
    ],
)
def test_a_stream_that_cannot_be_read_is_named(data: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        read(points_job(data=data), 4)


def test_a_stream_that_ends_before_the_checkpoint_is_refused() -> None:
    reader = StreamReader.of(points_job(data=PointStream(15)))
    with pytest.raises(RunError, match="it ends after 15"):
        reader.go_to(StreamPlace(0, 20))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": iter([1])}, "can be read once"),
        ({"data": (n for n in range(3))}, "give the function that makes it"),
        ({"eval_data": iter([1])}, "eval_data is a list_iterator"),
        ({"shuffle_buffer": 0}, "shuffle_buffer is 0"),
        ({"shuffle_buffer": 3, "shuffle": False}, "shuffle_buffer is set but shuffle is False"),
        ({"shuffle_buffer": 3, "data": [1] * 20}, "data is not a stream"),
    ],
)
def test_a_job_says_what_of_its_stream_is_wrong(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        points_job(**changes)
