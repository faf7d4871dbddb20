"""The order of a sampler of torch's: the batches that it yields for every epoch, drawn alike on every rank.

An epoch is drawn as its batches are asked for, so that it may have no end. It has a random stream of its own, so that
it follows from the job's seed and its number; but a generator that the job has handed over goes on from epoch to
epoch, as in a script.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Any

import torch

from evenly.data.generators import DrawnNumbers, seed, undisturbed
from evenly.data.stream import stream_key
from evenly.errors import UserError

AT_ONCE = 64  # batches that are drawn together; those of two times are kept
COMPARED = 100_000  # indices of the first epoch that are drawn twice


def set_epoch(epoch: int, *objects: Any, inner: tuple[str, ...] = ("dataset",)) -> None:
    """Call `set_epoch` of `objects` that have it, and of what they hold under the names `inner`."""
    for one in objects:
        if callable(method := getattr(one, "set_epoch", None)):
            method(epoch)
        set_epoch(epoch, *_held(one, inner), inner=inner)


def _held(one: Any, names: tuple[str, ...]) -> list[Any]:
    """Return the first that `one` holds under `names`, in a list; an empty one where there is none."""
    return [found for name in names if (found := getattr(one, name, None)) is not None][:1]


SAMPLERS = ("batch_sampler", "sampler")


def in_words(indices: list[Any]) -> str:
    """Return a text that is another for other indices, on every rank the same."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(indices))


class SamplerOrder:
    """Batches of `sampler`, cut to `size` unless `batched`; its indices go to the data set as they are.

    Raises `UserError` for a number that is not in [0, `length`), for a batch of more than `size`, and where an epoch
    that is drawn again is another.
    """

    def __init__(self, sampler: Any, *, seed: int, size: int, length: int, batched: bool = False) -> None:
        self._sampler, self._seed, self._size, self._length, self._batched = sampler, seed, size, length, batched
        found, self._generators = sampler, list[torch.Generator]()
        while found is not None:
            if isinstance(one := getattr(found, "generator", None), torch.Generator) and one not in self._generators:
                self._generators.append(one)
            found = next(iter(_held(found, SAMPLERS)), None)
        self._states = [[(one, one.get_state()) for one in self._generators]]  # as each epoch known begins
        self._starts, self._kept = [0], dict[int, list[Any]]()  # the first step of each; batches by step
        count = COMPARED // (size if batched else 1)
        self.first, again = (in_words(self._begin(0) or self._draw(count)) for _ in range(2))
        if self.first != again:
            raise self._wrong(
                "drawn again for the same epoch, it yields others",
                "let it draw from torch, random and numpy, which are seeded, or from a torch.Generator as `generator`",
            )
        self._begin(0)

    def batch(self, step: int) -> list[Any]:
        """Return the indices of the batch of `step`, from 0 over the whole run."""
        if step < self._next and step not in self._kept:
            self._kept.clear()
            self._begin(bisect_right(self._starts, step) - 1)
        while step >= self._next:
            self._draw_batches()
        return self._kept[step]

    def epoch(self, step: int) -> int:
        """Return the epoch of `step`, both from 0."""
        if step >= self._next:
            self.batch(step)
        return bisect_right(self._starts, step) - 1

    def _begin(self, epoch: int) -> None:
        key = stream_key(self._seed, "sampler", epoch)
        self._epoch, self._next = epoch, self._starts[epoch]
        with undisturbed("cpu", *self._generators):
            seed(key)
            for generator, state in self._states[epoch]:
                generator.set_state(state)
            set_epoch(epoch, self._sampler, inner=SAMPLERS)
            self._items: Iterator[Any] = iter(self._sampler)
            self._numbers = DrawnNumbers("cpu", *self._generators)

    def _draw(self, count: int) -> list[Any]:
        """Return what comes next of this epoch, at most `count`; what code around it draws is left as it is."""
        with self._numbers.again():
            found = [*islice(self._items, count)]
            self._numbers = DrawnNumbers("cpu", *self._generators)
        return found

    def _draw_batches(self) -> None:
        if found := self._draw(AT_ONCE * (1 if self._batched else self._size)):
            for number in [one for one in self._kept if one < self._next - AT_ONCE]:
                del self._kept[number]
            for batch in self._checked(found):
                self._kept[self._next] = batch
                self._next += 1
            return
        if self._next == self._starts[self._epoch]:
            raise self._wrong("it yields nothing", "let it yield an index for every sample of an epoch")
        if self._epoch + 1 == len(self._starts):
            self._starts.append(self._next)
            self._states.append(self._numbers.states[1:])  # but for that of torch itself
        self._begin(self._epoch + 1)

    def _checked(self, drawn: list[Any]) -> list[list[Any]]:
        if self._batched and not isinstance(drawn[0], Iterable):
            raise self._wrong(f"it yields {drawn[0]!r}, no batch", "give it as sampler=, or let it yield lists")
        if not self._batched and isinstance(drawn[0], list):
            do = "give it as batch_sampler= if these are batches; let an index be a tuple, say"
            raise self._wrong("it yields lists", do)
        cut = range(0, len(drawn), self._size)
        batches = [[*one] for one in (drawn if self._batched else (drawn[at : at + self._size] for at in cut))]
        for batch in batches:
            outside = [index for index in batch if isinstance(index, int) and not 0 <= index < self._length]
            if outside:
                raise self._wrong(f"it yields {outside[0]}", f"let it yield numbers from 0 to {self._length - 1}")
            if not 0 < len(batch) <= self._size:
                found = f"it yields a batch of {len(batch)} samples, and global_batch is {self._size}"
                raise self._wrong(found, "let global_batch be the size of the largest batch")
        return batches

    def _wrong(self, found: str, do: str) -> UserError:
        return UserError(f"the order of the job's sampler, a {type(self._sampler).__name__}", found, do)


@lru_cache(maxsize=8)
def sampler_order(sampler: Any, *, seed: int, size: int, length: int, batched: bool) -> SamplerOrder:
    """Return the order of `sampler`, which is drawn once in this process."""
    return SamplerOrder(sampler, seed=seed, size=size, length=length, batched=batched)
