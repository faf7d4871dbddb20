"""What all ranks must know of a step before its update, in one all-reduce.

One vector of float64 numbers, each filled by one rank only and zero on all others, so that the sum is exact and the
same on every rank: per microbatch its total, its weight and the calls of each normalisation layer; per rank its
devices' memory, the time of its own computing (whole, and by work) and the names of its metrics (`metrics`); the first
rank's clock; whether any rank wants to stop, and whether the job has asked to end the run. In training it is reduced
with the gradients (`Gradients.start_reduce`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter
from typing import Any

import torch

from evenly.comm.collectives import gather_values
from evenly.comm.world import World
from evenly.engine.metrics import MetricCells, MetricSums, as_metrics, joined, joined_metrics, put
from evenly.errors import EvenlyError, PathError, RunError
from evenly.loss import UNDIVIDED, Loss


@dataclass(frozen=True)
class StepTotals:
    """The results of a step over all ranks; lists are by microbatch, `memory_bytes` by device, rank by rank.

    busy_s:  of each rank, what its own computing took, in seconds; 0 where that is not known.
    own_s:   the same per unit of work.
    clock_s: of the first rank, for what all ranks have to decide alike.
    ended:   whether the job has asked to end the run.
    marks:   of each rank, which metrics its losses gave. metrics: by name, where there are any.
    """

    totals: list[float]
    weights: list[float]
    calls: list[list[int]]
    memory_bytes: list[int]
    stop: bool
    own_s: list[float] = field(default_factory=list[float])
    busy_s: list[float] = field(default_factory=list[float])
    clock_s: float = 0.0
    ended: bool = False
    marks: list[float] = field(default_factory=list[float])
    metrics: dict[str, MetricSums] = field(default_factory=dict[str, MetricSums])

    @cached_property
    def weight(self) -> float:
        """Divisor of losses and gradients; 1 for sums."""
        return 1.0 if UNDIVIDED in self.weights else math.fsum(self.weights)

    @cached_property
    def loss(self) -> float:
        """sum(totals) / sum(weights), exactly rounded."""
        add = sum if self.not_finite else math.fsum  # which knows no sum of both infinities
        return add(self.totals) / self.weight

    @property
    def not_finite(self) -> list[int]:
        return [number for number, total in enumerate(self.totals) if not math.isfinite(total)]

    def check(self, step: int) -> None:
        """Raises `RunError`, on all ranks alike, if what divides the losses of `step`, or a metric, cannot."""
        if UNDIVIDED in self.weights and len({*self.weights}) > 1:
            raise RunError(
                f"step {step}: the loss of a step is a mean or a sum",
                "some microbatches return evenly.Sum(total), others evenly.Loss(total, weight)",
                "return one of them for every microbatch",
            )
        for number, (total, weight) in enumerate(zip(self.totals, self.weights, strict=True)):
            if not math.isfinite(weight) or (weight < 0 and weight != UNDIVIDED):
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
        for name, metric in self.metrics.items():
            metric.check(name, f"step {step}")

    @property
    def values(self) -> dict[str, float]:
        return {name: value for name, metric in self.metrics.items() if (value := metric.value) is not None}


def joined_totals(passes: Sequence[StepTotals]) -> StepTotals:
    if len(passes) == 1:
        return passes[0]
    return replace(
        passes[-1],
        totals=[total for one in passes for total in one.totals],
        weights=[weight for one in passes for weight in one.weights],
        calls=[row for one in passes for row in one.calls],
        stop=any(one.stop for one in passes),
        ended=any(one.ended for one in passes),
        busy_s=[sum(of_rank) for of_rank in zip(*(one.busy_s for one in passes), strict=True)],
        metrics=joined_metrics([one.metrics for one in passes]),
    )


class StepTotalsBuilder:
    """Fills this rank's vector, and reads the sum over all ranks; one per pass."""

    def __init__(self, world: World, *, microbatches: int, layers: int = 0, devices: int = 1, first: int = 0) -> None:
        """devices: of each rank. first: the number of the first microbatch."""
        self._world, self._width, self._devices, self._first = world, 2 + layers, devices, first
        self._cells = microbatches * self._width
        self._values = [0.0] * self.size
        self._on_device: dict[int, torch.Tensor] = {}  # by index, numbers on a GPU, which are not read one by one
        self.metrics = MetricCells()
        self._problem: EvenlyError | None = None

    @property
    def size(self) -> int:
        return self._cells + self._world.size * (self._devices + 3) + 3

    def add(self, number: int, loss: Loss | None, calls: list[int]) -> None:
        """Adds the results of microbatch `number` on this rank; loss None: on a pipeline stage without loss."""
        row: list[Any] = [] if loss is None else [loss.total.detach(), loss.weight]
        if loss is not None:
            self.metrics.add(number - self._first, loss)
        for place, value in enumerate([*row, *calls], (number - self._first) * self._width + 2 - len(row)):
            put(self._values, self._on_device, place, value)

    def stop(self, number: int, problem: EvenlyError) -> None:
        """Records that this rank could not run microbatch `number`."""
        self._values[(number - self._first) * self._width + 1] = -math.inf
        self._problem = problem

    def numbers(
        self,
        *,
        memory_bytes: Sequence[int] = (),
        busy_s: float = 0.0,
        own_s: float = 0.0,
        stop: bool = False,
        ended: bool = False,
    ) -> list[float] | torch.Tensor:
        """This rank's vector; a float64 tensor on its GPU if any number is on one.

        memory_bytes: peak of each of this rank's devices, or nothing.
        """
        for place, peak in enumerate(memory_bytes, self._cells + self._world.rank * self._devices):
            self._values[place] = peak
        of_rank = self._cells + self._world.size * self._devices + self._world.rank
        for number, value in enumerate((busy_s, own_s, self.metrics.mark)):
            self._values[of_rank + number * self._world.size] = value
        self._values[-3] = perf_counter() if self._world.rank == 0 else 0.0
        self._values[-2:] = float(stop), float(ended)
        return joined(self._values, self._on_device, self._world.device) if self._on_device else self._values

    def read(self, values: list[float]) -> StepTotals:
        """Reads the sum of all ranks' vectors. Raises `PathError`, on all ranks, for a microbatch that was not run."""
        size = self._world.size
        if -math.inf in values[1 : self._cells : self._width]:
            problems = gather_values(self._problem and self._problem.args, self._world.group("world"))
            raise PathError(*next(filter(None, problems)))
        rows = [values[start : start + self._width] for start in range(0, self._cells, self._width)]
        return StepTotals(
            totals=[row[0] for row in rows],
            weights=[row[1] for row in rows],
            calls=[[round(n) for n in row[2:]] for row in rows],
            memory_bytes=[round(n) for n in values[self._cells : -3 - 3 * size]],
            stop=values[-2] > 0,
            busy_s=list(values[-3 - 3 * size : -3 - 2 * size]),
            own_s=list(values[-3 - 2 * size : -3 - size]),
            clock_s=values[-3],
            ended=values[-1] > 0,
            marks=list(values[-3 - size : -3]),
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
    if not isinstance(result, Loss):
        return Loss(total * samples, samples)
    return Loss(total, loss.weight, as_metrics(loss.metrics) if loss.metrics else {}, loss.outputs)
