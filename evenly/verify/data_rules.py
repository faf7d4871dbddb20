"""The rules of data order, checked by counting alone.

The engine and the reference both ask `data/order` and `data/loader` which samples a step trains on, so that a mistake
there would be the same on both sides. Here nothing is taken from these but their results: the batches of an epoch have
their sizes and every sample once, the microbatches of a step hold its batch, an evaluation has every sample once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from math import ceil
from typing import Any

from evenly.data.loader import CutStreamBatch, indices_of_step, microbatches_of_evaluation, microbatches_of_step
from evenly.data.stream_reader import StreamBatch, StreamReader
from evenly.job import Job, is_stream

MOST_BATCHES = 1000  # of an epoch whose order is checked
CUT_STEPS = 4  # at the begin of each epoch, and two at its end, whose microbatches are checked
ORDERS_DIFFER_FROM = 12  # fewer samples may have the same order in two epochs by chance


def broken_data_rule(job: Job) -> str:
    """The first data rule that the batches of `job` break, as a sentence; '' if they keep them all."""
    if job.streams:
        return next(chain(_stream_problems(job), _evaluation_problems(job)), "")
    return next(chain(_order_problems(job), _cut_problems(job), _evaluation_problems(job)), "")


def _stream_problems(job: Job) -> Iterator[str]:
    """The first batches of a stream have its first samples once each, in its order or as its buffer allows, all full
    but the last of an epoch; the microbatches of each hold it.
    """
    reader, delivered, ended = StreamReader.of(job), list[int](), False
    for step in range(CUT_STEPS):
        batch = reader.read()
        if batch.after.epoch:
            return
        if ended or len(batch.numbers) > job.global_batch:
            size = f"{len(batch.numbers)} samples of {job.global_batch}"
            yield f"the batch of step {step + 1} has {size}, or follows a short one"
        ended = len(batch.numbers) < job.global_batch
        delivered += batch.numbers
        yield from _numbers_problems(job, delivered, step)
        yield from _cut_stream_problems(job, step, batch)


def _numbers_problems(job: Job, delivered: Sequence[int], step: int) -> Iterator[str]:
    if len({*delivered}) < len(delivered):
        yield f"step {step + 1} has samples of the stream that were trained on before"
    early = (job.shuffle_buffer or 1) - 1
    if any(number > place + early for place, number in enumerate(delivered)):
        yield f"step {step + 1} has samples that come later in the stream"


def _cut_stream_problems(job: Job, step: int, batch: StreamBatch) -> Iterator[str]:
    microbatches = CutStreamBatch(job, step, batch).microbatches
    if Counter(chain.from_iterable(microbatches)) != Counter(batch.numbers):
        yield f"the microbatches of step {step + 1} do not have the samples of its batch once each"
    samples = dict(zip(batch.numbers, batch.samples, strict=True))
    for number, group in enumerate(microbatches):
        if found := _microbatch_problem(job, [samples[one] for one in group]):
            yield f"microbatch {number} of step {step + 1} {found}"


def _order_problems(job: Job) -> Iterator[str]:
    """Two epochs: each has every sample once, in batches of the right sizes, in an order of its own. A sampler's order
    is its own affair.
    """
    if job.order is not None:
        return
    per_epoch = ceil(job.length / job.global_batch)
    orders: list[list[int]] = []
    for epoch in range(2):
        order: list[int] = []
        for place in range(min(per_epoch, MOST_BATCHES)):
            step = epoch * per_epoch + place
            batch = _batch(job, step)
            yield from _size_problems(job, step, batch)
            order += batch
        complete = job.length if per_epoch <= MOST_BATCHES else len(order)
        yield from _not_once(order, complete, job.length, f"epoch {epoch + 1}")
        if not job.shuffle and order != [*range(len(order))]:
            yield f"epoch {epoch + 1} is not in the order of the data, and the job does not shuffle"
        orders.append(order)
    if job.shuffle and job.length >= ORDERS_DIFFER_FROM and orders[0] == orders[1]:
        yield "two epochs have the same order, and the job shuffles"


def _cut_problems(job: Job) -> Iterator[str]:
    per_epoch = ceil(job.length / job.global_batch)
    steps = {*range(CUT_STEPS), per_epoch - 2, per_epoch - 1, *range(per_epoch, per_epoch + CUT_STEPS)}
    for step in sorted(step for step in steps if step >= 0):
        microbatches = microbatches_of_step(job, step)
        yield from _size_problems(job, step, [*chain.from_iterable(microbatches)])
        if Counter(chain.from_iterable(microbatches)) != Counter(_batch(job, step)):
            yield f"the microbatches of step {step + 1} do not have the samples of its batch once each"
        for number, indices in enumerate(microbatches):
            if found := _microbatch_problem(job, indices):
                yield f"microbatch {number} of step {step + 1} {found}"


def _batch(job: Job, step: int) -> list[int]:
    return indices_of_step(job, step)


def _size_problems(job: Job, step: int, batch: Sequence[int]) -> Iterator[str]:
    if job.order is not None:
        return
    place = step % ceil(job.length / job.global_batch)
    expected = min(job.global_batch, job.length - place * job.global_batch)
    if len(batch) != expected:
        yield f"the batch of step {step + 1} has {len(batch)} samples, not {expected}"


def _microbatch_problem(job: Job, costed: Sequence[Any]) -> str:
    """costed: what the job's cost takes, of each sample."""
    if not costed:
        return "is empty"
    by_count = job.microbatch is not None or job.microbatch_cost is None
    if by_count and len(costed) > job.samples_per_microbatch:
        return f"has {len(costed)} samples, more than {job.samples_per_microbatch}"
    if job.microbatch_cost is not None and job.cost is not None and len(costed) > 1:
        padded = len(costed) * max(job.cost(one) for one in costed)
        if padded > job.microbatch_cost * (1 + 1e-9):
            return f"has a padded cost of {padded:g}, more than {job.microbatch_cost:g}"
    return ""


def _evaluation_problems(job: Job) -> Iterator[str]:
    for data in job.eval_sets.values():
        if is_stream(data):
            continue
        length = len(data)  # pyright: ignore[reportArgumentType]
        indices = [*chain.from_iterable(microbatches_of_evaluation(job.with_eval_data(data)))]
        yield from _not_once(indices, length, length, "an evaluation")


def _not_once(indices: Sequence[int], complete: int, length: int, what: str) -> Iterator[str]:
    if outside := [i for i in indices if not 0 <= i < length]:
        yield f"{what} has sample {outside[0]}, and there are {length}"
    if repeated := [i for i, count in Counter(indices).items() if count > 1]:
        yield f"{what} has {_some(repeated)} more than once"
    if len(set(indices)) != complete:
        yield f"{what} leaves out {_some(sorted(set(range(length)).difference(indices)))}"


def _some(indices: Iterable[int]) -> str:
    first = [*islice(indices, 4)]
    return f"sample {first[0]}" if len(first) == 1 else f"samples {', '.join(map(str, first[:3]))} ..."
