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

import torch


@contextmanager
def seeded(key: int, device: str = "cpu") -> Generator[None]:
    """Within, everything drawn on the CPU and on `device` comes from the stream `key`."""
    generators = [torch.default_generator, *_gpu_generators(device)]
    saved = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(key)
    random.seed(key)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(key & 0xFFFFFFFF)
    try:
        yield
    finally:
        for generator, state in zip(generators, saved, strict=True):
            generator.set_state(state)


def _gpu_generators(device: str) -> list[torch.Generator]:
    if not device.startswith("cuda"):
        return []
    torch.cuda.init()
    return [torch.cuda.default_generators[torch.device(device).index or 0]]
