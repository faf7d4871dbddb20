"""The order in which a Trainer reads its samples: that of its own sampler, where it follows from the sampler alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from evenly.data.sampler_order import SamplerOrder
from evenly.job import is_stream

OURS = (SequentialSampler, RandomSampler)  # in whose place the job has an order of its own


def order_of(loader: Any) -> dict[str, Any]:
    """The fields of a `Job` for the order of `loader`, which `order_problems` has found nothing in."""
    sampler = _sampler(loader)
    if sampler is None or type(sampler) is SequentialSampler:
        return {"shuffle": False}
    return {"shuffle": True} if type(sampler) is RandomSampler else {"sampler": sampler}


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
    orders = [SamplerOrder(sampler, seed=seed, size=1, length=0) for seed in (0, 1)]
    return orders[0].first == orders[1].first
