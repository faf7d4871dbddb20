"""The sum of an input's gradient over ranks, under way while the gradient of a weight is computed.

The backward of a product gives the gradients of its input and of its weight; that of an input which was entered is
added up over the ranks. autograd runs the nodes that are ready in the reverse of the order in which the forward made
them. So the forward makes four, in this order:

    _WaitForSum      takes the input
    _WeightGradient  takes weight and bias; what it gives has no memory, and is there for its gradient
    _BeginSum        takes what _WaitForSum gave: this is the input as it is entered
    _Product         takes what the last two gave

and the backward runs _Product (gradient of the input), _BeginSum, _WeightGradient, _WaitForSum. Further products of
the same input are torch's own: their gradients of weights come before the sum can begin.

Weights and inputs that a node needs without passing a gradient to them are no arguments of it, so that the graph has no
edge to them: what is saved of them leads there all the same where gradients have gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from evenly.comm import pairs
from evenly.comm.collectives import all_reduce
from evenly.comm.groups import Group
from evenly.comm.transport import Pending
from evenly.parallel.tensor.axis import MULTIPLIED, Axis, is_split
from evenly.torch_private import apply_outside_transforms, version

T = torch.Tensor


def product_under_sum(x: T, weight: T, bias: T | None, axis: Axis) -> T | None:
    """x [..., K], whole, by this rank's part of a weight [N, K]; enters x. None where there is no sum to begin, or no
    gradient of a weight to compute meanwhile.
    """
    known: Any = vars(x).get(MULTIPLIED)
    if is_split(x) or (known is not None and known[0] == version(x)) or not torch.is_grad_enabled():
        return None
    if not (x.requires_grad and weight.requires_grad and x.is_floating_point() and weight.is_contiguous()):
        return None
    kind = x.device.type
    mixed = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    dtype = torch.get_autocast_dtype(kind) if mixed else x.dtype
    summed = _Sum(axis.group)
    waited = _wait(x, summed)
    plain: Any = [None if one is None else one.view_as(one) for one in (weight, bias)]
    cast = [one if one is None or not mixed else one.to(dtype) for one in (x, *plain)]
    shape = (*x.shape[:-1], weight.shape[0])
    of_weight = _weight_gradient(cast[1], cast[2], cast[:1], shape, axis.group)
    entered = _begin(waited, summed)
    if x.grad_fn is not None:  # a leaf outlives the graph
        setattr(x, MULTIPLIED, (version(x), entered))
    return _product(entered.to(dtype) if mixed else entered, of_weight, cast[1:])


@dataclass(eq=False)
class _Sum:
    """Of the gradients of one input; pending: while it is under way."""

    group: Group
    pending: Pending[T] | None = None


class _OfSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: T, summed: _Sum) -> T:  # type: ignore[override]
        ctx.summed = summed
        return x.detach()


class _WaitForSum(_OfSum):
    @staticmethod
    def backward(ctx: Any, *gradients: T) -> Any:
        if ctx.summed.pending is not None:
            ctx.summed.pending.wait()
            ctx.summed.pending = None
        return gradients[0], None


class _BeginSum(_OfSum):
    @staticmethod
    def backward(ctx: Any, *gradients: T) -> Any:
        """Adds up where the gradient lies: products give tensors of their own, and nobody reads it before the wait."""
        if torch.is_grad_enabled():  # gradients have gradients
            return pairs.reduce(gradients[0], ctx.summed.group), None
        ctx.summed.pending = all_reduce.begin(gradients[0], ctx.summed.group)
        return gradients[0], None


class _WeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: T, bias: T | None, x: Sequence[T], shape: Sequence[int], group: Group) -> T:  # type: ignore[override]
        ctx.save_for_backward(*x)
        ctx.group, ctx.has_bias = group, bias is not None
        return torch.empty_strided(shape, [0] * len(shape), dtype=weight.dtype, device=weight.device)

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> Any:
        (x,) = ctx.saved_tensors
        x = pairs.copy(x, ctx.group) if torch.is_grad_enabled() else x
        rows = gradients[0].reshape(-1, gradients[0].shape[-1])
        of_bias = rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[1] else None
        return rows.t() @ x.reshape(-1, x.shape[-1]), of_bias, None, None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: T, of_weight: T, given: Sequence[T | None]) -> T:  # type: ignore[override]
        weight, bias = given
        assert weight is not None
        ctx.save_for_backward(weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> Any:
        (weight,) = ctx.saved_tensors
        rows = gradients[0].reshape(-1, gradients[0].shape[-1])
        return (rows @ weight).view(*gradients[0].shape[:-1], weight.shape[1]), gradients[0], None


_wait, _begin, _weight_gradient, _product = map(
    apply_outside_transforms, (_WaitForSum, _BeginSum, _WeightGradient, _Product)
)
