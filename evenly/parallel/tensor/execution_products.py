"""How functions of torch compute on the parts of split tensors: products, lookups, attention, losses.

As in `execution`: what is called, what it returns, and when it returns `NotImplemented`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from string import ascii_letters
from typing import Any

import torch
from torch.nn import functional as F

from evenly.comm.collectives import all_gather, all_reduce
from evenly.errors import RunError
from evenly.nn.losses import Reduction, SplitVocabulary, loss_in_chunks, refuse_recorded_backward
from evenly.parallel.tensor.attention import multi_head_attention
from evenly.parallel.tensor.axis import Axis, SplitTensor, is_split
from evenly.parallel.tensor.execution import (
    elementwise,
    from_end,
    of_type,
    own_noise,
    part_for,
    repeat_interleave,
    shape_of,
)
from evenly.parallel.tensor.layout import Layout
from evenly.parallel.tensor.sums_under_products import product_under_sum
from evenly.torch_private import with_torch_function

T = torch.Tensor


# ------------------------------------------------------------------------------------------------------ products
def linear(_: Any, x: T, weight: T, bias: T | None = None) -> Any:
    """x [..., K] by weight [N, K]."""
    if not is_split(weight):
        assert is_split(x) or bias is not None
        if not is_split(x) or x.split_as.dim == x.dim() - 1:
            return NotImplemented
        axis = x.axis
        whole_bias = None if bias is None else axis.enter(bias)
        return axis.split(F.linear(x, axis.enter(weight), whole_bias), x.split_as)
    axis, layout = weight.axis, weight.split_as
    if layout.dim == 0:
        own_bias = None if bias is None else part_for(bias, layout.at(-1), axis)
        result = product_under_sum(x, weight, own_bias, axis) if axis.overlapped else None
        result = F.linear(axis.enter(x, products=True), weight, own_bias) if result is None else result
        return axis.split(result, layout.at(x.dim() - 1))
    own = part_for(x, layout.at(-1), axis)
    summed = axis.rows(F.linear(own, weight))  # type: ignore[arg-type]  # K is never broadcast
    return summed if bias is None else _added(summed, of_type(bias, summed))


def matmul(_: Any, a: T, b: T) -> Any:
    """a [..., M, K] by b [..., K, N], as torch.matmul; dims from the end."""
    if a.dim() < 2 or b.dim() < 2:
        return NotImplemented
    axis = (a if is_split(a) else b).axis  # type: ignore[attr-defined]
    turns = [(a, b, -1, -2), (b, a, -2, -1)]
    if is_split(a) and is_split(b) and a.split_as.dim == a.dim() - 2 and b.dim() == 2:
        turns.reverse()  # rows of an activation and columns of a weight: the activation is gathered
    for one, other, contracted, of_other in turns:
        if not is_split(one):
            continue
        layout = from_end(one)
        if layout.dim == contracted:
            part = part_for(other, layout.at(of_other), axis)
        elif layout.dim >= -2:  # M of a, or N of b
            part = axis.enter(other, products=True)
        else:
            part = part_for(other, layout, axis)
        if part is None:
            return NotImplemented
        result = torch.matmul(one, part) if one is a else torch.matmul(part, one)
        if layout.dim == contracted:
            of_weight = b.dim() == 2 and (a.dim() > 2 or getattr(a, "rows", None))
            return axis.rows(result, _opened(a, result)) if of_weight else axis.total(result)
        return axis.split(result, layout.at(result.dim() + layout.dim))
    return NotImplemented


def grouped_product(func: Any, x: T, weight: T, *, offs: T | None = None, bias: T | None = None, **kwargs: Any) -> Any:
    """x [S, K] by weight [G, K, N]: the group of every row is given by `offs`."""
    if not is_split(weight) or weight.split_as.dim == 0 or (x.dim(), weight.dim()) != (2, 3) or bias is not None:
        return NotImplemented
    axis, layout = weight.axis, weight.split_as
    offs = axis.gather_full(offs) if is_split(offs) else offs
    if layout.dim == 2:
        return axis.split(func(axis.enter(x, products=True), weight, offs=offs, **kwargs), layout.at(1))
    own: Any = part_for(x, layout.at(-1), axis)
    return axis.total(func(own.contiguous(), weight, offs=offs, **kwargs))


def _opened(a: T, result: T) -> tuple[int, ...]:
    """The shape of a product of `a` with a weight before the rows of `a` were flattened."""
    rows: tuple[int, ...] | None = getattr(a, "rows", None)
    return tuple(result.shape) if rows is None else (*rows, result.shape[-1])


def matmul_reversed(func: Any, b: T, a: T) -> Any:
    return matmul(func, a, b)


def add_product(_: Any, input: T, *given: T, beta: float = 1, alpha: float = 1, out: Any = None, **named: T) -> Any:
    """`addmm`, `baddbmm`: beta times a tensor, and alpha times the product of two others."""
    names = ("mat1", "mat2") if "mat1" in named or "mat2" in named else ("batch1", "batch2")
    both = [*given, *(named[name] for name in names if name in named)]
    if out is not None or len(both) != 2 or not any(map(is_split, both)):
        return NotImplemented
    product = matmul(None, *both)
    if product is NotImplemented:
        return NotImplemented
    terms = [(product, alpha), (of_type(input, product), beta)]
    return _added(*(term if factor == 1 else _scaled(term, factor) for term, factor in terms))


def _scaled(a: T, factor: float) -> Any:
    return elementwise(torch.mul, a, factor) if is_split(a) else a * factor


def _added(a: T, b: T) -> Any:
    return elementwise(torch.add, a, b) if is_split(a) or is_split(b) else a + b


def einsum(_: Any, equation: str, *operands: Any) -> Any:
    """Parts of all operands that have the split label; where the output lacks it, the ranks' sums are added up."""
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != len(given):
        return NotImplemented
    terms, output = _without_dots(terms, output, [one.dim() for one in given])
    first = next(n for n, one in enumerate(given) if is_split(one))
    layout, axis = given[first].split_as, given[first].axis
    label = terms[first][layout.dim]
    if any(term.count(label) > 1 for term in terms):
        return NotImplemented  # a diagonal
    parts = [
        part_for(one, layout.at(term.index(label) - len(term)), axis) if label in term else axis.enter(one)
        for one, term in zip(given, terms, strict=True)
    ]
    if any(part is None for part in parts):
        return NotImplemented
    result = torch.einsum(f"{','.join(terms)}->{output}", *parts)
    return axis.split(result, layout.at(output.index(label))) if label in output else axis.total(result)


