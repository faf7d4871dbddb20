"""Streams of the samples of `jobs`: iterable datasets with and without a state, a function, a shuffle buffer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from jobs import Points, Sentences, classifier_job
from jobs_tensor import VOCABULARY, heads_job

import evenly


class PointStream(torch.utils.data.IterableDataset):
    """The points in their order; every sample draws."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self._points = Points(count, seed)

    def __iter__(self) -> Iterator[Any]:
        for number in range(len(self._points)):
            yield self._points[number]


class ResumableStream(PointStream):
    """Can go on anywhere, and does not read what comes before; in another order in every epoch."""

    def __init__(self, count: int, seed: int = 0) -> None:
        super().__init__(count, seed)
        self.epoch = self._first = self._done = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self._done, self._first = self._first, 0
        while self._done < len(self._points):
            self._done += 1
            yield self._points[(self._done + 3 * self.epoch) % len(self._points)]

    def state_dict(self) -> dict[str, Any]:
        return {"done": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._first = state["done"]


class CountedStream(torch.utils.data.IterableDataset):
    """A stream that notes in `file` every sample that is read, in whatever process."""

    def __init__(self, file: Path, stream: Any) -> None:
        self._file, self._stream, self.epoch = file, stream, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        stream: Any = self._stream() if callable(self._stream) else self._stream
        for number, sample in enumerate(stream):
            with self._file.open("a") as file:
                file.write(f"{self.epoch} {number}\n")
            yield sample


def sentences(count: int, seed: int = 0) -> Any:
    """A function that returns a fresh iterator of sentences."""
    rows = Sentences(count, seed, tokens=VOCABULARY).rows
    return lambda: iter(rows)


def points_job(**changes: Any) -> evenly.Job:
    """BatchNorm, dropout, draws in reading; 23 samples in batches of 10, 10 and 3."""
    return classifier_job(**{"data": PointStream(23), "eval_data": PointStream(11, seed=1), **changes})


def resumable_job(**changes: Any) -> evenly.Job:
    return points_job(**{"data": ResumableStream(23), **changes})


def buffered_job(**changes: Any) -> evenly.Job:
    return points_job(**{"shuffle_buffer": 7, **changes})


def sentences_job(**changes: Any) -> evenly.Job:
    """Ragged samples of a function, blocks, dropout, uneven weights; 29 samples in batches of 12, 12 and 5."""
    fields: dict[str, Any] = dict(
        data=sentences(29), eval_data=sentences(9, seed=1), cost=len, microbatch_cost=40, microbatch=None,
    )  # fmt: skip
    return heads_job(**{**fields, **changes})


def with_workers() -> Any:
    """Two processes read the points in turns, twice each; what they draw follows from how the reader was seeded."""
    return iter(torch.utils.data.DataLoader(PointStream(12), batch_size=None, num_workers=2))


def workers_job(**changes: Any) -> evenly.Job:
    return points_job(**{"data": with_workers, "eval_data": None, **changes})


STREAM_JOBS = {
    "workers": workers_job,
    "points": points_job,
    "resumable": resumable_job,
    "buffered": buffered_job,
    "sentences": sentences_job,
}
