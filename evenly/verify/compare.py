"""Compares two computations: how large the difference is, and which tensor differs first.

A difference is the largest |a - b| of a tensor over the larger of 1 and its largest |b|: relative for large values,
absolute for small ones, where rounding of a gradient that is truly zero can be as large as the parameter itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

# Largest difference that counts as rounding. None: reported, not judged, because Adam turns the rounding of a
# gradient near zero into full steps.
LOSS_TOLERANCE = {
    "float64": 1e-9,
    "float32": 1e-5,
    "bfloat16": 1e-2,
    "float16": 1e-2,
    "pure-bfloat16": 5e-2,  # the sum of losses itself has 8 bits
    "pure-float16": 1e-2,
}
# For a model that casts to a narrower dtype itself, where a plan sums in another order before the cast.
DOWNCAST_TOLERANCE = 1e-5
# Rounding of parameters changes the norm of all gradients little; a wrong sum changes it much.
NORM_TOLERANCE = dict.fromkeys(LOSS_TOLERANCE, 1e-1) | {"float64": 1e-9, "float32": 1e-2}
PARAM_TOLERANCE: dict[str, float | None] = dict.fromkeys(LOSS_TOLERANCE) | {"float64": 1e-9}


def difference(found: torch.Tensor | float, expected: torch.Tensor | float) -> float:
    """How far `found` is from `expected` (same shape); infinite where one is not finite and the other is."""
    a, b = _float64(found), _float64(expected)
    if a.shape != b.shape:
        return math.inf
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    worst = float((a - b).abs().max() / b.abs().max().clamp(min=1.0))
    return math.inf if math.isnan(worst) else worst


def _float64(value: torch.Tensor | float) -> torch.Tensor:
    """In float64, on the CPU; a Python number would become float32 otherwise."""
    return torch.as_tensor(value, dtype=torch.float64).cpu()


def differing_elements(found: torch.Tensor, expected: torch.Tensor) -> int:
    """Number of elements whose bits differ."""
    a, b = found.detach().cpu().contiguous(), expected.contiguous()
    if a.shape != b.shape or a.dtype != b.dtype:
        return max(a.numel(), b.numel())
    size = a.element_size()
    as_bytes = (a.flatten().view(torch.uint8) != b.flatten().view(torch.uint8)).view(-1, size)
    return int(as_bytes.any(dim=1).sum())


@dataclass
class RankComparison:
    """The comparison on one rank; differences are the largest over all steps so far."""

    dtype: str
    rank: int
    loss_diff: float = 0.0
    grad_norm_diff: float = 0.0
    param_diff: float = 0.0
    worst_param: str = ""
    bits_differ: int | None = None
    sharded: float = 0.0
    downcast: str = ""  # narrower dtype that the model casts to, if that decides the rounding
    first: tuple[int, int, str, float] | None = None  # (step, order within the step, what, difference)
    compared: int = 0  # values

    def add_loss(self, step: int, found: float, expected: float, *, what: str = "loss") -> None:
        """Compares a loss; `what` names it in the reason."""
        diff = difference(found, expected)
        self.loss_diff = max(self.loss_diff, diff)
        self._judge(step, 0, what, diff, self._tolerance(LOSS_TOLERANCE))

    def add_grad_norm(self, step: int, found: float, expected: float) -> None:
        """Compares the norm of the batch's gradient."""
        both_overflow = not math.isfinite(found) and not math.isfinite(expected)  # a step that float16 skips
        diff = 0.0 if both_overflow else difference(found, expected)
        self.grad_norm_diff = max(self.grad_norm_diff, diff)
        self._judge(step, 1, "grad_norm", diff, self._tolerance(NORM_TOLERANCE))

    def add_tensors(self, step: int, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
        """Compares parameters and buffers by name; a name on one side only is infinitely far."""
        for order, name in enumerate(sorted(found.keys() | expected.keys())):
            both = name in found and name in expected
            diff = difference(found[name], expected[name]) if both else math.inf
            if diff > self.param_diff or not self.worst_param:
                self.param_diff, self.worst_param = max(diff, self.param_diff), name
            self._judge(step, 2 + order, name, diff, self._tolerance(PARAM_TOLERANCE))

    def add_bits(self, step: int, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
        """Counts the elements whose bits differ, of which there must be none."""
        for order, name in enumerate(sorted(expected)):
            count = differing_elements(found[name], expected[name])
            self.bits_differ = (self.bits_differ or 0) + count
            self._judge(step, 2 + order, f"elements of {name} with different bits", count, 0)

    def _tolerance(self, known: Mapping[str, float | None]) -> float | None:
        tolerance = known[self.dtype]
        return tolerance if tolerance is None or not self.downcast else max(tolerance, DOWNCAST_TOLERANCE)

    def _judge(self, step: int, order: int, what: str, diff: float, tolerance: float | None) -> None:
        self.compared += 1
        if self.first is None and tolerance is not None and not diff <= tolerance:
            self.first = (step, order, what, diff)


@dataclass(frozen=True)
class Row:
    """The verdict on one plan; `world` counts its devices, `status` is equal, different, unsupported or error."""

    plan: str
    world: int
    status: str
    loss_diff: float | None = None
    grad_norm_diff: float | None = None
    param_diff: float | None = None
    worst_param: str | None = None
    sharded: float | None = None
    bits_differ: int | None = None
    reason: str = ""


def judge(plan: str, comparisons: list[RankComparison]) -> Row:
    """The row of `plan` from all ranks' comparisons; the reason names the first difference: step, rank and size."""
    worst = max(comparisons, key=lambda comparison: comparison.param_diff)
    faults = [(comparison.first, comparison.rank) for comparison in comparisons if comparison.first is not None]
    downcast = next((comparison.downcast for comparison in comparisons if comparison.downcast), "")
    reason = f"the model itself computes in {downcast}: tolerance {DOWNCAST_TOLERANCE:g}" if downcast else ""
    if faults:
        (step, _, what, diff), rank = min(faults)
        reason = f"first difference: {what} at step {step} on rank {rank}, {diff:.3g}"
    bits = [comparison.bits_differ for comparison in comparisons if comparison.bits_differ is not None]
    return Row(
        plan=plan,
        world=len(comparisons),
        status="different" if faults else "equal",
        loss_diff=max(comparison.loss_diff for comparison in comparisons),
        grad_norm_diff=max(comparison.grad_norm_diff for comparison in comparisons),
        param_diff=worst.param_diff,
        worst_param=worst.worst_param,
        sharded=max(comparison.sharded for comparison in comparisons),
        bits_differ=max(bits) if bits else None,
        reason=reason,
    )
