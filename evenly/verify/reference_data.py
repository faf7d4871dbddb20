"""The data of the reference: the batches of a job in order, its evaluation, and reading a microbatch of them.

It shares with the engine the pure rules of order, microbatches and shuffle buffers; streams are plainly iterated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import default_collate

from evenly.data.generators import seeded
from evenly.data.loader import epoch_of_step, microbatches_of_evaluation, microbatches_of_step
from evenly.data.microbatch import cut
from evenly.data.nest import map_tensors
from evenly.data.sampler_order import set_epoch
from evenly.data.shuffle_buffer import shuffled
from evenly.data.stream import stream_key
from evenly.errors import UserError
from evenly.job import Job, is_stream

# Weights, gradients and optimizer state of these precisions; of the others they are float32.
WEIGHTS = {"float64": torch.float64, "pure-bfloat16": torch.bfloat16, "pure-float16": torch.float16}


def batches(job: Job) -> Iterator[list[Callable[[], list[Any]]]]:
    if job.streams:
        yield from _streamed(job)
    for step in count():
        set_epoch(epoch_of_step(job, step), job.data, job.collate)
        yield [partial(_by_index, job.data, indices) for indices in microbatches_of_step(job, step)]


def _by_index(data: Any, indices: list[int]) -> list[Any]:
    return [data[index] for index in indices]


def _streamed(job: Job) -> Iterator[list[Callable[[], list[Any]]]]:
    """The batches of a stream, one epoch after the other."""
    counted = job.samples_per_microbatch if job.microbatch or job.microbatch_cost is None else None
    for epoch in count():
        set_epoch(epoch, job.collate)
        samples, delivered = _iterate(job.data, epoch), 0
        if job.shuffle_buffer is not None:
            samples = shuffled(samples, job.shuffle_buffer, partial(stream_key, job.seed, "data", "shuffle", epoch))
        while batch := _next(samples, job.global_batch, stream_key(job.seed, "data", "stream", epoch, delivered)):
            delivered += len(batch)
            costs = None if job.cost is None else [job.cost(sample) for sample in batch]
            places = cut(range(len(batch)), size=counted, costs=costs, budget=job.microbatch_cost)
            yield [partial(_by_index, batch, group) for group in places]
        if not delivered:
            raise UserError(f"epoch {epoch + 1} of the stream", "it has no samples", "let it be iterated every time")


def evaluation_microbatches(job: Job) -> Iterator[Callable[[], list[Any]]]:
    if not is_stream(job.eval_data):
        yield from (partial(_by_index, job.eval_data, indices) for indices in microbatches_of_evaluation(job))
        return
    samples, done = _iterate(job.eval_data, 0), 0
    size = job.samples_per_microbatch
    while microbatch := _next(samples, size, stream_key(job.seed, "evaluation data", "stream", 0, done)):
        done += len(microbatch)
        yield partial(list, microbatch)


def _iterate(stream: Any, epoch: int) -> Iterator[Any]:
    if hasattr(stream, "set_epoch"):
        stream.set_epoch(epoch)
    yield from stream if hasattr(stream, "__iter__") else stream()


def _next(samples: Iterator[Any], size: int, key: int) -> list[Any]:
    with seeded(key):
        return [*islice(samples, size)]


def read_microbatch(job: Job, microbatch: Callable[[], list[Any]], key: int, device: str = "cpu") -> tuple[int, Any]:
    """How many samples a microbatch has, and what is collated of them, with random numbers from the stream `key`."""
    with seeded(key):
        samples = microbatch()
        batch = collated(job, samples)
    return len(samples), map_tensors(lambda t: t.to(device), batch)


def collated(job: Job, samples: list[Any]) -> Any:
    batch = (job.collate or default_collate)(samples)
    if (dtype := WEIGHTS.get(job.precision)) is not None:
        batch = map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, batch)
    return batch
