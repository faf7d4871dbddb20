"""The job that is verified: its data cut so that few steps meet the end of an epoch.

What is special at that end (a short batch, uneven shares, a new order) would otherwise come after hours. The rules of
data order are checked on the whole data (`data_rules`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.utils.data import Dataset

from evenly.job import Job


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


def shortened(job: Job, steps: int) -> Job:
    """`job` with epochs that end within `steps`, in a short batch, and with fewer samples to evaluate.

    Of three steps the second has a short batch, and the third begins an epoch. An average of the weights is over all.
    What is frozen for some steps is not in the last one any more, and evaluations that the schedule may follow come at
    least three times.
    """
    job = _in_time(job, steps)
    if job.average is not None:
        job = replace(job, average=replace(job.average, start=1, every=1))
    batch = job.global_batch
    length = max(1, steps - 2) * batch + batch // 2 + 1 if steps > 1 and batch > 2 else job.length
    data = FirstSamples(job.data, length) if length < job.length else job.data
    if job.eval_data is None:
        return replace(job, data=data)
    sets = {name: _first_samples(one, 2 * batch + 1) for name, one in job.eval_sets.items()}
    return replace(job, data=data, eval_data=sets.get("", sets))


def _in_time(job: Job, steps: int) -> Job:
    frozen = {name: count and min(count, max(1, steps - 1)) for name, count in (job.frozen or {}).items()}
    every = job.eval_every and min(job.eval_every, max(1, steps // 3))
    return replace(job, frozen=frozen or None, eval_every=every)


def _first_samples(data: Any, count: int) -> Any:
    return FirstSamples(data, count) if count < len(data) else data
