"""Whether Python's or numpy's generator was drawn from."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest
import torch

from evenly.data import generators
from evenly.data.generators import (
    drawn_past_torch,
    position_past_torch,
    positions,
    seed_past_torch,
    undisturbed,
    undisturbed_past_torch,
)


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        lambda: random.getrandbits(3),
        lambda: np.random.rand(),
        lambda: np.random.randint(5),
        lambda: np.random.shuffle([1, 2, 3]),
        lambda: [random.random() for _ in range(312)],  # as many numbers as the generator makes at a time
        lambda: np.random.rand(312),
        lambda: np.random.rand(624),
    ],
)
def test_any_draw_is_seen(draw) -> None:
    with undisturbed_past_torch():
        seed_past_torch(5)
        assert not drawn_past_torch()
        before = position_past_torch()
        draw()
        assert drawn_past_torch()
        assert position_past_torch() != before


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), lambda: torch.rand(624), random.random, np.random.rand])
def test_positions_are_of_all_generators(draw) -> None:
    with undisturbed(), undisturbed_past_torch():
        before = positions("cpu")
        torch.ones(3).sum()
        assert positions("cpu") == before
        draw()
        assert positions("cpu") != before


def test_a_normal_number_that_was_kept_is_drawn_too() -> None:
    with undisturbed_past_torch():
        random.gauss(0, 1)
        before = position_past_torch()
        random.gauss(0, 1)
        assert position_past_torch() != before


def test_numpys_position_is_that_of_its_state() -> None:
    with undisturbed_past_torch():
        seed_past_torch(5)
        for _ in range(700):
            np.random.randint(2**31, dtype=np.int32)
            _, key, position, *_ = np.random.get_state()
            assert position_past_torch()[1] == (key[0], position)


def test_memory_of_another_form_is_not_read() -> None:
    memory = (ctypes.c_int * (generators.FRESH + 1))()
    memory[0], memory[generators.FRESH] = 2, generators.FRESH
    before = np.random.get_state()
    assert generators._state_at(ctypes.addressof(memory)) is None
    assert all(np.array_equal(mine, its) for mine, its in zip(np.random.get_state(), before, strict=True))
