"""The global order is a bijection per epoch, even in its statistics, and costs the same for any dataset."""

from __future__ import annotations

from itertools import permutations
from time import perf_counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenly.data.order import batch_indices, steps_per_epoch

FROZEN_1000 = [993, 903, 951, 955, 846, 627, 616, 455]
FROZEN_1E12 = [430022216703, 532754914662, 387251418591, 885171016028]


def epoch(length: int, *, seed: int = 0, number: int = 0, global_batch: int | None = None) -> list[int]:
    """All indices of one epoch, batch after batch."""
    batch = global_batch or length
    steps = steps_per_epoch(length, batch)
    ordered: list[int] = []
    for step in range(number * steps, (number + 1) * steps):
        ordered += batch_indices(seed=seed, step=step, length=length, global_batch=batch)
    return ordered


def chi_square(observed: np.ndarray) -> float:
    """Deviation of counts that should be equal, in standard deviations."""
    expected, freedom = observed.mean(), observed.size - 1
    statistic = ((observed - expected) ** 2 / expected).sum()
    return (statistic - freedom) / (2 * freedom) ** 0.5


def orders(length: int, seeds: int) -> np.ndarray:
    """(seeds, length) first epochs."""
    return np.array([epoch(length, seed=seed) for seed in range(seeds)])


def test_the_order_of_an_epoch_follows_from_no_batch_size():
    whole = epoch(5000)
    for global_batch in (1, 7, 1000, 1023, 1024, 1025, 3000):
        assert epoch(5000, global_batch=global_batch) == whole


def test_epoch_of_any_small_dataset_holds_every_sample_once():
    for length in range(1, 301):
        assert sorted(epoch(length, seed=length)) == list(range(length))


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 30_000),
    global_batch=st.integers(1, 5_000),
    seed=st.integers(-5, 2**64),
    number=st.integers(0, 3),
)
def test_epoch_holds_every_sample_once_however_it_is_batched(length: int, global_batch: int, seed: int, number: int):
    batch = max(global_batch, length // 50 + 1)
    ordered = epoch(length, seed=seed, number=number, global_batch=batch)
    assert sorted(ordered) == list(range(length))
    assert ordered == epoch(length, seed=seed, number=number)  # whatever the size of the batch
    assert all(type(index) is int for index in ordered)


@settings(max_examples=50, deadline=None)
@given(length=st.integers(10**6, 2**62), seed=st.integers(0, 2**63), place=st.floats(0, 0.999))
def test_batches_of_huge_datasets_are_distinct_and_in_range(length: int, seed: int, place: float):
    step = int(place * steps_per_epoch(length, 1000))
    batch = batch_indices(seed=seed, step=step, length=length, global_batch=1000)
    assert len(set(batch)) == len(batch)
    assert 0 <= min(batch) <= max(batch) < length


def test_last_batch_of_an_epoch_is_short_and_the_next_epoch_begins_after_it():
    sizes = [len(batch_indices(seed=3, step=step, length=10, global_batch=4)) for step in range(6)]
    assert sizes == [4, 4, 2, 4, 4, 2]
    assert steps_per_epoch(10, 4) == 3


def test_without_shuffle_the_order_is_the_datasets_own():
    batches = [batch_indices(seed=1, step=step, length=5, global_batch=2, shuffle=False) for step in range(4)]
    assert batches == [[0, 1], [2, 3], [4], [0, 1]]


def test_epochs_seeds_and_lengths_have_orders_of_their_own():
    keys = [{"seed": 1}, {"seed": 2}, {"seed": 1, "number": 1}, {"seed": 1, "number": 2}]
    assert len({tuple(epoch(50, **key)) for key in keys}) == len(keys)
    assert [index for index in epoch(51, seed=1) if index < 50] != epoch(50, seed=1)


def test_order_never_changes():
    assert batch_indices(seed=7, step=3, length=1000, global_batch=8) == FROZEN_1000
    assert batch_indices(seed=7, step=3, length=10**12, global_batch=4) == FROZEN_1E12


@pytest.mark.parametrize("length", [2, 3, 4, 5, 7, 8, 12, 17])
def test_every_sample_is_equally_often_at_every_position(length: int):
    found = orders(length, 1000)
    counts = np.array([np.bincount(column, minlength=length) for column in found.T])
    assert chi_square(counts) < 5


@pytest.mark.parametrize("length", [3, 4, 5])
def test_every_order_of_a_tiny_dataset_is_equally_likely(length: int):
    found = [tuple(order) for order in orders(length, 1500).tolist()]
    assert chi_square(np.array([found.count(order) for order in permutations(range(length))])) < 5


@pytest.mark.parametrize("length", [8, 9, 12, 30, 100])
def test_neighbours_in_the_order_are_unrelated(length: int):
    found = orders(length, 1000)
    steps = (found[:, 1:] - found[:, :-1]) % length
    assert chi_square(np.bincount(steps.ravel(), minlength=length)[1:]) < 5


def test_a_large_order_looks_random():
    order = np.array(epoch(20_000, seed=5))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(np.arange(len(order)), order)[0, 1]) < 0.03
    quarters = np.array([np.bincount(part // 5000, minlength=4) for part in order.reshape(4, -1)])
    assert abs(quarters - 1250).max() < 150


def test_a_batch_costs_the_same_for_any_dataset():
    began = perf_counter()
    for step in range(100):
        batch_indices(seed=1, step=step * 10**6, length=10**11, global_batch=64)
    assert perf_counter() - began < 2  # anything that walks the dataset takes minutes


@pytest.mark.parametrize(("length", "global_batch"), [(0, 4), (4, 0), (-1, 4)])
def test_sizes_below_one_are_refused(length: int, global_batch: int):
    with pytest.raises(ValueError, match="at least 1"):
        steps_per_epoch(length, global_batch)


def test_a_negative_step_is_refused():
    with pytest.raises(ValueError, match="step -1"):
        batch_indices(seed=0, step=-1, length=4, global_batch=2)
