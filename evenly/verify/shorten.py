"""The job that is verified: its data cut so that few steps meet the end of an epoch.

What is special at that end (a short batch, uneven shares, a new order) would otherwise come after hours. The rules of
data order are checked on the whole data (`data_rules`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from evenly.job import Job, is_stream


class FirstSamples(Dataset[Any]):
    """The first `count` samples of `data`."""

    def __init__(self, data: Any, count: int) -> None:
        self._data, self._count = data, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(f"sample {index} of {self._count}")
        return self._data[index]


class FirstOfStream(IterableDataset[Any]):
    """The first `count` samples of every epoch of a stream; has a state where the stream does."""

    def __init__(self, stream: Any, count: int) -> None:
        self._stream, self._count = stream, count
        self._first = self._done = 0  # samples before those that are iterated, and before the next
        if hasattr(stream, "load_state_dict"):
            self.state_dict, self.load_state_dict = self._state_dict, self._load_state_dict

    def set_epoch(self, epoch: int) -> None:
        """Also of the stream, where it has epochs."""
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        self._done, self._first = self._first, 0
        stream = self._stream if hasattr(self._stream, "__iter__") else self._stream()
        for sample in islice(stream, self._count - self._done):
            self._done += 1
            yield sample

    def _state_dict(self) -> dict[str, Any]:
        return {"done": self._done, "stream": self._stream.state_dict()}

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        self._first = state["done"]
        self._stream.load_state_dict(state["stream"])


class FirstOfSampler:
    """What `sampler` yields first in every epoch: indices, or batches of them, of `count` samples in all."""

    def __init__(self, sampler: Any, count: int) -> None:
        self.sampler, self._count = sampler, count

    def __iter__(self) -> Iterator[Any]:
        left = self._count
        for item in self.sampler:
            kept = [*item][:left] if isinstance(item, Iterable) else item
            yield kept
            left -= len(kept) if isinstance(kept, list) else 1
            if left <= 0:
                return


def shortened(job: Job, steps: int) -> Job:
    """`job` with epochs that end within `steps`, in a short batch, and with fewer samples to evaluate.

    Of three steps the second has a short batch, and the third begins an epoch. An average of the weights is over all.
    What is frozen for some steps is not in the last one any more, evaluations that the schedule may follow come three
    times at least, and each phase is run in every other step at least.
    """
    job = _in_time(job, steps)
    if job.average is not None:
        job = replace(job, average=replace(job.average, start=1, every=1))
    batch = job.global_batch
    sets = {name: _first_of(one, 2 * batch + 1) for name, one in job.eval_sets.items()}
    eval_data = sets.get("", sets or None)
    if steps < 2 or batch < 3:
        return replace(job, eval_data=eval_data)
    length = max(1, steps - 2) * batch + batch // 2 + 1
    if job.sampler is not None:
        return replace(job, sampler=FirstOfSampler(job.sampler, length), eval_data=eval_data)
    return replace(job, data=_first_of(job.data, length), eval_data=eval_data)


def _first_of(data: Any, count: int) -> Any:
    """`data`, if it has no more than `count` samples, else these."""
    if is_stream(data):
        return FirstOfStream(data, count)
    return FirstSamples(data, count) if count < len(data) else data


def _in_time(job: Job, steps: int) -> Job:
    frozen = {name: count and min(count, max(1, steps - 1)) for name, count in (job.frozen or {}).items()}
    every = job.eval_every and min(job.eval_every, max(1, steps // 3))
    phases = {
        name: replace(one, every=min(one.every, max(1, min(2, steps)))) for name, one in (job.phases or {}).items()
    }
    return replace(job, frozen=frozen or None, eval_every=every, phases=phases or None)
