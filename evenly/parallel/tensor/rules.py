"""How functions of torch compute on parts: for each that can, a rule.

A rule is called with what the function was called with; every tensor in it is this rank's part (`is_split`) or whole.
It returns the result, its tensors marked as split or left whole, or `NotImplemented` where the parts do not fit it:
then, as for a function without a rule, the split tensors are made whole and the function is called with those.

Dims are counted from the end (`-1` the last) where tensors are broadcast against each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from evenly.comm.operations import all_reduce
from evenly.errors import RunError
from evenly.parallel.core.memory import as_held, with_views
from evenly.parallel.tensor.attention import multi_head_attention
from evenly.parallel.tensor.axis import RULES, Axis, SplitTensor, is_split, memory_order, own_part
from evenly.parallel.tensor.layout import Layout

Rule = Callable[..., Any]
T = torch.Tensor


def rule(*functions: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Makes the decorated function the rule of `functions`."""

    def register(function: Rule) -> Rule:
        for known in functions:
            RULES[known] = function
        return function

    return register


def _methods(*names: str) -> list[Callable[..., Any]]:
    """The functions of these names in torch, in torch.Tensor and in torch.nn.functional; each must be in one."""
    places = (torch, T, F)
    found = [[f for place in places if callable(f := getattr(place, name, None))] for name in names]
    assert all(found)
    return [function for functions in found for function in functions]


def _getters(*names: str) -> list[Callable[..., Any]]:
    return [getattr(T, name).__get__ for name in names]


# ------------------------------------------------------------------------------------------ asking about a tensor
@rule(T.shape.__get__, T.size)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
def _shape(_: Any, tensor: SplitTensor, *args: Any, **kwargs: Any) -> Any:
    shape = torch.Size(_shape_of(tensor))
    dim = args[0] if args and not isinstance(args[0], type) else kwargs.get("dim")
    return shape if dim is None else shape[dim]


@rule(T.numel, T.nelement, torch.numel)
def _numel(_: Any, tensor: SplitTensor) -> int:
    return math.prod(_shape_of(tensor))


@rule(T.__format__)
def _format(_: Any, tensor: SplitTensor, *args: Any) -> str:
    return repr(tensor)


@rule(T.__len__)
def _len(_: Any, tensor: SplitTensor) -> int:
    return _shape_of(tensor)[0]


