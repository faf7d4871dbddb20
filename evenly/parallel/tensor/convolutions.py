"""Layers of images and sounds, for the derivation and on parts: convolutions, norms of channels, pools.

Channels are dim 1, as torch has them. A convolution is a product summed over the channels of its input; in groups each
has channels of its own, and only groups are dealt to ranks. Positions are never split.

    N       batch size
    C, O    channels of the input and of the output
    G       groups of a convolution: its weight is [O, C / G, ...]
"""

from __future__ import annotations

import math
from typing import Any

import torch

from evenly.parallel.tensor.axis import Axis, SplitTensor, is_split, own_part
from evenly.parallel.tensor.dim_factors import Dim
from evenly.parallel.tensor.execution import of_type, part_for, shape_of
from evenly.parallel.tensor.graph import Dims, Graph, NoRule, argument, input_of, tensor
from evenly.parallel.tensor.layout import Layout
from evenly.parallel.tensor.trace import Ref, TracedCall

T = torch.Tensor


# --------------------------------------------------------------------------------------------------- for the derivation
def convolved(graph: Graph, call: TracedCall) -> None:
    """`conv1d` to `conv3d`: input [N, C, ...], weight [O, C / G, ...]."""
    x, weight, bias, groups = input_of(call), tensor(call, 1, "weight"), argument(call, 2, "bias"), _groups(call)
    (batch, channels, *positions), (out, into, *kernel) = graph.of(x), graph.of(weight)
    if len(positions) != len(kernel):
        raise NoRule  # without a batch dim
    for dim in (*positions, *kernel):
        graph.forbid(dim, call)
    if groups == 1:
        graph.unite(channels, into, call)
        (graph.ends_in_sum(into, "sum") if graph.is_weight(weight) else graph.forbid(into, call))
    else:
        shared = graph.new(groups)
        each = graph.forbidden(graph.shape(weight)[0] // groups, call)
        graph.forbid(into, call)
        graph.unite(channels, (*shared, *into), call)
        graph.unite(out, (*shared, *each), call)
    if isinstance(bias, Ref):
        graph.unite(graph.of(bias)[0], out, call)
    graph.multiplies(math.prod(graph.shape(weight)[1:]))
    shape = graph.output_shape(call)
    graph.give(call, [batch, out, *(graph.forbidden(size, call) for size in shape[2:])])


def _groups(call: TracedCall) -> int:
    return argument(call, 6, "groups", default=1)


def batch_normalized(graph: Graph, call: TracedCall) -> None:
    """`batch_norm`: each channel by itself; parameters and running statistics have one number of each."""
    _channels_apart(graph, call, [argument(call, at, name) for at, name in enumerate(BATCH_NORM_TENSORS, 1)])


BATCH_NORM_TENSORS = ("running_mean", "running_var", "weight", "bias")


def group_normalized(graph: Graph, call: TracedCall) -> None:
    """`group_norm`: groups of channels, each by itself."""
    groups = argument(call, 1, "num_groups")
    channels = graph.of(input_of(call))[1]
    within = graph.forbidden(graph.shape(input_of(call))[1] // groups, call)
    graph.unite(channels, (*graph.new(groups), *within), call)
    _channels_apart(graph, call, [argument(call, 2, "weight"), argument(call, 3, "bias")], batch_too=False)


def _channels_apart(graph: Graph, call: TracedCall, others: list[Any], *, batch_too: bool = True) -> None:
    batch, channels, *positions = graph.of(input_of(call))
    for dim in (*positions, *([batch] if batch_too else [])):
        graph.forbid(dim, call)
    for other in others:
        if isinstance(other, Ref):
            graph.unite(channels, graph.of(other)[0], call)
    graph.give(call, [batch, channels, *positions])


def pooled(graph: Graph, call: TracedCall) -> None:
    """Batch and channels apart; positions become others."""
    dims = graph.of(input_of(call))
    if len(dims) < 3:
        raise NoRule
    for dim in dims[2:]:
        graph.forbid(dim, call)
    for which in range(len(call.outputs)):
        shape = graph.output_shape(call, which)
        rest: list[Dim] = [graph.forbidden(size, call) for size in shape[2:]]
        graph.give(call, Dims([*dims[:2], *rest]), which)


# ------------------------------------------------------------------------------------------------------------- on parts
def convolution(
    func: Any, input: T, weight: T, bias: T | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Any:  # fmt: skip
    if not is_split(weight) or weight.split_as.dim > 1 or input.dim() != weight.dim():
        return NotImplemented
    axis, layout, how = weight.axis, weight.split_as, (stride, padding, dilation)
    if layout.dim == 1:
        return _summed_convolution(func, input, weight, bias, how) if groups == 1 else NotImplemented
    if groups == 1:
        own: Any = axis.enter(input, products=True)
    else:
        each = shape_of(weight)[0] // groups
        if layout.outer > 1 or any(size % each for size in layout.sizes):
            return NotImplemented  # a rank would hold a part of a group
        into = layout._replace(inner=layout.inner // each * weight.shape[1]) if layout.inner % each == 0 else None
        own = None if into is None else part_for(input, into.at(1 - input.dim()), axis)
        if own is None:
            return NotImplemented
        groups = weight.shape[0] // each
    own_bias = None if bias is None else part_for(bias, layout.at(-1), axis)
    return axis.split(func(own, weight, own_bias, *how, groups), layout.at(1))


def _summed_convolution(func: Any, input: T, weight: SplitTensor, bias: T | None, how: tuple[Any, ...]) -> Any:
    axis, layout = weight.axis, weight.split_as
    own: Any = part_for(input, layout.at(1 - input.dim()), axis)
    summed = axis.total(func(own, weight, None, *how))
    if bias is None:
        return summed
    full = of_type(axis.enter(bias) if is_split(bias) else bias, summed)
    return summed + full.view(-1, *[1] * (input.dim() - 2))


def batch_norm(
    func: Any, input: T, running_mean: T | None, running_var: T | None, weight: T | None = None, bias: T | None = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    """Each rank its channels; the running statistics, which are whole, are gathered."""
    if not is_split(input) or input.split_as.dim != 1 or is_split(running_mean):
        return NotImplemented
    axis, layout = input.axis, input.split_as.at(0)
    statistics = [running_mean, running_var]
    own = [None if one is None else own_part(one, layout, axis.position).clone() for one in statistics]
    scales = [None if one is None else part_for(one, layout.at(-1), axis) for one in (weight, bias)]
    result = func(input, *own, *scales, training, momentum, eps)
    if training:
        for whole, part in zip(statistics, own, strict=True):
            if whole is not None and part is not None:
                _fill(whole, part, layout, axis)
    return axis.split(result, input.split_as)


@torch.no_grad()
def _fill(whole: T, part: T, layout: Layout, axis: Axis) -> None:
    # Of a recomputed block autograd holds `part` itself, which must stay the plain tensor that it was.
    whole.copy_(axis.gather_full(axis.split(part.detach(), layout)))


def group_norm(
    func: Any, input: T, num_groups: int, weight: T | None = None, bias: T | None = None, eps: float = 1e-5
) -> Any:
    if not is_split(input) or input.split_as.dim != 1:
        return NotImplemented
    axis, layout = input.axis, input.split_as
    each = layout.length // num_groups
    if layout.outer > 1 or any(size % each for size in layout.sizes):
        return NotImplemented
    scales = [None if one is None else part_for(one, layout.at(-1), axis) for one in (weight, bias)]
    return axis.split(func(input, input.shape[1] // each, *scales, eps), layout)


def positions(func: Any, input: T, *args: Any, **kwargs: Any) -> Any:
    """Functions of a tensor's positions, where its batch or its channels are split."""
    if not is_split(input) or input.dim() < 3 or input.split_as.dim > 1:
        return NotImplemented
    result = func(input, *args, **kwargs)
    if isinstance(result, T):
        return input.axis.split(result, input.split_as)
    return tuple(input.axis.split(one, input.split_as) for one in result)
