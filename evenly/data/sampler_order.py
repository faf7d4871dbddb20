"""The order of a sampler of torch's: the batches that it yields for every epoch, drawn alike on every rank.

Every epoch is drawn under a random stream of its own (also a generator that the sampler has), after `set_epoch`, so
that it follows from the job's seed and the number of the epoch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch

from evenly.data.generators import seeded
from evenly.data.stream import stream_key
from evenly.errors import UserError

KEPT_EPOCHS = 2  # the one under way and the next


class SamplerOrder:
    """The batches of `sampler`, which yields indices in [0, `length`), cut into batches of `size`, or batches of them.

    Raises `UserError` for what is no index, for a batch of more than `size`, and where an epoch that is drawn again is
    another.
    """

    def __init__(self, sampler: Any, *, seed: int, size: int, length: int) -> None:
        self._sampler, self._seed, self._size, self._length = sampler, seed, size, length
        self._starts = [0]  # the first step of every epoch known, and of the one after
        self._epochs: dict[int, list[list[int]]] = {}
        if self._drawn(0) != self._drawn(0):
            raise self._wrong(
                "drawn again for the same epoch, it yields others",
                "let it draw from torch, random and numpy, which are seeded, or from a torch.Generator as `generator`",
            )

    def batch(self, step: int) -> list[int]:
        """The indices of the batch of `step`, from 0 over the whole run."""
        while step >= self._starts[-1]:
            self._starts.append(self._starts[-1] + len(self._epoch(len(self._starts) - 1)))
        epoch = bisect_right(self._starts, step) - 1
        return self._epoch(epoch)[step - self._starts[epoch]]

    def _epoch(self, epoch: int) -> list[list[int]]:
        if epoch not in self._epochs:
            self._epochs = {n: one for n, one in self._epochs.items() if n > epoch - KEPT_EPOCHS}
            self._epochs[epoch] = self._checked(self._drawn(epoch))
        return self._epochs[epoch]

    def _drawn(self, epoch: int) -> list[Any]:
        key = stream_key(self._seed, "sampler", epoch)
        with seeded(key):
            one = self._sampler
            while one is not None:  # a batch sampler has another
                if isinstance(generator := getattr(one, "generator", None), torch.Generator):
                    generator.manual_seed(key)
                if callable(set_epoch := getattr(one, "set_epoch", None)):
                    set_epoch(epoch)
                one = getattr(one, "sampler", None)
            return [*self._sampler]

    def _checked(self, drawn: list[Any]) -> list[list[int]]:
        if not drawn:
            raise self._wrong("it yields nothing", "let it yield an index for every sample of an epoch")
        if isinstance(drawn[0], Iterable):
            batches = [[int(index) for index in batch] for batch in drawn]
        else:
            indices = [int(index) for index in drawn]
            batches = [indices[start : start + self._size] for start in range(0, len(indices), self._size)]
        for batch in batches:
            if outside := [index for index in batch if not 0 <= index < self._length]:
                raise self._wrong(f"it yields {outside[0]}", f"let it yield numbers from 0 to {self._length - 1}")
            if not 0 < len(batch) <= self._size:
                found = f"it yields a batch of {len(batch)} samples, and global_batch is {self._size}"
                raise self._wrong(found, "let global_batch be the size of the largest batch")
        return batches

    def _wrong(self, found: str, do: str) -> UserError:
        return UserError(f"the order of the job's sampler, a {type(self._sampler).__name__}", found, do)


@lru_cache(maxsize=8)
def sampler_order(sampler: Any, *, seed: int, size: int, length: int) -> SamplerOrder:
    """The order of `sampler`, drawn once in this process."""
    return SamplerOrder(sampler, seed=seed, size=size, length=length)