def _without_dots(terms: Sequence[str], output: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The dims that `...` stands for as labels of their own, the same counted from the right."""
    counts = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]
    free = [letter for letter in ascii_letters if letter not in "".join(terms)][: max(counts)]
    spelled = ["".join(free[len(free) - count :]) for count in counts]
    found = [term.replace("...", dots) for term, dots in zip(terms, spelled, strict=True)]
    return found, output.replace("...", "".join(free))


def embedding(
    _: Any,
    indices: T,
    weight: T,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Rows of weight [V, D] by indices [...]."""
    if is_split(indices) or not is_split(weight):
        return NotImplemented
    axis, layout = weight.axis, weight.split_as
    if max_norm is not None:
        raise RunError(
            "an embedding with max_norm, split over the tensor axis",
            "it changes its weight in the forward pass",
            "leave out max_norm, or keep that weight whole (tensor_exclude=PATTERN in the plan)",
        )
    if layout.dim == 1:
        rows = F.embedding(indices, weight, padding_idx, None, norm_type, scale_grad_by_freq, sparse)
        return axis.split(rows, layout.at(rows.dim() - 1))
    if layout.outer > 1 or scale_grad_by_freq:
        return NotImplemented
    if padding_idx is not None:
        padding_idx %= layout.length
        indices_counted = indices != padding_idx
    else:
        indices_counted = None
    local, elsewhere = _own_indices(indices, layout, axis)
    rows = F.embedding(local, weight, None, None, norm_type, False, sparse)
    if indices_counted is not None:
        rows = torch.where(indices_counted.unsqueeze(-1), rows, rows.detach())  # the gradient stops at padding
    return axis.rows(rows.masked_fill(elsewhere.unsqueeze(-1), 0))


def _own_indices(indices: T, layout: Layout, axis: Axis) -> tuple[T, T]:
    """Indices into this rank's part of a dim, and where another rank has what is meant (0 there).

    One that no rank has stays beyond every part, so that torch refuses it.
    """
    start = sum(layout.sizes[: axis.position])
    local = indices - start
    beyond = (indices < 0) | (indices >= layout.length)
    elsewhere = ((local < 0) | (local >= layout.sizes[axis.position])) & ~beyond
    return local.masked_fill(elsewhere, 0).masked_fill(beyond, layout.length), elsewhere


# ------------------------------------------------------------------------------------------------- attention
def attention(
    func: Any,
    query: T,
    key: T,
    value: T,
    attn_mask: T | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """query [..., H, L, E], key [..., H, S, E], value [..., H, S, V]; split along a dim before the last two, or V."""
    if not (is_split(query) or is_split(key)) and is_split(value) and value.split_as.dim == value.dim() - 1:
        axis, seen = value.axis, None if attn_mask is None else value.axis.enter(attn_mask)
        query, key = axis.enter(query), axis.enter(key)
        mixed = func(query, key, value, seen, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return axis.split(mixed, value.split_as.at(mixed.dim() - 1))
    if not is_split(query) or query.split_as.dim >= query.dim() - 2:
        return NotImplemented
    axis, layout = query.axis, from_end(query)
    groups = shape_of(query)[-3] // shape_of(key)[-3] if enable_gqa else 1
    if groups > 1 and layout.dim == -3:
        parts = [_grouped_part(tensor, layout, groups, axis) for tensor in (key, value)]
        enable_gqa = all(part is not None for part in parts)
        if not enable_gqa:
            repeated = [_repeat(tensor, groups) for tensor in (key, value)]
            parts = [part_for(tensor, layout, axis) for tensor in repeated]
    else:
        parts = [part_for(tensor, layout, axis) for tensor in (key, value)]
    mask = None if attn_mask is None else part_for(attn_mask, layout, axis)
    own_key, own_value = parts
    if own_key is None or own_value is None or (attn_mask is not None and mask is None):
        return NotImplemented
    if dropout_p:
        if query.is_cuda:
            return NotImplemented  # its kernels draw in an order of their own
        if enable_gqa:
            own_key, own_value = (_repeat(part, groups) for part in (own_key, own_value))
        result = _attention_with_dropout(query, own_key, own_value, mask, dropout_p, is_causal, scale)
    else:
        result = func(query, own_key, own_value, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    return axis.split(result, query.split_as)


def _grouped_part(tensor: T, layout: Layout, groups: int, axis: Axis) -> T | None:
    if layout.inner % groups or layout.dim != -3:
        return None
    shared = Layout.of(-3, layout.outer, layout.units, layout.inner // groups, layout.ranks)
    return part_for(tensor, shared, axis)


def _repeat(tensor: T, times: int) -> T:
    """Repeats every head `times` times."""
    if is_split(tensor):
        return repeat_interleave(None, tensor, times, -3)
    return tensor.repeat_interleave(times, -3)


def _attention_with_dropout(
    query: SplitTensor, key: T, value: T, mask: T | None, dropout_p: float, is_causal: bool, scale: float | None
) -> T:
    length, width = key.shape[-2], query.shape[-1]
    weights = query @ key.transpose(-2, -1) * (width**-0.5 if scale is None else scale)
    if is_causal:
        mask = torch.ones(query.shape[-2], length, dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        weights = weights.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else weights + mask
    probabilities = query.axis.split(_rows_of_probabilities(weights), query.split_as)
    return (probabilities * own_noise(probabilities, dropout_p)) @ value


def _rows_of_probabilities(weights: T) -> T:
    """softmax, with rows that may see nothing zero, as torch's attention has them."""
    rows = torch.softmax(weights, -1)
    return rows.masked_fill((weights == -math.inf).all(-1, keepdim=True), 0)


def attention_module(_: Any, *args: Any, **kwargs: Any) -> Any:
    with with_torch_function():
        return multi_head_attention(*args, **kwargs)


# ----------------------------------------------------------------------------------------------------- losses
def cross_entropy(
    _: Any,
    logits: T,
    target: T,
    weight: T | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """logits [N, C, ...] with the classes split, target [N, ...] of classes: no rank sees all logits of a sample."""
    plain = weight is None and label_smoothing == 0 and size_average is None and reduce is None
    if not plain or not is_split(logits) or is_split(target) or target.is_floating_point():
        return NotImplemented
    classes = min(1, logits.dim() - 1)
    if logits.split_as.dim != classes or logits.split_as.outer > 1:
        return NotImplemented
    axis, counted = logits.axis, target != ignore_index
    indices, elsewhere = _own_indices(target.masked_fill(~counted, 0), logits.split_as, axis)
    widened = logits.float() if logits.dtype.itemsize < 4 else logits  # as torch's kernel adds up 16-bit numbers
    scores: T = _CrossEntropy.apply(widened, indices, elsewhere, classes, axis)  # pyright: ignore
    losses = scores.masked_fill(~counted, 0)
    losses = losses if torch.is_autocast_enabled(logits.device.type) else losses.to(logits.dtype)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


def linear_cross_entropy(
    _: Any,
    hidden: T,
    weight: T,
    targets: T,
    *,
    bias: T | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Any:
    """hidden [..., D], targets [...], weight [V, D] with its rows split: no rank has the logits of the others' rows."""
    if not is_split(weight) or weight.split_as.dim != 0 or weight.split_as.outer > 1 or is_split(targets):
        return NotImplemented
    if shape_of(hidden)[:-1] != tuple(targets.shape):
        return NotImplemented  # which is refused
    axis, layout, counted = weight.axis, weight.split_as, targets != ignore_index
    group, alone = axis.group, [1] * axis.group.size
    indices, elsewhere = _own_indices(targets.masked_fill(~counted, 0), layout, axis)
    vocabulary = SplitVocabulary(
        elsewhere=elsewhere.flatten(),
        largest=max(layout.sizes),
        log_sum=lambda own: all_gather(own.unsqueeze(0), group, sizes=alone).logsumexp(0),
        total=lambda losses: all_reduce(losses, group),
    )
    own_bias = None if bias is None else part_for(bias, layout.at(-1), axis)
    plain: list[Any] = [None if one is None else one.view_as(one) for one in (weight, own_bias)]  # for the backward
    given = axis.enter(hidden, products=True)
    return loss_in_chunks(given, plain[0], plain[1], indices, counted, reduction, vocabulary)


class _CrossEntropy(torch.autograd.Function):
    """-log softmax over a split dim at one place of it; saved for the backward is one tensor as large as the logits."""

    @staticmethod
    def forward(ctx: Any, logits: T, indices: T, elsewhere: T, dim: int, axis: Axis) -> T:  # type: ignore[override]
        largest = all_reduce(logits.amax(dim, keepdim=True), axis.group, "max")
        softmax = logits - largest
        places = indices.unsqueeze(dim)
        score = softmax.gather(dim, places).squeeze(dim).masked_fill(elsewhere, 0)
        total = softmax.exp_().sum(dim)
        total, score = all_reduce(torch.stack([total, score]), axis.group).unbind()
        softmax.div_(total.unsqueeze(dim))
        ctx.save_for_backward(softmax, places, elsewhere.unsqueeze(dim))
        ctx.dim = dim
        return total.log_().sub_(score)

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_recorded_backward("cross_entropy over a vocabulary that is split", "use a plan without tensor")
        softmax, places, elsewhere = ctx.saved_tensors
        change = softmax.scatter_add(ctx.dim, places, elsewhere.to(softmax.dtype) - 1)
        return change.mul_(gradients[0].unsqueeze(ctx.dim)), None, None, None, None