@rule(
    *_getters("dtype", "device", "requires_grad", "grad_fn", "is_leaf", "layout", "ndim", "is_cuda", "is_sparse"),
    *_getters("is_cpu", "is_meta", "is_mps", "is_quantized", "is_nested", "_version"),
    *(T.dim, T.ndimension, T.is_floating_point, T.is_complex, T.get_device, T.element_size, T.is_contiguous),
    *(torch.is_floating_point, torch.is_complex, torch.is_tensor),
    *_getters("grad"),
)
def _same_of_a_part(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _shape_of(tensor: T) -> tuple[int, ...]:
    """Of the whole."""
    return tensor.split_as.full_shape(tensor.shape) if is_split(tensor) else tuple(tensor.shape)


@rule(T.register_hook)
def _register_hook(func: Any, tensor: SplitTensor, hook: Callable[[T], T | None]) -> Any:
    """The hook sees the gradient as split as the tensor is, and may return it whole or split."""
    axis, layout = tensor.axis, tensor.split_as

    def of_part(gradient: T) -> T | None:
        shown = axis.split(gradient.view_as(gradient), layout)
        changed = hook(shown)
        if changed is None or changed is shown:
            return None
        with as_held():
            return _part_for(changed, layout.at(layout.dim - shown.dim()), axis)

    return func(tensor, of_part)


# ----------------------------------------------------------------------------------------- element by element
ELEMENTWISE = _methods(
    *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "floor_divide", "remainder", "fmod"),
    *("neg", "negative", "positive", "abs", "absolute", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p"),
    *("sqrt", "rsqrt", "square", "pow", "float_power", "reciprocal", "sin", "cos", "tan", "tanh", "sinh", "cosh"),
    *("sigmoid", "logit", "erf", "erfc", "erfinv", "floor", "ceil", "round", "trunc", "frac", "sign", "sgn"),
    *("clamp", "clip", "clamp_min", "clamp_max", "minimum", "maximum", "fmin", "fmax", "lerp", "addcmul", "addcdiv"),
    *("where", "masked_fill", "eq", "ne", "lt", "le", "gt", "ge", "not_equal", "greater", "less", "isnan", "isinf"),
    *("isfinite", "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or"),
    *("nan_to_num", "relu", "relu6", "gelu", "silu", "elu", "selu", "celu", "leaky_relu", "softplus", "softsign"),
    *("hardtanh", "hardsigmoid", "hardswish", "mish", "logsigmoid", "threshold", "tanhshrink"),
    *("clone", "contiguous", "detach", "to", "type", "type_as", "float", "double", "half", "bfloat16", "bool", "int"),
    *("long", "cpu", "cuda", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__"),
    *("__rtruediv__", "__div__", "__rdiv__", "__pow__", "__rpow__", "__neg__", "__abs__", "__invert__", "__floordiv__"),
    *("__mod__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__and__", "__or__", "__xor__"),
    *("zeros_like", "ones_like", "full_like"),
)
IN_PLACE = _methods(
    *("add_", "sub_", "mul_", "div_", "neg_", "exp_", "sqrt_", "rsqrt_", "pow_", "tanh_", "sigmoid_", "relu_"),
    *("clamp_", "clamp_min_", "clamp_max_", "masked_fill_", "copy_", "zero_", "fill_", "addcmul_", "addcdiv_", "lerp_"),
    *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "detach_"),
)


@rule(*ELEMENTWISE)
def _elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    parts = _aligned([*args, *kwargs.values()])
    if parts is None:
        return NotImplemented
    values, layout, axis = parts
    result = func(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))
    if not isinstance(result, T):  # the indices of torch.where
        return NotImplemented
    return _marked(result, layout.at(result.dim() + layout.dim), axis)


