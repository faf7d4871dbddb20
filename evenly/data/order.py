"""The global order: which samples step `t` trains on, whoever trains them.

*step* counts batches from 0 over the whole run · *epoch* one pass over the dataset, in which every sample
occurs exactly once · *position* a sample's place in the order of its epoch · *index* its place in the
dataset.

The order of an epoch is a permutation that is computed, never stored: the index at a position follows from
the position and a key alone, so a batch costs the same in a dataset of a hundred samples and of a hundred
billion, and a run resumes at any step without replaying the ones before. The permutation is a Feistel network
on a grid of rows x columns that is just large enough to hold the dataset: each round shifts one coordinate by
a hash of the other, which can be undone, so no two positions meet. A position sent to a cell beyond the end
of the dataset is sent on from there until it lands inside (cycle walking), which keeps the map one-to-one.
Only integers are used: the order is the same on every machine and under every version of numpy.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from evenly.data.stream import stream_key

BLOCK = 1024  # positions
ROUND_PAIRS = 6  # with 4, orders of fewer than ten samples are visibly uneven
_MASK = 2**64 - 1
_ROUND_STEP = 0x9E3779B97F4A7C15  # odd, so that the keys of all rounds differ
_MIX_A = np.uint64(0xFF51AFD7ED558CCD)
_MIX_B = np.uint64(0xC4CEB9FE1A85EC53)
_SHIFT = np.uint64(33)
_TOP = np.uint64(20)  # leaves 44 bits, so that adding a coordinate below 2**32 cannot overflow


def steps_per_epoch(length: int, global_batch: int) -> int:
    """Number of batches that hold `length` samples once each; the last may be short."""
    if length < 1 or global_batch < 1:
        raise ValueError(f"length {length} and global_batch {global_batch} must be at least 1")
    return -(-length // global_batch)


def batch_indices(*, seed: int, step: int, length: int, global_batch: int, shuffle: bool = True) -> list[int]:
    """The indices of the batch of `step`, in order; fewer than `global_batch` only at an epoch's end."""
    if step < 0:
        raise ValueError(f"step {step} must not be negative")
    epoch, step_in_epoch = divmod(step, steps_per_epoch(length, global_batch))
    first = step_in_epoch * global_batch
    last = min(first + global_batch, length)
    if not shuffle:
        return list(range(first, last))
    key = stream_key(seed, "order", epoch, length)
    if last - first > BLOCK:
        return _permute(np.arange(first, last, dtype=np.uint64), length, key).tolist()
    own, begin = first // BLOCK, first // BLOCK * BLOCK
    found = _block(key, length, own)[first - begin : last - begin]
    return found if last <= begin + BLOCK else found + _block(key, length, own + 1)[: last - begin - BLOCK]


@lru_cache(maxsize=4)  # steps take their samples one after the other
def _block(key: int, length: int, number: int) -> list[int]:
    positions = np.arange(number * BLOCK, min((number + 1) * BLOCK, length), dtype=np.uint64)
    return _permute(positions, length, key).tolist()


def _permute(positions: NDArray[np.uint64], length: int, key: int) -> NDArray[np.uint64]:
    indices = _permute_grid(positions, length, key)
    outside = indices >= length
    while outside.any():
        indices[outside] = _permute_grid(indices[outside], length, key)
        outside = indices >= length
    return indices


def _permute_grid(cells: NDArray[np.uint64], length: int, key: int) -> NDArray[np.uint64]:
    side = isqrt(length - 1) + 1
    columns, rows = np.uint64(side), np.uint64(-(-length // side))
    row, column = cells // columns, cells % columns
    for round_ in range(0, 2 * ROUND_PAIRS, 2):
        row = (row + _hash(column, key, round_)) % rows
        column = (column + _hash(row, key, round_ + 1)) % columns
    return row * columns + column


def _hash(values: NDArray[np.uint64], key: int, round_: int) -> NDArray[np.uint64]:
    """44 bits of each value, unrelated between keys and rounds; arithmetic modulo 2**64."""
    mixed = values + np.uint64((key + round_ * _ROUND_STEP) & _MASK)
    mixed ^= mixed >> _SHIFT
    mixed *= _MIX_A
    mixed ^= mixed >> _SHIFT
    mixed *= _MIX_B
    mixed >>= _TOP
    return mixed
