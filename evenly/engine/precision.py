"""Precision as data, and float16's loss scale.

float32 and bfloat16 need no scale, and the pure types, whose sums of gradients could not hold a scaled one, have none.
With float16 the loss is multiplied by a power of two before the backward pass,
so that small gradients do not vanish; a step whose summed gradient is not finite is skipped and the scale halved.
The sum over ranks is the same everywhere, so all ranks, and all plans, skip the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from evenly.data.nest import map_tensors
from evenly.engine.gpu_autocast import AsOnGpu

# Dtype of weights, gradients and optimizer state; with other precisions they keep the dtype that the job gives them.
WEIGHTS = {"float64": torch.float64, "pure-bfloat16": torch.bfloat16, "pure-float16": torch.float16}
AUTOCAST_DTYPE = {"bfloat16": torch.bfloat16, "float16": torch.float16}

LARGEST_SCALE = 2.0**16
SMALLEST_SCALE = 2.0**-24
STEPS_BEFORE_GROWTH = 2000


@dataclass(frozen=True)
class LossScale:
    """The factor on the loss and the number of clean steps since it last changed."""

    factor: float = 1.0
    clean_steps: int = 0

    def after(self, *, finite: bool) -> LossScale:
        """The scale for the next step: halved after an overflow, doubled after 2,000 clean steps."""
        if not finite:
            return LossScale(max(self.factor / 2, SMALLEST_SCALE))
        if self.clean_steps + 1 == STEPS_BEFORE_GROWTH:
            return LossScale(self.factor * 2)
        return LossScale(self.factor, self.clean_steps + 1)


def first_scale(precision: str, global_batch: int) -> LossScale:
    """Where a run starts: a loss is a sum over the batch, hence a larger batch starts with a smaller scale."""
    if precision != "float16":
        return LossScale()
    return LossScale(max(1.0, LARGEST_SCALE / 2 ** math.ceil(math.log2(global_batch))))


def autocast(precision: str, device: str) -> AbstractContextManager[Any]:
    """A context for forward passes: bfloat16 and float16 compute in that dtype from float32 weights."""
    if (dtype := AUTOCAST_DTYPE.get(precision)) is None:
        return nullcontext()
    return torch.autocast(torch.device(device).type, dtype=dtype)


@contextmanager
def autocast_as_on(device: str, precision: str) -> Generator[None]:
    """`autocast` of tensors of the CPU, with which functions do what they would on a `device` of this type."""
    with autocast(precision, "cpu"), functions_as_on(device):
        yield


def functions_as_on(device: str) -> AbstractContextManager[object]:
    """Within, functions of fake tensors of the CPU save what they would on a `device` of this type.

    Wherever autocast is on, they have the types of that device: a backward in which parts of a forward are computed
    again turns it on for these.
    """
    return AsOnGpu() if device == "cuda" else nullcontext()


def place_model(model: torch.nn.Module, precision: str, device: str | None) -> torch.nn.Module:
    """`model` on `device`, or where it is; float64 and the pure precisions have their type throughout."""
    return model.to(device, WEIGHTS.get(precision))


def place_batch(batch: Any, precision: str, device: str) -> Any:
    """Every tensor of `batch` (any nest) on `device`; floating ones in the type of the weights where that is stated."""
    if device == "cpu" and precision not in WEIGHTS:
        return batch  # as it was read

    def place(tensor: torch.Tensor) -> torch.Tensor:
        dtype = WEIGHTS.get(precision, tensor.dtype) if tensor.is_floating_point() else tensor.dtype
        return tensor.to(device, dtype, non_blocking=True)

    return map_tensors(place, batch)
