"""What the losses of the reference come to: sums of totals, weights and metrics, added exactly."""

from __future__ import annotations

import math
from typing import Any

import torch

from evenly.errors import UserError
from evenly.loss import UNDIVIDED, Loss


class LossSums:
    """What the losses of all microbatches of a phase of a step, or of an evaluation, come to."""

    def __init__(self) -> None:
        self.totals: list[float] = []
        self.weights: list[float] = []
        self._pairs: list[dict[str, tuple[float, float]]] = []

    def add(self, loss: Loss) -> None:
        """Adds the loss of a microbatch."""
        self.totals.append(_number(loss.total))
        self.weights.append(_number(loss.weight))
        self._pairs.append({name: (_number(total), _number(count)) for name, (total, count) in loss.metrics.items()})

    @property
    def loss(self) -> float:
        return math.fsum(self.totals) / self.weight

    @property
    def weight(self) -> float:
        """Return what totals and gradients are divided by: 1 for sums."""
        return 1.0 if UNDIVIDED in self.weights else math.fsum(self.weights)

    @property
    def metrics(self) -> dict[str, float]:
        """By name the sum over all microbatches, divided by that of the counts; without those whose count is 0."""
        found: dict[str, float] = {}
        for name in self._pairs[0]:
            sums, counts = ([pairs[name][place] for pairs in self._pairs] for place in (0, 1))
            if math.fsum(counts) != 0:
                found[name] = (math.fsum(sums) if all(map(math.isfinite, sums)) else sum(sums)) / math.fsum(counts)
        return found


def _number(value: Any) -> float:
    return float(value.detach().double() if isinstance(value, torch.Tensor) else value)


def check_finite(step: int, sums: LossSums) -> None:
    """Raises `UserError` for a step that no device can train."""
    asked = f"training step {step} on one device"
    for number, (total, weight) in enumerate(zip(sums.totals, sums.weights, strict=True)):
        if not math.isfinite(total) or not math.isfinite(weight) or 0 > weight != UNDIVIDED:
            found = f"microbatch {number} has the loss {total:g} with weight {weight:g}"
            raise UserError(asked, found, "look for a division by zero or a log of zero; weights are 0 or more")
    if sums.weight == 0:
        raise UserError(asked, "the weight is 0 in every microbatch", "leave out samples that do not count")
