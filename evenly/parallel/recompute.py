"""Recomputation: activations of a block are not kept for the backward but computed anew there.

`full` keeps what goes into a block; `selective` also what its matrix products and its attention give, which cost most
to compute. The second forward draws the same random numbers as the first, and leaves no trace in running statistics: it
runs outside of `RunningStatistics.recording`.

Order: before parameters are cut over ranks, whose hooks must lie around the block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from evenly.errors import PlanError
from evenly.model.blocks import find_blocks

_aten = torch.ops.aten
KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}


class Recomputation:
    """Makes the blocks of `model` recompute, in place; `close` undoes it. Raises `PlanError` where there are none."""

    def __init__(self, model: nn.Module, *, selective: bool) -> None:
        self._modules = [block.module for block in find_blocks(model)]
        if not self._modules:
            raise PlanError(
                f"recompute={'selective' if selective else 'full'}",
                "the model has no repeated blocks",
                "use recompute=none, or put its layers into a ModuleList",
            )
        how: dict[str, Any] = {"use_reentrant": False}
        if selective:
            how["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        for module in self._modules:
            module.forward = _recomputing(module.forward, how)

    def close(self) -> None:
        """Gives the blocks their own forward back."""
        for module in self._modules:
            del module.forward


def _recomputing(forward: Callable[..., Any], how: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **how, **kwargs)

    return run


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
