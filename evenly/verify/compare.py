"""Two computations held against each other: how far apart, and which tensor first.

A difference is the largest |a - b| of a tensor over the larger of 1 and its largest |b|: relative for large values,
absolute for small ones, where rounding of a gradient that is truly zero can be as large as the parameter itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

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
# Of a model that computes in a narrower type itself, where a plan adds up in another order before it does.
DOWNCAST_TOLERANCE = 1e-5
# A parameter that rounding has pushed elsewhere moves the norm of all gradients little; a wrong sum moves it far.
NORM_TOLERANCE = dict.fromkeys(LOSS_TOLERANCE, 1e-1) | {"float64": 1e-9, "float32": 1e-2}
PARAM_TOLERANCE: dict[str, float | None] = dict.fromkeys(LOSS_TOLERANCE) | {"float64": 1e-9}


def difference(found: torch.Tensor | float, expected: torch.Tensor | float) -> float:
    """How far `found` is from `expected` (same shape); infinite where one is not finite and the other is."""
    a, b = _wide(found), _wide(expected)
    if a.shape != b.shape:
        return math.inf
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    worst = float((a - b).abs().max() / b.abs().max().clamp(min=1.0))
    return math.inf if math.isnan(worst) else worst


def _wide(value: torch.Tensor | float) -> torch.Tensor:
    """In float64, on the CPU; of a Python number torch would make a float32."""
    return torch.as_tensor(value, dtype=torch.float64).cpu()


def differing_elements(found: torch.Tensor, expected: torch.Tensor) -> int:
    """How many elements have other bits."""
    a, b = found.detach().cpu().contiguous(), expected.contiguous()
    if a.shape != b.shape or a.dtype != b.dtype:
        return max(a.numel(), b.numel())
    size = a.element_size()
    as_bytes = (a.flatten().view(torch.uint8) != b.flatten().view(torch.uint8)).view(-1, size)
    return int(as_bytes.any(dim=1).sum())


@dataclass
class RankComparison:
    """What one rank found, step by step; the differences are the largest so far."""

    dtype: str
    rank: int
    loss_diff: float = 0.0
    grad_norm_diff: float = 0.0
    param_diff: float = 0.0
    worst_param: str = ""
    bits_differ: int | None = None
    sharded: float = 0.0
    downcast: str = ""  # the type, narrower than `dtype`, that the model computes in, where it decides the rounding
    first: tuple[int, int, str, float] | None = None  # (step, order within the step, what, difference)
    seen: int = field(default=0)  # values compared

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
            self._judge(step, 2 + order, f"elements of {name} with other bits", count, 0)

    def _tolerance(self, known: Mapping[str, float | None]) -> float | None:
        tolerance = known[self.dtype]
        return tolerance if tolerance is None or not self.downcast else max(tolerance, DOWNCAST_TOLERANCE)

    def _judge(self, step: int, order: int, what: str, diff: float, tolerance: float | None) -> None:
        self.seen += 1
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


def judge(plan: str, traces: list[RankComparison]) -> Row:
    """One row from what every rank found; the reason names the first difference with its step, rank and size."""
    worst = max(traces, key=lambda trace: trace.param_diff)
    faults = [(trace.first, trace.rank) for trace in traces if trace.first is not None]
    downcast = next((trace.downcast for trace in traces if trace.downcast), "")
    reason = f"the model itself computes in {downcast}: held to {DOWNCAST_TOLERANCE:g}" if downcast else ""
    if faults:
        (step, _, what, diff), rank = min(faults)
        reason = f"first difference: {what} at step {step} on rank {rank}, {diff:.3g}"
    bits = [trace.bits_differ for trace in traces if trace.bits_differ is not None]
    return Row(
        plan=plan,
        world=len(traces),
        status="different" if faults else "equal",
        loss_diff=max(trace.loss_diff for trace in traces),
        grad_norm_diff=max(trace.grad_norm_diff for trace in traces),
        param_diff=worst.param_diff,
        worst_param=worst.worst_param,
        sharded=max(trace.sharded for trace in traces),
        bits_differ=max(bits) if bits else None,
        reason=reason,
    )
