"""Sums of numbers of one type in a wider one."""

from __future__ import annotations

import numpy as np
import torch


def add(total: torch.Tensor, more: torch.Tensor) -> None:
    """total += more. torch first makes a copy of `more` in the wider type, numpy converts as it goes."""
    if more.dtype is torch.float32 and total.dtype is torch.float64 and not more.is_cuda:
        with np.errstate(invalid="ignore"):  # a gradient that overflowed is found by its norm
            np.add(total.numpy(), more.numpy(), out=total.numpy())
    else:
        total.add_(more)
