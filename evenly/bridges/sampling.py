"""The order in which a Trainer reads its samples: that of its own sampler, where it follows from the sampler alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from evenly.data.generators import seeded
from evenly.job import is_stream

OURS = (SequentialSampler, RandomSampler)  # in whose place the job has an order of its own


class TrainerOrder:
    """The indices that `sampler` yields for an epoch, as the Trainer draws them, whatever seed is set around.

    A generator that the sampler has goes on from epoch to epoch, from where it stands as this is made.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler, self._epoch = sampler, 0
        generator: Any = getattr(sampler, "generator", None)
        self._generator = generator if isinstance(generator, torch.Generator) else None
        self._states = [] if self._generator is None else [self._generator.get_state()]  # before each epoch

    def set_epoch(self, epoch: int) -> None:
        """The next to be yielded, from 0."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator, states = self._generator, self._states
        if generator is None:
            return iter(self._drawn(self._epoch))
        while len(states) <= self._epoch:
            generator.set_state(states[-1])
            self._drawn(len(states) - 1)
            states.append(generator.get_state())
        generator.set_state(states[self._epoch])
        drawn = self._drawn(self._epoch)
        generator.set_state(states[0])  # as it was found
        return iter(drawn)

    def _drawn(self, epoch: int) -> list[int]:
        if callable(set_epoch := getattr(self._sampler, "set_epoch", None)):
            set_epoch(epoch)
        return [*map(int, self._sampler)]


def order_of(loader: Any) -> dict[str, Any]:
    """The fields of a `Job` for the order of `loader`, which `order_problems` has found nothing in."""
    sampler = _sampler(loader)
    if sampler is None or type(sampler) is SequentialSampler:
        return {"shuffle": False}
    return {"shuffle": True} if type(sampler) is RandomSampler else {"sampler": TrainerOrder(sampler)}


def order_problems(loader: Any) -> Iterator[str]:
    """Why the order of `loader` cannot be carried over."""
    batches, sampler = getattr(loader, "batch_sampler", None), _sampler(loader)
    if batches is not None and type(batches) is not BatchSampler:
        yield f"its batches are made by a {type(batches).__name__}, which may be of any size"
    elif sampler is not None and type(sampler) not in OURS and not _is_repeatable(sampler):
        yield (
            f"its sampler, a {type(sampler).__name__}, draws from torch's global random numbers, and its order depends "
            "on how many the training has drawn before (dropout, say): give it a generator (in _get_train_sampler)"
        )


def _sampler(loader: Any) -> Any:
    """None of a stream."""
    if is_stream(loader.dataset):
        return None
    return getattr(getattr(loader, "batch_sampler", None), "sampler", None)


def _is_repeatable(sampler: Any) -> bool:
    order, found = TrainerOrder(sampler), list[list[int]]()
    for seed in (0, 1):
        with seeded(seed):
            found.append([*order])
    return found[0] == found[1]
