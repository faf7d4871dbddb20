"""Reading a stream: its samples one after the other, cut into batches, epoch after epoch.

*stream* data without a length, iterated from the start for every epoch · *number* of a sample: how many arrived before
it in its epoch · *delivered* in the order of training, which a shuffle buffer makes another one.

What reading draws follows from the seed, the epoch and how many samples were delivered before the batch: the same on
every plan, and after a resume. The state of a stream is that between two batches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import islice
from types import ModuleType
from typing import Any

import torch

from evenly.data.alone import alone
from evenly.data.generators import seed
from evenly.data.shuffle_buffer import shuffled
from evenly.data.stream import stream_key
from evenly.errors import RunError, SampleError, UserError, describe
from evenly.job import Job
from evenly.launcher.environment import without_ranks

DIGESTED = 4  # samples of a batch
DIGESTED_BYTES = 4096  # of each of its tensors
AGAIN = "let it be iterated from the start every time: an IterableDataset, or a function that returns a fresh iterator"


@dataclass(frozen=True)
class StreamPlace:
    """Where reading goes on: after so many `samples` of `epoch`, both from 0.

    state: the stream's own, where it has one. digest: of the batch that comes next, where that is known, else ''.
    """

    epoch: int = 0
    samples: int = 0
    state: Any = None
    digest: str = ""


@dataclass(frozen=True)
class StreamBatch:
    """Consecutive samples of one epoch, in the order of training, with their numbers.

    after: the place after them.
    """

    numbers: list[int]
    samples: list[Any]
    after: StreamPlace

    @property
    def digest(self) -> str:
        """Equal for the same samples, and hardly for others; of the first ones' numbers and contents."""
        found = blake2b(repr((len(self.numbers), self.numbers[:DIGESTED])).encode(), digest_size=8)
        for sample in self.samples[:DIGESTED]:
            _add_to(found, sample)
        return found.hexdigest()


