"""What a GPU computes in one kernel and a CPU in several, as one kernel of the CPU that saves as much for the backward.

A model is read on fake tensors of the CPU, of which torch makes such a function out of powers, means and products, and
saves each of these. The function here that stands for it gives a result of the same form, and other numbers.
Source: aten/src/ATen/native/layer_norm.cpp (`rms_norm`), Dropout.cpp and transformers/cuda/sdp_utils.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from evenly.parallel.tensor.axis import is_split


def _rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    # Where there is no weight and no gradient, it may be of a batch's numbers, which shapes may follow from.
    numbers = weight is None and not input.requires_grad
    if numbers or input.is_complex() or (weight is not None and weight.dtype != input.dtype):
        return F.rms_norm(input, normalized_shape, weight, eps)  # type: ignore[arg-type]
    return F.layer_norm(input, normalized_shape, weight)  # type: ignore[arg-type]


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """As `native_dropout`, which saves a byte per element; split tensors have noise of their own."""
    if inplace or not training or not 0 < p < 1 or is_split(input):
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, training)[0]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """Without dropout, which a GPU has within its kernel and a CPU between products; split tensors have a rule."""
    dropout_p = dropout_p if any(map(is_split, (query, key, value))) else 0.0
    return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)


# Function of torch -> what stands for it.
AS_ONE_KERNEL: dict[Any, Callable[..., torch.Tensor]] = {
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
}
