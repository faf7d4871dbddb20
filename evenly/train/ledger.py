"""What all ranks must know of a step before its update, in one sum over ranks.

One vector of float64 numbers, each filled by one rank only and zero on all others, so that the sum is exact and the
same on every rank: per microbatch its total, its weight and the calls of each normalisation layer; per rank its
memory; and whether anybody asks to stop. It is sent before the last backward, which hides it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from evenly.cluster.world import World
from evenly.comm.collectives import Pending, sum_later
from evenly.errors import RunError
from evenly.job import Loss


@dataclass(frozen=True)
class Account:
    """The step as all ranks know it; lists are by microbatch, `memory_bytes` by rank."""

    totals: list[float]
    weights: list[float]
    calls: list[list[int]]
    memory_bytes: list[int]
    stop: bool

    @property
    def weight(self) -> float:
        """Sum of the weights."""
        return math.fsum(self.weights)

    @property
    def loss(self) -> float:
        """sum(totals) / sum(weights); the order of the sum is the microbatches', whoever ran them."""
        return math.fsum(self.totals) / self.weight

    def check(self, step: int) -> None:
        """Raises `RunError`, on all ranks alike, if the loss of `step` is not a finite number."""
        for number, (total, weight) in enumerate(zip(self.totals, self.weights, strict=True)):
            if not math.isfinite(total) or not math.isfinite(weight) or weight < 0:
                raise RunError(
                    f"step {step}: the loss must be finite and its weight finite and not negative",
                    f"microbatch {number} has total {total} and weight {weight:g}",
                    "look for a division by zero, a log of zero, or too high a learning rate",
                )
        if self.weight == 0:
            raise RunError(
                f"step {step}: a loss needs something that counts",
                "the weight is 0 in every microbatch of the batch",
                "leave out samples that do not count, or take a larger global_batch",
            )


class Ledger:
    """Fills the vector on one rank; used once per step."""

    def __init__(self, world: World, *, microbatches: int, layers: int = 0) -> None:
        self._world, self._microbatches, self._layers = world, microbatches, layers
        self._rows: list[tuple[int, torch.Tensor]] = []  # (microbatch, (total, weight, calls...))
        self._vector = torch.empty(0)
        self._pending: Pending | None = None

    def add(self, number: int, loss: Loss, calls: list[int]) -> None:
        """Enters microbatch `number`, run by this rank."""
        numbers = [loss.total.detach(), loss.weight, *calls]
        row = torch.stack([torch.as_tensor(n, dtype=torch.float64, device=self._world.device) for n in numbers])
        self._rows.append((number, row))

    def send(self, *, memory_bytes: int = 0, stop: bool = False) -> None:
        """Begins the sum; every rank calls it once, after its last forward."""
        width = 2 + self._layers
        cells = self._microbatches * width
        host = torch.zeros(cells + self._world.size + 1, dtype=torch.float64)
        host[cells + self._world.rank] = memory_bytes
        host[-1] = float(stop)
        self._vector = host.to(self._world.device)
        if self._rows:
            table = self._vector[:cells].view(self._microbatches, width)
            numbers = torch.tensor([number for number, _ in self._rows], device=self._world.device)
            table[numbers] = torch.stack([row for _, row in self._rows])
        self._pending = sum_later(self._vector, self._world.group("data"))

    def receive(self) -> Account:
        """Waits for the sum."""
        assert self._pending is not None
        self._pending.wait()
        values: list[float] = self._vector.tolist()
        width = 2 + self._layers
        cells = self._microbatches * width
        rows = [values[start : start + width] for start in range(0, cells, width)]
        return Account(
            totals=[row[0] for row in rows],
            weights=[row[1] for row in rows],
            calls=[[round(n) for n in row[2:]] for row in rows],
            memory_bytes=[round(n) for n in values[cells:-1]],
            stop=values[-1] > 0,
        )


def as_loss(result: Any, samples: int) -> Loss:
    """What a job's loss returned, as a `Loss`; a plain scalar is a mean over the microbatch's `samples`."""
    loss = result if isinstance(result, Loss) else Loss(result, samples)
    if not isinstance(loss.total, torch.Tensor) or loss.total.numel() != 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        found = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else f"{result!r:.80}"
        raise RunError(
            "the job's loss must return evenly.Loss(total, weight) or a scalar tensor",
            f"it returned {found}",
            "sum the losses into `total` and count what they cover in `weight`",
        )
    total = loss.total.reshape(())
    return Loss(total, loss.weight) if isinstance(result, Loss) else Loss(total * samples, samples)