class StreamReader:
    """Reads a stream in batches of `size` samples; the last of an epoch may have fewer.

    word: of the random streams of reading, which has those of training and of evaluation apart.
    Reading seeds the generators of this process.
    """

    def __init__(self, data: Any, *, seed: int, size: int, buffer: int | None = None, word: str = "data") -> None:
        self._data, self._seed, self._size, self._word = data, seed, size, word
        self._buffer = buffer
        self._begin(0)

    @classmethod
    def of(cls, job: Job) -> StreamReader:
        return cls(job.data, seed=job.seed, size=job.global_batch, buffer=job.shuffle_buffer)

    @classmethod
    def of_evaluation(cls, job: Job) -> StreamReader:
        """Of the evaluation data of `job`; a batch is one microbatch."""
        return cls(job.eval_data, seed=job.seed, size=job.samples_per_microbatch, word="evaluation data")

    def read(self) -> StreamBatch:
        """The next batch; after the last of an epoch, the first of the next.

        Raises `SampleError` for a sample that cannot be read, `UserError` for a stream of fewer than `size` samples,
        `RunError` for one that cannot be iterated again.
        """
        found = self.read_in_epoch()
        if found is None:
            self._check_epoch()
            self._begin(self._epoch + 1)
            found = self.read_in_epoch()
        if found is None:
            self._check_epoch()
            raise AssertionError("an epoch without samples passes no check")
        if self._epoch == 0 and self._delivered < self._size:
            few = f"global_batch is {self._size} but the stream has only {self._delivered} samples"
            raise UserError("batches of a stream", few, "take a smaller global_batch, or give the stream more samples")
        return found

    def read_in_epoch(self) -> StreamBatch | None:
        """The next batch of this epoch; None at its end."""
        seed(stream_key(self._seed, self._word, "stream", self._epoch, self._delivered))
        with alone(), nullcontext() if self._begun else without_ranks():
            self._begun = True
            found = [*islice(self._samples, self._size)]
        if not found:
            return None
        self._delivered += len(found)
        numbers, samples = zip(*found, strict=True)
        return StreamBatch([*numbers], [*samples], StreamPlace(self._epoch, self._delivered, self._state()))

    def go_to(self, place: StreamPlace) -> None:
        """Goes on at `place`: by the stream's own state, where there is one that `place` has, else by reading up to it.

        A state is given to a copy of the stream, so that another reader can still read the stream from its start.
        Raises `RunError` for a stream that ends before.
        """
        if place.state is not None and self._buffer is None:
            self._data = _copy_of(self._data)
            self._begin(place.epoch, place)
            return
        self._begin(place.epoch)
        while self._delivered < place.samples:
            if self.read_in_epoch() is None:
                raise RunError(
                    f"going on after {place.samples} samples of epoch {place.epoch + 1} of the stream",
                    f"it ends after {self._delivered}",
                    "resume with the data of the run that saved the checkpoint",
                )

    def _begin(self, epoch: int, place: StreamPlace | None = None) -> None:
        self._epoch, self._delivered = epoch, place.samples if place is not None else 0
        self._begun = False  # what a stream asks the environment, it asks at its first sample
        arrivals = self._arrivals(epoch, place)
        draw = partial(stream_key, self._seed, self._word, "shuffle", epoch)
        self._samples = arrivals if self._buffer is None else shuffled(arrivals, self._buffer, draw)

    def _arrivals(self, epoch: int, place: StreamPlace | None) -> Iterator[tuple[int, Any]]:
        """The samples of `epoch`, each with its number; nothing is done to the stream before the first is asked for."""
        number = 0 if place is None else place.samples
        iterator = self._reading(epoch, number, lambda: self._iterator(epoch, place))
        while (sample := self._reading(epoch, number, lambda: next(iterator, _END))) is not _END:
            yield number, sample
            number += 1

    def _iterator(self, epoch: int, place: StreamPlace | None) -> Iterator[Any]:
        if callable(set_epoch := getattr(self._data, "set_epoch", None)):
            set_epoch(epoch)
        if place is not None:
            self._data.load_state_dict(place.state)
        return iter(self._data if hasattr(self._data, "__iter__") else self._data())

    @staticmethod
    def _reading(epoch: int, number: int, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Exception as problem:
            raise SampleError(
                f"reading sample {number} of the stream, in epoch {epoch + 1}",
                describe(problem),
                "fix the stream, or let it leave out this sample",
            ) from problem

    def _state(self) -> Any:
        if self._buffer is not None or not hasattr(self._data, "load_state_dict"):
            return None
        return self._data.state_dict()

    def _check_epoch(self) -> None:
        if self._delivered == 0 and self._epoch == 0:
            raise UserError("the job's stream of samples", "it has no samples", "look for what leaves out all of them")
        if self._delivered == 0:
            raise RunError(f"epoch {self._epoch + 1} of the stream", "iterated again, it has no samples", AGAIN)


_END = object()


def _copy_of(stream: Any) -> Any:
    """A copy that iterates by itself, of the same tensors and arrays, which may be as large as a disk."""
    shared: dict[int, Any] = {}
    seen: set[int] = set()
    to_see: list[Any] = [stream]
    while to_see:
        one = to_see.pop()
        if id(one) in seen or isinstance(one, type | ModuleType):
            continue
        seen.add(id(one))
        if hasattr(one, "dtype") and hasattr(one, "shape"):
            shared[id(one)] = one
        elif isinstance(one, dict | list | tuple):
            to_see += one.values() if isinstance(one, dict) else one  # pyright: ignore
        else:
            to_see += getattr(one, "__dict__", {}).values()
    return deepcopy(stream, shared)


def _add_to(digest: Any, value: Any) -> None:
    """Adds a value of a sample to a digest; equal values add the same in every process."""
    if isinstance(value, dict):
        for key, item in value.items():  # pyright: ignore[reportUnknownVariableType]
            digest.update(repr(key).encode())  # pyright: ignore[reportUnknownArgumentType]
            _add_to(digest, item)
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)} of".encode())  # pyright: ignore[reportUnknownArgumentType]
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            _add_to(digest, item)
    elif hasattr(value, "dtype") and hasattr(value, "shape"):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        if not isinstance(value, torch.Tensor):
            digest.update(value.tobytes()[:DIGESTED_BYTES])
        elif value.layout is torch.strided:
            first = value.detach().flatten()[:DIGESTED_BYTES].cpu().contiguous()
            digest.update(first.view(torch.uint8).numpy().tobytes()[:DIGESTED_BYTES])
    else:
        digest.update(re.sub(r" at 0x[0-9a-f]+", "", repr(value)[:DIGESTED_BYTES]).encode())
