"""Reading the samples of one microbatch, and putting them together; here, in a loader's workers, or on another rank."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping, MutableSequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import Dataset, default_collate

from evenly.data.generators import seed
from evenly.data.nest import copied
from evenly.data.sampler_order import set_epoch
from evenly.errors import SampleError, describe


@dataclass(frozen=True)
class MicrobatchItem:
    """One microbatch to be read."""

    number: int
    indices: list[Any]
    key: int  # of the random stream of reading it
    counts: bool
    epoch: int | None = None  # of training, where the data set or collate may ask for it


@dataclass(frozen=True)
class Microbatch:
    """One microbatch as read: its number within the step, its number of samples, and what `collate` made of them.

    counts: False for a filler, which is run for the sake of other ranks and must change nothing.
    """

    number: int
    samples: int
    batch: Any
    counts: bool = True

    def copied(self) -> Microbatch:
        """The same with a batch of its own: code that runs it may change that in place."""
        return replace(self, batch=copied(self.batch))


@dataclass(frozen=True)
class UncollatedMicrobatch:
    """A microbatch whose samples are not put together yet; `samples` are those of `item`, in order."""

    item: MicrobatchItem
    samples: list[Any]

    def collated(self, collate: Any) -> Microbatch:
        """Put together by `collate`, or by torch's where that is None. Raises `SampleError`.

        `collate` may take fields out of samples, which are put together more than once.
        """
        kept = [copy.copy(one) if isinstance(one, MutableMapping | MutableSequence) else one for one in self.samples]
        by_number = dict(zip(self.item.indices, kept, strict=True))
        return SampleReader(by_number, collate).read(self.item)


class SampleReader(Dataset["Microbatch | SampleError"]):
    """Reads whole microbatches; runs in the loader's workers.

    An error is returned, not raised: torch would wrap one that is raised in a worker in text of its own.
    """

    def __init__(self, data: Any, collate: Any) -> None:
        self._data, self._collate, self._epoch = data, collate or default_collate, None

    def __getitem__(self, item: Any) -> Microbatch | SampleError:
        """Reads the microbatch that `item`, an `MicrobatchItem`, states."""
        try:
            return self.read(item)
        except SampleError as problem:
            return problem

    def read(self, item: MicrobatchItem) -> Microbatch:
        """The same; raises `SampleError`."""
        samples = self.samples(item)
        return Microbatch(item.number, len(samples), self._put_together(item, samples), item.counts)

    def samples(self, item: MicrobatchItem) -> list[Any]:
        """The samples of a microbatch, before they are put together."""
        if item.epoch is not None and item.epoch != self._epoch:
            self._epoch = item.epoch
            set_epoch(item.epoch, self._data, self._collate)
        seed(item.key)
        return [self._sample(index) for index in item.indices]

    def _sample(self, index: Any) -> Any:
        try:
            return self._data[index]
        except Exception as problem:
            raise SampleError(f"reading sample {index}", describe(problem), "fix or leave out this sample") from problem

    def _put_together(self, item: MicrobatchItem, samples: list[Any]) -> Any:
        try:
            return self._collate(samples)
        except Exception as problem:
            index = self._first_odd(item.indices, samples)
            raise SampleError(
                f"collating samples {item.indices}"
                + ("" if index is None else f" (sample {index} does not fit the others)"),
                describe(problem),
                "fix the job's collate, or give it one that puts such samples together (padding, say)",
            ) from problem

    def _first_odd(self, indices: list[int], samples: list[Any]) -> int | None:
        """The first sample that cannot be collated with those before it."""
        for n in range(1, len(samples) + 1):
            try:
                self._collate(samples[:n])
            except Exception:
                return indices[n - 1]
        return None
