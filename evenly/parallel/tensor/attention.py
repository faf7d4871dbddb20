"""`torch.nn.functional.multi_head_attention_forward` as the calls that it is made of, in which its heads can be seen.

To whoever intercepts torch's functions that function is one call, and heads are nothing that its arguments have. Here
it is written out, from its documentation, so that `trace` finds what can be split, and split tensors are computed with
part by part. Random numbers are drawn as torch draws them: in the same order, for tensors of as many elements.

    L, S    length of queries, of keys and values
    B       batch size; 1 for inputs without a batch dim
    H, D    heads, and the width of one; E = H * D
"""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional as F

T = torch.Tensor


SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def multi_head_attention(*args: Any, **kwargs: Any) -> Any:
    """What torch's function returns for these arguments; `NotImplemented` where keys are added, or would not fit.

    query [L, B, E], key [S, B, K], value [S, B, V], or all without B; to the output [L, B, out] and, if
    `need_weights`, the weights [B, L, S] or [B, H, L, S].
    """
    bound = SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    a = SimpleNamespace(**bound.arguments)
    inputs: tuple[T, T, T] = (a.query, a.key, a.value)
    if a.add_zero_attn or any(one is not None for one in (a.bias_k, a.bias_v, a.static_k, a.static_v)):
        return NotImplemented
    if not _fit(inputs, a.embed_dim_to_check, a.num_heads, a.use_separate_proj_weight):
        return NotImplemented
    if not _masks_fit(inputs, a.num_heads, a.attn_mask, a.key_padding_mask) or (a.is_causal and a.attn_mask is None):
        return NotImplemented
    of_each = (a.q_proj_weight, a.k_proj_weight, a.v_proj_weight)
    weights = of_each if a.use_separate_proj_weight else a.in_proj_weight
    q, k, v = (_heads(x, a.num_heads) for x in _projected(inputs, weights, a.in_proj_bias))
    dropout_p = a.dropout_p if a.training else 0.0
    by_hint = a.is_causal and a.key_padding_mask is None and not a.need_weights
    mask = _added(None if by_hint else a.attn_mask, a.key_padding_mask, q)
    if a.need_weights:
        mixed, seen = _with_weights(q, k, v, mask, dropout_p)
    else:
        mixed, seen = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, by_hint), None
    out = F.linear(mixed.transpose(1, 2).flatten(2), a.out_proj_weight, a.out_proj_bias)  # [B, L, out]
    out = out.transpose(0, 1).contiguous() if a.query.dim() == 3 else out.squeeze(0)
    if seen is None:
        return out, None
    seen = seen if a.query.dim() == 3 else seen.squeeze(0)
    return out, seen.mean(dim=-3) if a.average_attn_weights else seen


def _fit(inputs: tuple[T, T, T], width: int, heads: int, separate: bool) -> bool:
    """Whether torch's function takes inputs of these shapes; where it does not, its errors are its own."""
    query, key, value = inputs
    if not query.dim() == key.dim() == value.dim() or query.dim() not in (2, 3):
        return False
    if query.shape[-1] != width or width % heads:
        return False
    return key.shape[:-1] == value.shape[:-1] if separate else key.shape == value.shape


def _masks_fit(inputs: tuple[T, T, T], heads: int, attn_mask: T | None, key_padding_mask: T | None) -> bool:
    """Whether they are of a type and a shape that torch's function takes."""
    (length, *batch), (keys, *_) = inputs[0].shape[:-1], inputs[1].shape[:-1]
    rows = math.prod(batch)
    masks = [mask for mask in (attn_mask, key_padding_mask) if mask is not None]
    if any(mask.dtype != torch.bool and not mask.is_floating_point() for mask in masks):
        return False
    if attn_mask is not None and attn_mask.shape not in ((length, keys), (rows * heads, length, keys)):
        return False
    return key_padding_mask is None or key_padding_mask.shape == (*batch, keys)


def _projected(inputs: tuple[T, T, T], weights: Any, bias: T | None) -> tuple[T, ...]:
    """Queries, keys and values, [..., E] each; `weights` are three, or one that packs them as `bias` does."""
    query, key, value = inputs
    if isinstance(weights, T) and query is key and key is value:
        return F.linear(query, weights, bias).chunk(3, dim=-1)
    of_each = weights.chunk(3) if isinstance(weights, T) else weights
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return tuple(F.linear(x, weight, one) for x, weight, one in zip(inputs, of_each, biases, strict=True))


def _heads(x: T, heads: int) -> T:
    """[L, B, E] or [L, E] as [B, H, L, D]."""
    opened = x.unflatten(-1, (heads, x.shape[-1] // heads))
    return (opened if opened.dim() == 4 else opened.unsqueeze(1)).permute(1, 2, 0, 3)


def _added(attn_mask: T | None, key_padding_mask: T | None, q: T) -> T | None:
    """Both masks as what is added to the products of q [B, H, L, D] with keys: [L, S], or [B, 1 or H, 1 or L, S]."""
    masks: list[T] = []
    if attn_mask is not None:
        masks.append(attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, q.shape[:2]))
    if key_padding_mask is not None:
        masks.append(key_padding_mask.view(q.shape[0], 1, 1, -1))
    added = [
        torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -math.inf) if mask.dtype == torch.bool else mask
        for mask in masks
    ]
    return sum(added[1:], added[0]) if added else None


def _with_weights(q: T, k: T, v: T, mask: T | None, dropout_p: float) -> tuple[T, T]:
    """The attention of q, k, v [B, H, L or S, D], and its weights [B, H, L, S] after dropout."""
    scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    if dropout_p > 0:
        weights = F.dropout(weights, dropout_p)
    return weights @ v, weights
