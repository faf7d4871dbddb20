"""Seeds the global generators of torch, Python and numpy from a stream key.

torch's previous state is restored on exit, so that neither a step nor an evaluation changes the random numbers of the
code around it. Python's and numpy's generators are not restored: that takes longer than a small forward pass.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

FRESH = 624  # position of a Mersenne Twister that was just seeded: of the numbers that it makes at a time


@contextmanager
def undisturbed(*devices: str) -> Generator[None]:
    """Restores the state of torch's generators on exit."""
    generators = _generators(*devices)
    saved = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, saved, strict=True):
            generator.set_state(state)


def reseed(key: int, device: str = "cpu") -> None:
    """Seeds torch's generators of the CPU and of `device` from the stream `key`; use within `undisturbed`."""
    torch.default_generator.manual_seed(key)
    if device.startswith("cuda"):
        _gpu_generator(device).manual_seed(key)


def last_seed() -> int:
    """The key that torch's generator of the CPU was last seeded from, or was when its state was saved."""
    return torch.default_generator.initial_seed()


def seed(key: int, device: str = "cpu") -> None:
    """As `reseed`, and also seeds Python's and numpy's generators."""
    reseed(key, device)
    seed_past_torch(key)


def seed_past_torch(key: int) -> None:
    """Seeds Python's and numpy's generators from the stream `key`."""
    random.seed(key)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(key & 0xFFFFFFFF)


def drawn_past_torch() -> bool:
    """Whether Python's or numpy's generator was drawn from since `seed`."""
    return position_past_torch() != (FRESH, FRESH)


def position_past_torch() -> tuple[int, int]:
    """Where Python's and numpy's generators are; the same twice where nothing was drawn between."""
    numpy: Any = sys.modules.get("numpy")
    return random.getstate()[1][-1], FRESH if numpy is None else _numpys_position(numpy)


def _numpys_position(numpy: Any) -> int:
    """As `numpy.random.get_state()[2]`, which takes 40 us: every microbatch of a stage asks."""
    position = _position_at(numpy.random.get_bit_generator().ctypes.state_address)
    return numpy.random.get_state()[2] if position is None else position.value


@cache
def _position_at(address: int) -> ctypes.c_int | None:
    """The position of numpy's generator in its own memory, behind `FRESH` numbers; None where it is elsewhere."""
    numpy: Any = sys.modules["numpy"]
    position, state = ctypes.c_int.from_address(address + FRESH * 4), numpy.random.get_state()
    try:
        for moved in (1, FRESH):  # two places, so that no other number there is taken for it
            numpy.random.set_state((*state[:2], moved, *state[3:]))
            if position.value != moved:
                return None
        return position
    finally:
        numpy.random.set_state(state)


@contextmanager
def undisturbed_past_torch() -> Generator[None]:
    """Restores the state of Python's and numpy's generators on exit."""
    numpy: Any = sys.modules.get("numpy")
    state, state_of_numpy = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(state_of_numpy)


@contextmanager
def seeded(key: int, device: str = "cpu") -> Generator[None]:
    """Within, all random numbers of the CPU and of `device` come from the stream `key`."""
    with undisturbed(device):
        seed(key, device)
        yield


def _generators(*devices: str) -> list[torch.Generator]:
    return [torch.default_generator, *(_gpu_generator(device) for device in devices if device.startswith("cuda"))]


def _gpu_generator(device: str) -> torch.Generator:
    torch.cuda.init()
    return torch.cuda.default_generators[torch.device(device).index or 0]
