"""What all ranks must know of a step before its update, in one all-reduce.

One vector of float64 numbers, each filled by one rank only and zero on all others, so that the sum is exact and the
same on every rank: per microbatch its total, its weight and the calls of each normalisation layer; per rank its
devices' memory and the time of its own computing; the first rank's clock; whether any rank wants to stop, and whether
the job has asked to end the run. In training it is reduced with the gradients (`Gradients.start_reduce`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter
from typing import Any

import torch

from evenly.comm.world import World
from evenly.errors import RunError
from evenly.job import Loss


@dataclass(frozen=True)
class StepTotals:
    """The results of a step over all ranks; lists are by microbatch, `memory_bytes` by device, rank by rank.

    own_s:   of each rank, what its own computing took per unit of work, in seconds; 0 where that is not known.
    clock_s: of the first rank, for what all ranks have to decide alike.
    ended:   whether the job has asked to end the run.
    """

    totals: list[float]
    weights: list[float]
    calls: list[list[int]]
    memory_bytes: list[int]
    stop: bool
    own_s: list[float] = field(default_factory=list[float])
    clock_s: float = 0.0
    ended: bool = False

    @cached_property
    def weight(self) -> float:
        return math.fsum(self.weights)

    @cached_property
    def loss(self) -> float:
        """sum(totals) / sum(weights), exactly rounded."""
        add = sum if self.not_finite else math.fsum  # which knows no sum of both infinities
        return add(self.totals) / self.weight

    @property
    def not_finite(self) -> list[int]:
        """The microbatches whose loss is not a finite number."""
        return [number for number, total in enumerate(self.totals) if not math.isfinite(total)]

    def check(self, step: int) -> None:
        """Raises `RunError`, on all ranks alike, if the losses of `step` have no weight that can divide them."""
        for number, (total, weight) in enumerate(zip(self.totals, self.weights, strict=True)):
            if not math.isfinite(weight) or weight < 0:
                raise RunError(
                    f"step {step}: the weight of a loss must be finite and not negative",
                    f"microbatch {number} has total {total} and weight {weight:g}",
                    "look for a division by zero where the weight is computed",
                )
        if self.weight == 0:
            raise RunError(
                f"step {step}: a loss needs something that counts",
                "the weight is 0 in every microbatch of the batch",
                "leave out samples that do not count, or take a larger global_batch",
            )


def joined_totals(passes: Sequence[StepTotals]) -> StepTotals:
    """The totals of a step of these passes, whose microbatches follow one another."""
    if len(passes) == 1:
        return passes[0]
    return replace(
        passes[-1],
        totals=[total for one in passes for total in one.totals],
        weights=[weight for one in passes for weight in one.weights],
        calls=[row for one in passes for row in one.calls],
        stop=any(one.stop for one in passes),
        ended=any(one.ended for one in passes),
    )


class StepTotalsBuilder:
    """Fills this rank's vector, and reads the sum over all ranks; one per pass."""

    def __init__(self, world: World, *, microbatches: int, layers: int = 0, devices: int = 1, first: int = 0) -> None:
        """devices: of each rank. first: the number of the first microbatch."""
        self._world, self._width, self._devices, self._first = world, 2 + layers, devices, first
        self._cells = microbatches * self._width
        self._values = [0.0] * self.size
        self._on_device: dict[int, torch.Tensor] = {}  # by index, numbers on a GPU, which are not read one by one

    @property
    def size(self) -> int:
        """The length of the vector."""
        return self._cells + self._world.size * (self._devices + 1) + 3

    def add(self, number: int, loss: Loss | None, calls: list[int]) -> None:
        """Adds the results of microbatch `number` on this rank; loss None: on a pipeline stage without loss."""
        row: list[Any] = [] if loss is None else [loss.total.detach(), loss.weight]
        start = (number - self._first) * self._width + 2 - len(row)
        for place, value in enumerate([*row, *calls], start):
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                self._on_device[place] = value
            else:
                self._values[place] = float(value)

    def numbers(
        self, *, memory_bytes: Sequence[int] = (), own_s: float = 0.0, stop: bool = False, ended: bool = False
    ) -> list[float] | torch.Tensor:
        """This rank's vector; a float64 tensor on its GPU if any number is on one.

        memory_bytes: peak of each of this rank's devices, or nothing.
        """
        for place, peak in enumerate(memory_bytes, self._cells + self._world.rank * self._devices):
            self._values[place] = peak
        self._values[self._cells + self._world.size * self._devices + self._world.rank] = own_s
        self._values[-3] = perf_counter() if self._world.rank == 0 else 0.0
        self._values[-2:] = float(stop), float(ended)
        if not self._on_device:
            return self._values
        vector = torch.tensor(self._values, dtype=torch.float64).to(self._world.device)
        places = torch.tensor([*self._on_device], device=self._world.device)
        vector[places] = torch.stack([value.double().to(vector.device) for value in self._on_device.values()])
        return vector

    def read(self, values: list[float]) -> StepTotals:
        """Reads the sum of all ranks' vectors."""
        rows = [values[start : start + self._width] for start in range(0, self._cells, self._width)]
        return StepTotals(
            totals=[row[0] for row in rows],
            weights=[row[1] for row in rows],
            calls=[[round(n) for n in row[2:]] for row in rows],
            memory_bytes=[round(n) for n in values[self._cells : -3 - self._world.size]],
            stop=values[-2] > 0,
            own_s=list(values[-3 - self._world.size : -3]),
            clock_s=values[-3],
            ended=values[-1] > 0,
        )


def as_loss(result: Any, samples: int) -> Loss:
    """The result of a job's loss as a `Loss`; a plain scalar is a mean over the microbatch's `samples`."""
    loss = result if isinstance(result, Loss) else Loss(result, samples)
    if not isinstance(loss.total, torch.Tensor) or loss.total.numel() != 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        found = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else f"{result!r:.80}"
        if isinstance(result, Loss):
            found += ", whose total is no tensor of one element"
        raise RunError(
            "the job's loss must return evenly.Loss(total, weight) or a scalar tensor",
            f"it returned {found}",
            "sum the losses into `total`, a tensor (no .item()), and count what they cover in `weight`",
        )
    if isinstance(loss.weight, torch.Tensor) and loss.weight.requires_grad:
        raise RunError(
            "the weight of a loss says how much counts",
            "it has a gradient: it depends on the model's parameters",
            "detach it, or make what it stands for a part of `total`",
        )
    total = loss.total.reshape(())
    return Loss(total, loss.weight) if isinstance(result, Loss) else Loss(total * samples, samples)
