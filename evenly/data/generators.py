"""Applying a stream key to the generators that code draws from: torch's, Python's and numpy's.

torch's state from before is put back on leaving, so that neither a step nor an evaluation disturbs the draws of
the code around it. Python's and numpy's global generators are left where the stream ended: to put them back
takes longer than a small forward pass.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def undisturbed(*devices: str) -> Generator[None]:
    """Within, torch's generators may be seeded at will; on leaving they are as they were."""
    generators = _generators(*devices)
    saved = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, saved, strict=True):
            generator.set_state(state)


def reseed(key: int, device: str = "cpu") -> None:
    """From here on what torch draws on the CPU and on `device` comes from the stream `key`; wants `undisturbed`."""
    torch.default_generator.manual_seed(key)
    if device.startswith("cuda"):
        _gpu_generator(device).manual_seed(key)


def seed(key: int, device: str = "cpu") -> None:
    """As `reseed`, and for what Python and numpy draw too."""
    reseed(key, device)
    random.seed(key)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(key & 0xFFFFFFFF)


def drawn_past_torch() -> bool:
    """Whether Python's or numpy's generator was drawn from since `seed`."""
    fresh = 624  # both stand at the end of a block of so many numbers when they are seeded
    numpy: Any = sys.modules.get("numpy")
    return random.getstate()[1][-1] != fresh or (numpy is not None and numpy.random.get_state()[2] != fresh)


@contextmanager
def seeded(key: int, device: str = "cpu") -> Generator[None]:
    """Within, everything drawn on the CPU and on `device` comes from the stream `key`."""
    with undisturbed(device):
        seed(key, device)
        yield


def _generators(*devices: str) -> list[torch.Generator]:
    return [torch.default_generator, *(_gpu_generator(device) for device in devices if device.startswith("cuda"))]


def _gpu_generator(device: str) -> torch.Generator:
    torch.cuda.init()
    return torch.cuda.default_generators[torch.device(device).index or 0]
