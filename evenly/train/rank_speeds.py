"""How fast the ranks are, measured as a run starts: what shares by speed are dealt by."""

from __future__ import annotations

import time

import torch

from evenly.comm.collectives import gather_values
from evenly.comm.world import World

MEASURED_S, MEASURED_TIMES = 0.1, 5  # the best counts: a moment's load is no device's speed
STEPS_OF_SPEED = 8  # a speed is a multiple of 1 / 8 of the fastest's: equal devices get equal shares


def measured_speeds(world: World) -> list[float]:
    """The speed of each rank of the data axis, the fastest 1, all measured at once; of several devices the slowest's.

    The same on all ranks: all ranks call it.
    """
    position = world.group("data").position
    found = gather_values((position, _products_per_s(world.device)), world.group("files"))
    slowest: dict[int, float] = {}
    for at, rate in found:
        slowest[at] = min(rate, slowest.get(at, rate))
    return rounded([slowest[at] for at in sorted(slowest)])


def rounded(rates: list[float]) -> list[float]:
    """Relative to the largest, as multiples of 1 / `STEPS_OF_SPEED`, at least one of them."""
    return [max(1, round(rate / max(rates) * STEPS_OF_SPEED)) / STEPS_OF_SPEED for rate in rates]


def _products_per_s(device: str) -> float:
    size = 2048 if device.startswith("cuda") else 512
    matrix = torch.ones(size, size, device=device)
    return max(_rate(matrix) for _ in range(MEASURED_TIMES))


def _rate(matrix: torch.Tensor) -> float:
    begin, done = time.perf_counter(), 0
    while time.perf_counter() - begin < MEASURED_S:
        float((matrix @ matrix)[0, 0])  # waits for the device
        done += 1
    return done / (time.perf_counter() - begin)
