"""Padding in torch's encoder, whose layers are split: zeros where whole layers would have put them.

In evaluation `nn.TransformerEncoder` leaves padded positions out of what it computes where it can, and puts zeros there
in the end. It does so by a nested tensor, which split layers cannot take. They compute with all positions, and the
zeros are put behind the last of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

T = torch.Tensor


class PaddingZeroed:
    """Makes `encoder` put zeros where it did, until it is closed."""

    def __init__(self, encoder: nn.TransformerEncoder) -> None:
        self._encoder, self._hidden = encoder, None
        encoder.use_nested_tensor = False
        self._handles = [
            encoder.register_forward_pre_hook(self._begin, with_kwargs=True),
            encoder.layers[-1].register_forward_hook(self._end),
        ]

    def _begin(self, encoder: Any, args: Any, kwargs: Any) -> None:
        self._hidden = left_out(encoder, *args, **kwargs)

    def _end(self, _: nn.Module, __: Any, output: T) -> T | None:
        hidden, self._hidden = self._hidden, None
        return None if hidden is None else output.masked_fill(hidden.unsqueeze(-1), 0)

    def close(self) -> None:
        """Gives the encoder back as it was."""
        self._encoder.use_nested_tensor = True
        for handle in self._handles:
            handle.remove()


def left_out(
    encoder: nn.TransformerEncoder,
    src: T,
    mask: T | None = None,
    src_key_padding_mask: T | None = None,
    is_causal: bool | None = None,
) -> T | None:
    """The padded positions [B, S] that torch's encoder, were it whole, would leave out; None where it would not."""
    first: Any = encoder.layers[0]
    if src_key_padding_mask is None or mask is not None or src.dim() != 3 or first.training:
        return None
    if not torch.backends.mha.get_fastpath_enabled() or torch.is_autocast_enabled():
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (src, *first.parameters())):
        return None
    hidden = src_key_padding_mask if src_key_padding_mask.dtype == torch.bool else src_key_padding_mask != 0
    shown_behind_hidden = hidden[:, :-1] & ~hidden[:, 1:]
    return None if bool(shown_behind_hidden.any()) else hidden