@rule(*IN_PLACE)
def _in_place(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What is changed must be split as the result is; the result is it."""
    if not is_split(args[0]):
        return NotImplemented
    layout = args[0].split_as.at(args[0].split_as.dim - args[0].dim())
    given = [*args[1:], *kwargs.values()]
    values = [_part_for(value, layout, args[0].axis) if isinstance(value, T) else value for value in given]
    if any(part is None and value is not None for part, value in zip(values, given, strict=True)):
        return NotImplemented
    return func(*args[:1], *values[: len(args) - 1], **dict(zip(kwargs, values[len(args) - 1 :], strict=True)))


def _aligned(values: Sequence[Any]) -> tuple[list[Any], Layout, Axis] | None:
    """The values with all tensors as parts that can be broadcast, and the layout of the result, dim from the end.

    The first split tensor decides; one that is split in another way is made whole first. None where the dim that
    is split would itself be broadcast.
    """
    first = next(value for value in values if is_split(value))
    layout = first.split_as.at(first.split_as.dim - first.dim())
    axis = first.axis
    parts: list[Any] = []
    for value in values:
        part = _part_for(value, layout, axis) if isinstance(value, T) else value
        if part is None:
            return None
        parts.append(part)
    return parts, layout, axis


def _part_for(tensor: T, layout: Layout, axis: Axis) -> T | None:
    """What of `tensor` meets parts of `layout` (dim from the end) in an operation by elements."""
    if is_split(tensor):
        if tensor.split_as.dim - tensor.dim() == layout.dim and tensor.split_as.matches(layout):
            # What autograd keeps for a recomputed block must look as it did: a part.
            return tensor if tensor.requires_grad else tensor.detach()
        tensor = axis.gather_full(tensor)
    place = tensor.dim() + layout.dim
    if place < 0 or tensor.shape[place] == 1:
        return axis.enter(tensor)
    return axis.part(tensor, layout.at(place)) if tensor.shape[place] == layout.length else None


def _marked(result: Any, layout: Layout, axis: Axis) -> Any:
    """`result`, a part or several, as split tensors."""
    if isinstance(result, T):
        return axis.split(result, layout)
    if isinstance(result, (tuple, list)):
        return type(result)(_marked(item, layout, axis) for item in result)  # pyright: ignore[reportUnknownVariableType]
    return result


# ------------------------------------------------------------------------------------------------------ products
@rule(F.linear)
def _linear(_: Any, x: T, weight: T, bias: T | None = None) -> Any:
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
        own_bias = None if bias is None else _part_for(bias, layout.at(-1), axis)
        return axis.split(F.linear(axis.enter(x, products=True), weight, own_bias), layout.at(x.dim() - 1))
    own = _part_for(x, layout.at(-1), axis)
    summed = axis.rows(F.linear(own, weight))  # type: ignore[arg-type]  # K is never broadcast
    return summed if bias is None else _added(summed, bias)


@rule(*_methods("matmul", "mm", "bmm", "__matmul__"))
def _matmul(_: Any, a: T, b: T) -> Any:
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
        layout = one.split_as.at(one.split_as.dim - one.dim())
        if layout.dim == contracted:
            part = _part_for(other, layout.at(of_other), axis)
        elif layout.dim >= -2:  # M of a, or N of b
            part = axis.enter(other, products=True)
        else:
            part = _part_for(other, layout, axis)
        if part is None:
            return NotImplemented
        result = torch.matmul(one, part) if one is a else torch.matmul(part, one)
        if layout.dim == contracted:
            of_weight = b.dim() == 2 and (a.dim() > 2 or getattr(a, "rows", None))
            return axis.rows(result, _opened(a, result)) if of_weight else axis.total(result)
        return axis.split(result, layout.at(result.dim() + layout.dim))
    return NotImplemented


def _opened(a: T, result: T) -> tuple[int, ...]:
    """The shape of a product of `a` with a weight before the rows of `a` were flattened."""
    rows: tuple[int, ...] | None = getattr(a, "rows", None)
    return tuple(result.shape) if rows is None else (*rows, result.shape[-1])


@rule(*_methods("__rmatmul__"))
def _matmul_reversed(func: Any, b: T, a: T) -> Any:
    return _matmul(func, a, b)


@rule(*_methods("addmm", "baddbmm"))
def _add_product(_: Any, bias: T, a: T, b: T, *, beta: float = 1, alpha: float = 1, out: Any = None) -> Any:
    if (beta, alpha) != (1, 1) or out is not None or not (is_split(a) or is_split(b)):
        return NotImplemented
    product = _matmul(None, a, b)
    if product is NotImplemented:
        return NotImplemented
    return _added(product, bias)


def _added(a: T, b: T) -> Any:
    return _elementwise(torch.add, a, b) if is_split(a) or is_split(b) else a + b


@rule(F.embedding)
def _embedding(
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


# -------------------------------------------------------------------------------------------------- other shapes
def _viewed(tensor: SplitTensor, shape: Sequence[int]) -> Any:
    """`tensor` as a whole tensor of `shape`, in which one length may be -1."""
    whole = _shape_of(tensor)
    if -1 in shape:
        known = -math.prod(shape)
        if known <= 0 or math.prod(whole) % known:
            return NotImplemented  # torch says what is wrong
        shape = [math.prod(whole) // known if length == -1 else length for length in shape]
    layout = tensor.split_as.viewed(whole, shape)
    if layout is None or math.prod(shape) != math.prod(whole):
        return NotImplemented
    viewed = tensor.axis.split(tensor.reshape(layout.part(shape, tensor.axis.position)), layout)
    if len(shape) == 2 and len(whole) > 2 and shape[1] == whole[-1]:
        viewed.rows = whole[:-1]
    return viewed


def _lengths(args: tuple[Any, ...]) -> Sequence[int] | None:
    """From `2, 3` or `(2, 3)`; None for anything else (a dtype)."""
    given = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    return given if all(isinstance(length, int) for length in given) else None  # pyright: ignore[reportUnknownVariableType]


@rule(T.view, T.reshape, torch.reshape)
def _view(_: Any, tensor: SplitTensor, *args: Any, **kwargs: Any) -> Any:
    shape = _lengths(args or tuple(kwargs.values()))
    return NotImplemented if shape is None else _viewed(tensor, shape)


@rule(T.view_as, T.reshape_as)
def _view_as(_: Any, tensor: T, other: T) -> Any:
    return _viewed(tensor, _shape_of(other)) if is_split(tensor) else tensor.reshape(_shape_of(other))


@rule(*_methods("flatten"))
def _flatten(_: Any, tensor: SplitTensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    whole = _shape_of(tensor)
    start, end = start_dim % len(whole), end_dim % len(whole)
    return _viewed(tensor, (*whole[:start], math.prod(whole[start : end + 1]), *whole[end + 1 :]))


@rule(*_methods("unflatten"))
def _unflatten(_: Any, tensor: SplitTensor, dim: int, sizes: Sequence[int]) -> Any:
    whole = _shape_of(tensor)
    dim %= len(whole)
    sizes = list(sizes)
    if -1 in sizes:
        sizes[sizes.index(-1)] = whole[dim] // -math.prod(sizes)
    return _viewed(tensor, (*whole[:dim], *sizes, *whole[dim + 1 :]))


@rule(*_methods("unsqueeze"))
def _unsqueeze(_: Any, tensor: SplitTensor, dim: int) -> Any:
    dim %= tensor.dim() + 1
    layout = tensor.split_as
    return tensor.axis.split(tensor.unsqueeze(dim), layout.at(layout.dim + (dim <= layout.dim)))


@rule(*_methods("squeeze"))
def _squeeze(_: Any, tensor: SplitTensor, *dims: Any, dim: Any = None) -> Any:
    whole = _shape_of(tensor)
    asked = dims[0] if dims else dim
    named = range(len(whole)) if asked is None else [asked] if isinstance(asked, int) else asked
    gone = {d % len(whole) for d in named if whole[d] == 1}
    return _viewed(tensor, [length for d, length in enumerate(whole) if d not in gone])


@rule(*_methods("transpose", "swapaxes", "swapdims"))
def _transpose(_: Any, tensor: SplitTensor, dim0: int, dim1: int) -> Any:
    order = list(range(tensor.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permuted(tensor, order)


@rule(*_getters("mT"), *_methods("adjoint"))
def _matrices_turned(_: Any, tensor: SplitTensor) -> Any:
    return NotImplemented if tensor.is_complex() else _transpose(None, tensor, -2, -1)


@rule(*_getters("T"), *_methods("t"))
def _turned(_: Any, tensor: SplitTensor) -> Any:
    return _permuted(tensor, list(reversed(range(tensor.dim()))))


@rule(*_methods("permute"))
def _permute(_: Any, tensor: SplitTensor, *dims: Any, **kwargs: Any) -> Any:
    order = _lengths(dims or tuple(kwargs.values()))
    return NotImplemented if order is None else _permuted(tensor, [d % tensor.dim() for d in order])


@rule(*_methods("movedim", "moveaxis"))
def _movedim(func: Any, tensor: SplitTensor, source: Any, destination: Any) -> Any:
    order = torch.movedim(torch.empty(tuple(range(tensor.dim())), device="meta"), source, destination).shape
    return _permuted(tensor, list(order))


def _permuted(tensor: SplitTensor, order: list[int]) -> Any:
    layout = tensor.split_as
    return tensor.axis.split(tensor.permute(order), layout.at(order.index(layout.dim)))


@rule(*_methods("expand", "broadcast_to"))
def _expand(_: Any, tensor: SplitTensor, *lengths: Any, **kwargs: Any) -> Any:
    shape = _lengths(lengths or tuple(kwargs.values()))
    if shape is None:
        return NotImplemented
    layout = tensor.split_as.at(tensor.split_as.dim + len(shape) - tensor.dim())
    if shape[layout.dim] not in (-1, layout.length):
        return NotImplemented
    own = [-1 if dim == layout.dim else length for dim, length in enumerate(shape)]
    return tensor.axis.split(tensor.expand(own), layout)


@rule(T.expand_as)
def _expand_as(func: Any, tensor: T, other: T) -> Any:
    return _expand(func, tensor, *_shape_of(other)) if is_split(tensor) else tensor.expand(_shape_of(other))


@rule(*_methods("repeat_interleave"))
def _repeat_interleave(_: Any, tensor: T, repeats: Any, dim: int | None = None, **kwargs: Any) -> Any:
    if not is_split(tensor) or not isinstance(repeats, int) or dim is None:
        return NotImplemented
    dim, layout = dim % tensor.dim(), tensor.split_as
    repeated = torch.repeat_interleave(tensor, repeats, dim)
    return tensor.axis.split(repeated, layout.stretched(repeats) if dim == layout.dim else layout)


@rule(*_methods("tril", "triu"))
def _triangle(func: Any, tensor: SplitTensor, *args: Any, **kwargs: Any) -> Any:
    if tensor.split_as.dim >= tensor.dim() - 2:
        return NotImplemented
    return tensor.axis.split(func(tensor, *args, **kwargs), tensor.split_as)


# -------------------------------------------------------------------------------------- taking apart, joining
@rule(T.__getitem__)
def _getitem(_: Any, tensor: T, index: Any) -> Any:
    """Whole dims, numbers, slices and None, where the split dim is left as it is."""
    if not is_split(tensor):
        return NotImplemented
    given = index if isinstance(index, tuple) else (index,)
    if any(not isinstance(item, (int, slice, type(None), type(...))) or isinstance(item, bool) for item in given):
        return NotImplemented
    taken = sum(item is not None and item is not ... for item in given)
    rest = [slice(None)] * (tensor.dim() - taken)
    at = next((place for place, item in enumerate(given) if item is ...), len(given))
    full = [*given[:at], *rest, *given[at + 1 :]]
    layout = tensor.split_as
    dims = [place for place, item in enumerate(full) if item is not None]
    place = dims[layout.dim]
    item = full[place]
    if not isinstance(item, slice) or item.indices(layout.length) != (0, layout.length, 1):
        return NotImplemented
    full[place] = slice(None)
    kept = sum(not isinstance(item, int) for item in full[:place])
    return tensor.axis.split(tensor[tuple(full)], layout.at(kept))


@rule(*_methods("select"))
def _select(_: Any, tensor: SplitTensor, dim: int, index: int) -> Any:
    dim, layout = dim % tensor.dim(), tensor.split_as
    if dim == layout.dim:
        return NotImplemented
    return tensor.axis.split(tensor.select(dim, index), layout.at(layout.dim - (dim < layout.dim)))


@rule(*_methods("narrow"))
def _narrow(_: Any, tensor: SplitTensor, dim: int, start: Any, length: int) -> Any:
    if dim % tensor.dim() == tensor.split_as.dim:
        return NotImplemented
    return tensor.axis.split(tensor.narrow(dim, start, length), tensor.split_as)


@rule(*_methods("unbind"))
def _unbind(_: Any, tensor: SplitTensor, dim: int = 0) -> Any:
    dim, layout = dim % tensor.dim(), tensor.split_as
    if dim == layout.dim:
        return NotImplemented
    return _marked(tensor.unbind(dim), layout.at(layout.dim - (dim < layout.dim)), tensor.axis)


@rule(T.__iter__)
def _iterate(func: Any, tensor: SplitTensor) -> Any:
    parts = _unbind(func, tensor)
    return parts if parts is NotImplemented else iter(parts)


@rule(*_methods("chunk"))
def _chunk(_: Any, tensor: SplitTensor, chunks: int, dim: int = 0) -> Any:
    return _split(None, tensor, -(-_shape_of(tensor)[dim] // chunks), dim)


@rule(*_methods("split", "split_with_sizes"))
def _split(_: Any, tensor: SplitTensor, split_size: Any = None, dim: int = 0, **kwargs: Any) -> Any:
    sizes = kwargs.get("split_size_or_sections", kwargs.get("split_sizes", split_size))
    dim, axis, layout = dim % tensor.dim(), tensor.axis, tensor.split_as
    if isinstance(sizes, int):
        length = _shape_of(tensor)[dim]
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    if dim != layout.dim:
        return _marked(torch.split(tensor, list(sizes), dim), layout, axis)
    layouts = layout.pieces(sizes)
    if layouts is None:
        return NotImplemented
    parts = torch.split(tensor, [piece.own_length(axis.position) for piece in layouts], dim)
    return tuple(axis.split(part, piece) for part, piece in zip(parts, layouts, strict=True))


@rule(*_methods("cat", "concat", "concatenate"))
def _cat(_: Any, tensors: Sequence[T], dim: int = 0, *, axis: int | None = None, out: Any = None) -> Any:
    tensors = [tensor for tensor in tensors if tuple(tensor.shape) != (0,)]  # torch leaves these out, of any rank
    first = next((tensor for tensor in tensors if is_split(tensor)), None)
    if first is None or out is not None or any(tensor.dim() != first.dim() for tensor in tensors):
        return NotImplemented
    dim = (dim if axis is None else axis) % first.dim()
    if dim == first.split_as.dim:
        return NotImplemented
    layout = first.split_as.at(first.split_as.dim - first.dim())
    parts = [_part_for(tensor, layout, first.axis) for tensor in tensors]
    if any(part is None for part in parts):
        return NotImplemented
    return first.axis.split(torch.cat(parts, dim), first.split_as)  # type: ignore[arg-type]


@rule(*_methods("stack"))
def _stack(_: Any, tensors: Sequence[T], dim: int = 0, *, out: Any = None) -> Any:
    if out is not None:
        return NotImplemented
    dim %= tensors[0].dim() + 1
    turned = [_unsqueeze(None, t, dim) if is_split(t) else t.unsqueeze(dim) for t in tensors]
    return _cat(None, turned, dim)


# ---------------------------------------------------------------------------------------- along or over dims
@rule(*_methods("softmax", "log_softmax"))
def _softmax(func: Any, tensor: SplitTensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Any:
    if dim is None or dim % tensor.dim() == tensor.split_as.dim:
        return NotImplemented
    return tensor.axis.split(func(tensor, dim, *args, **kwargs), tensor.split_as)


@rule(F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm)
def _norm(func: Any, tensor: T, normalized_shape: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    if not is_split(tensor) or tensor.split_as.dim >= tensor.dim() - len(normalized_shape):
        return NotImplemented
    axis = tensor.axis

    def used(value: Any) -> Any:
        return axis.enter(value) if isinstance(value, T) else value

    given, named = [used(value) for value in args], {key: used(value) for key, value in kwargs.items()}
    return axis.split(func(tensor, normalized_shape, *given, **named), tensor.split_as)


@rule(*_methods("sum", "mean"))
def _sum(func: Any, tensor: SplitTensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    """Over dims that are not split each part by itself; else the parts' sums, added up."""
    dims = range(tensor.dim()) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    over, layout = sorted({d % tensor.dim() for d in dims}), tensor.split_as
    if layout.dim not in over:
        after = layout.dim if keepdim else layout.dim - sum(d < layout.dim for d in over)
        return tensor.axis.split(func(tensor, over, keepdim, **kwargs), layout.at(after))
    total = tensor.axis.total(torch.sum(tensor, over, keepdim, **kwargs))
    if func.__name__ == "sum":
        return total
    whole = _shape_of(tensor)
    return total / math.prod(whole[d] for d in over)


# ---------------------------------------------------------------------------------------------- random numbers
@rule(F.dropout, torch.dropout)
def _dropout(_: Any, tensor: SplitTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not training or p == 0:
        return tensor
    noise = _own_noise(tensor, p)
    return tensor.mul_(noise) if inplace else tensor.axis.split(tensor * noise, tensor.split_as)


def _own_noise(tensor: SplitTensor, p: float) -> T:
    """What dropout multiplies this rank's part with: drawn for the whole, which torch fills in the order of memory."""
    order = memory_order(tensor)
    whole = torch.empty_permuted(_shape_of(tensor), order, dtype=tensor.dtype, device=tensor.device)
    noise = F.dropout(whole.fill_(1), p, training=True)
    return own_part(noise, tensor.split_as, tensor.axis.position)


# ------------------------------------------------------------------------------------------------- attention
@rule(F.scaled_dot_product_attention)
def _attention(
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
    axis, layout = query.axis, query.split_as.at(query.split_as.dim - query.dim())
    groups = _shape_of(query)[-3] // _shape_of(key)[-3] if enable_gqa else 1
    if groups > 1 and layout.dim == -3:
        parts = [_grouped_part(tensor, layout, groups, axis) for tensor in (key, value)]
        enable_gqa = all(part is not None for part in parts)
        if not enable_gqa:
            spread = [_repeat(tensor, groups) for tensor in (key, value)]
            parts = [_part_for(tensor, layout, axis) for tensor in spread]
    else:
        parts = [_part_for(tensor, layout, axis) for tensor in (key, value)]
    mask = None if attn_mask is None else _part_for(attn_mask, layout, axis)
    if any(part is None for part in parts) or (attn_mask is not None and mask is None):
        return NotImplemented
    own_key, own_value = parts
    assert own_key is not None and own_value is not None
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
    """The heads of `tensor` that this rank's queries share, if it has all queries of each."""
    if layout.inner % groups or layout.dim != -3:
        return None
    shared = Layout.of(-3, layout.outer, layout.units, layout.inner // groups, layout.ranks)
    return _part_for(tensor, shared, axis)


def _repeat(tensor: T, times: int) -> T:
    """Every head `times` times."""
    if is_split(tensor):
        return _repeat_interleave(None, tensor, times, -3)
    return tensor.repeat_interleave(times, -3)


def _attention_with_dropout(
    query: SplitTensor, key: T, value: T, mask: T | None, dropout_p: float, is_causal: bool, scale: float | None
) -> T:
    """As torch computes it where dropout is on (on the CPU), with this rank's part of the noise."""
    length, width = key.shape[-2], query.shape[-1]
    weights = query @ key.transpose(-2, -1) * (width**-0.5 if scale is None else scale)
    if is_causal:
        mask = torch.ones(query.shape[-2], length, dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        weights = weights.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else weights + mask
    probabilities = query.axis.split(_rows_of_probabilities(weights), query.split_as)
    return (probabilities * _own_noise(probabilities, dropout_p)) @ value


def _rows_of_probabilities(weights: T) -> T:
    """softmax, with rows that may see nothing zero, as torch's attention has them."""
    rows = torch.softmax(weights, -1)
    return rows.masked_fill((weights == -math.inf).all(-1, keepdim=True), 0)


@rule(F.multi_head_attention_forward)
def _multi_head_attention(_: Any, *args: Any, **kwargs: Any) -> Any:
    """By the rules of the calls that it is made of."""
    with with_views():
        return multi_head_attention(*args, **kwargs)


# ----------------------------------------------------------------------------------------------------- losses
@rule(F.cross_entropy)
def _cross_entropy(
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


class _CrossEntropy(torch.autograd.Function):
    """-log softmax over a split dim at one place of it; kept for the backward is one tensor as large as the logits."""

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
    @once_differentiable
    def backward(ctx: Any, *gradients: T) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        softmax, places, elsewhere = ctx.saved_tensors
        change = softmax.scatter_add(ctx.dim, places, elsewhere.to(softmax.dtype) - 1)
        return change.mul_(gradients[0].unsqueeze(ctx.dim)), None, None, None, None
