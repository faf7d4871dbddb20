"""The job that is verified: its data cut so that few steps meet the end of an epoch.

The short batch, uneven shares and new order at that end would otherwise come after hours. The rules of data order are
checked on the whole data (`data_rules`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from math import inf
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from evenly.job import Job, is_stream


class FirstSamples(Dataset[Any]):
    """The first `count` samples of `data`."""

    def __init__(self, data: Any, count: int) -> None:
        self.dataset, self._count = data, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(f"sample {index} of {self._count}")
        return self.dataset[index]

    def __str__(self) -> str:
        return f"the first {self._count} of its {len(self.dataset)} samples"


class FirstOfStream(IterableDataset[Any]):
    """The first `count` samples of every epoch of a stream; has a state where the stream does."""

    def __init__(self, stream: Any, count: int) -> None:
        self._stream, self._count = stream, count
        self._first = self._done = 0  # samples before those that are iterated, and before the next
        if hasattr(stream, "load_state_dict"):
            self.state_dict, self.load_state_dict = self._state_dict, self._load_state_dict

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        self._done, self._first = self._first, 0
        stream = self._stream if hasattr(self._stream, "__iter__") else self._stream()
        for sample in islice(stream, self._count - self._done):
            self._done += 1
            yield sample

    def __str__(self) -> str:
        return f"the first {self._count} samples of its stream"

    def _state_dict(self) -> dict[str, Any]:
        return {"done": self._done, "stream": self._stream.state_dict()}

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        self._first = state["done"]
        self._stream.load_state_dict(state["stream"])


class FirstOfSampler:
    """The first `full` batches of `size` that `sampler` yields in every epoch, and its last one if `job` comes to it.

    A batch sampler has batches of `size` 1.
    """

    def __init__(self, sampler: Any, full: int, size: int, steps: int) -> None:
        """steps: of the training."""
        self.sampler, self._full, self._size, self._steps = sampler, full, size, steps

    def __iter__(self) -> Iterator[Any]:
        size, last = self._size, inf
        for number, item in enumerate(self.sampler):
            if number == 0:
                length = len(self.sampler) if hasattr(self.sampler, "__len__") else inf
                last = (length - 1) // size * size if self._steps * size >= length else inf
            if number < self._full * size or number >= last:
                yield item
            elif last == inf:
                return

    def __str__(self) -> str:
        return f"the first {self._full} batches of its sampler's epochs, and the last if it comes to that"


def shortened(job: Job, steps: int) -> Job:
    """`job` with epochs that end within `steps`, and with fewer samples to evaluate.

    All batches are as long as the job's: of three steps the second is the last of an epoch, short if that is and the
    job has enough steps to come to it, and the third begins an epoch. An average of the weights is over all.
    What is frozen for some steps is not in the last one any more, evaluations that the schedule may follow come three
    times at least, and each phase is run in every other step at least.
    """
    job = _in_time(job, steps)
    if job.average is not None:
        job = replace(job, average=replace(job.average, start=1, every=1))
    batch, size = job.global_batch, job.samples_per_microbatch
    sets = {name: _first_of(one, 2 * batch // size, size) for name, one in job.eval_sets.items()}
    eval_data = sets.get("", sets or None)
    if steps < 2 or batch < 3:
        return replace(job, eval_data=eval_data)
    full = max(1, steps - 2)
    if job.batch_sampler is not None:
        return replace(job, batch_sampler=FirstOfSampler(job.batch_sampler, full, 1, job.steps), eval_data=eval_data)
    if job.sampler is not None:
        return replace(job, sampler=FirstOfSampler(job.sampler, full, batch, job.steps), eval_data=eval_data)
    return replace(job, data=_first_of(job.data, full, batch, job.steps), eval_data=eval_data)


def shortened_in_words(job: Job) -> str:
    """Return what a shortened `job` is trained on; '' if that is all of its data."""
    cut: Any = job.data if job.order is None else job.order
    return f"verify trains on {cut}" if isinstance(cut, FirstSamples | FirstOfStream | FirstOfSampler) else ""


def _first_of(data: Any, full: int, size: int, steps: float = inf) -> Any:
    """Return the first `full` batches of `size`, and one as long as the last that `steps` of training come to."""
    if is_stream(data):
        return FirstOfStream(data, (full + 1) * size)
    rest = len(data) % size if steps * size >= len(data) else 0
    count = full * size + (rest or size)
    return FirstSamples(data, count) if count < len(data) else data


def _in_time(job: Job, steps: int) -> Job:
    frozen = {name: count and min(count, max(1, steps - 1)) for name, count in (job.frozen or {}).items()}
    every = job.eval_every and min(job.eval_every, max(1, steps // 3))
    save_every = job.save_every and min(job.save_every, max(1, steps // 2))
    phases = {
        name: replace(one, every=min(one.every, max(1, min(2, steps)))) for name, one in (job.phases or {}).items()
    }
    return replace(job, frozen=frozen or None, eval_every=every, save_every=save_every, phases=phases or None)
