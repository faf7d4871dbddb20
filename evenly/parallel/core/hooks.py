"""Hooks that a model's own code has put on its parameters, which stand under torch's private names."""

from __future__ import annotations

from typing import Any

import torch


def gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether any hook sees, and may change, the gradient of each backward."""
    return bool(_held(parameter, "_backward_hooks"))


def accumulated_hooks(parameter: torch.Tensor) -> bool:
    """Whether any hook sees the gradient after it was added to what is there."""
    return bool(_held(parameter, "_post_accumulate_grad_hooks"))


def _held(parameter: Any, name: str) -> Any:
    return getattr(parameter, name)
