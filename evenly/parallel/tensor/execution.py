"""How functions of torch compute on the parts of split tensors: shapes, elements, pieces, reductions.

A function of this module is called with what the function of torch was called with; every tensor in it is this rank's
part (`is_split`) or full. It returns the result, its tensors marked as split or left full, or `NotImplemented` where
the parts do not fit it: then the split tensors are gathered and the function of torch is called with those.

Dims are counted from the end (`-1` the last) where tensors are broadcast against each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from evenly.parallel.tensor import shapes
from evenly.parallel.tensor.axis import Axis, SplitTensor, is_split, memory_order, own_part
from evenly.parallel.tensor.layout import Layout
from evenly.torch_private import without_subclasses

Execution = Callable[..., Any]
T = torch.Tensor


# ------------------------------------------------------------------------------------------ asking about a tensor
def shape(_: Any, tensor: SplitTensor, *args: Any, **kwargs: Any) -> Any:
    shape = torch.Size(shape_of(tensor))
    dim = args[0] if args and not isinstance(args[0], type) else kwargs.get("dim")
    return shape if dim is None else shape[dim]


def numel(_: Any, tensor: SplitTensor) -> int:
    return math.prod(shape_of(tensor))


def text(_: Any, tensor: SplitTensor, *args: Any) -> str:
    return repr(tensor)


def length(_: Any, tensor: SplitTensor) -> int:
    return shape_of(tensor)[0]


def same_as_local(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs)


def data(_: Any, tensor: SplitTensor) -> SplitTensor:
    """Shares memory with the tensor; what is changed through it shows in no version."""
    tensor.axis.forget_views()
    return tensor.axis.split(tensor.data, tensor.split_as)


def shape_of(tensor: T) -> tuple[int, ...]:
    """The shape of the full tensor."""
    return tensor.split_as.full_shape(tensor.shape) if is_split(tensor) else tuple(tensor.shape)


def register_hook(func: Any, tensor: SplitTensor, hook: Callable[[T], T | None]) -> Any:
    """The hook sees the gradient as split as the tensor is, and may return it whole or split."""
    axis, layout = tensor.axis, tensor.split_as

    def of_part(gradient: T) -> T | None:
        view = axis.split(gradient.view_as(gradient), layout)
        changed = hook(view)
        if changed is None or changed is view:
            return None
        with without_subclasses():
            return part_for(changed, layout.at(layout.dim - view.dim()), axis)

    return func(tensor, of_part)


# ----------------------------------------------------------------------------------------- element by element
def elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    first = args[0]
    alone = len(args) == 1 and not kwargs
    if isinstance(first, SplitTensor) and (alone or not any(isinstance(v, T) for v in (*args[1:], *kwargs.values()))):
        result = func(*args, **kwargs)  # of one tensor
        return first.axis.split(result, first.split_as) if isinstance(result, T) else NotImplemented
    parts = _aligned([*args, *kwargs.values()])
    if parts is None:
        return NotImplemented
    values, layout, axis = parts
    result = func(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))
    if not isinstance(result, T):  # the indices of torch.where
        return NotImplemented
    return mark(result, layout.at(result.dim() + layout.dim), axis)


def cast(func: Any, tensor: T, *args: Any, **kwargs: Any) -> Any:
    """Return `tensor`, split as it is, in the type of the others, whose split is no matter."""
    result = func(tensor, *args, **kwargs)
    if not is_split(tensor):
        return result
    return tensor.axis.split(result, tensor.split_as) if isinstance(result, T) else NotImplemented


def in_place(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What is changed must be split as the result is; the result is it."""
    if not is_split(args[0]):
        return NotImplemented
    layout = from_end(args[0])
    given = [*args[1:], *kwargs.values()]
    values = [part_for(value, layout, args[0].axis) if isinstance(value, T) else value for value in given]
    if any(part is None and value is not None for part, value in zip(values, given, strict=True)):
        return NotImplemented
    return func(*args[:1], *values[: len(args) - 1], **dict(zip(kwargs, values[len(args) - 1 :], strict=True)))


def _aligned(values: Sequence[Any]) -> tuple[list[Any], Layout, Axis] | None:
    """The values with all tensors as parts that can be broadcast, and the layout of the result, dim from the end.

    The first split tensor decides; one that is split in another way is made whole first. None where the dim that
    is split would itself be broadcast.
    """
    first = next(value for value in values if isinstance(value, SplitTensor))
    layout, axis = from_end(first), first.axis
    parts: list[Any] = []
    for value in values:
        part = part_for(value, layout, axis) if isinstance(value, T) else value
        if part is None:
            return None
        parts.append(part)
    return parts, layout, axis


def from_end(tensor: SplitTensor) -> Layout:
    layout = tensor.split_as
    return layout.at(layout.dim - tensor.dim())


def of_type(term: T, product: T) -> T:
    """`term`, which is added to `product`, in its type: autocast gives it that before the two are one operation."""
    if term.dtype is product.dtype or not torch.is_autocast_enabled(product.device.type):
        return term
    cast = term.to(product.dtype)
    return term.axis.split(cast, term.split_as) if is_split(term) else cast


def part_for(tensor: T, layout: Layout, axis: Axis) -> T | None:
    """What of `tensor` meets parts of `layout` (dim from the end) in an operation by elements."""
    if isinstance(tensor, SplitTensor):
        if from_end(tensor) == layout:
            # What autograd keeps for a recomputed block must look as it did: a part.
            return tensor if tensor.requires_grad else tensor.detach()
        tensor = axis.gather_full(tensor)
    place = tensor.dim() + layout.dim
    if place < 0 or tensor.shape[place] == 1:
        return axis.enter(tensor)
    return axis.part(tensor, layout.at(place)) if tensor.shape[place] == layout.length else None


def mark(result: Any, layout: Layout, axis: Axis) -> Any:
    """`result`, a part or several, as split tensors."""
    if isinstance(result, T):
        return axis.split(result, layout)
    if isinstance(result, (tuple, list)):
        return type(result)([mark(item, layout, axis) for item in result])  # pyright: ignore[reportUnknownVariableType]
    return result


# -------------------------------------------------------------------------------------------------- other shapes
VIEW, TRANSPOSE, EXPAND = map(shapes.decided, (shapes.view, shapes.transpose, shapes.expand))
UNBIND, UNSQUEEZE, CHUNK = map(shapes.decided, (shapes.unbind, shapes.unsqueeze, shapes.chunk))


def view_as(_: Any, tensor: T, other: T) -> Any:
    return VIEW(None, tensor, shape_of(other)) if is_split(tensor) else tensor.reshape(shape_of(other))


def matrix_transpose(_: Any, tensor: SplitTensor) -> Any:
    return NotImplemented if tensor.is_complex() else TRANSPOSE(None, tensor, -2, -1)


def expand_as(func: Any, tensor: T, other: T) -> Any:
    return EXPAND(func, tensor, *shape_of(other)) if is_split(tensor) else tensor.expand(shape_of(other))


def repeat_interleave(_: Any, tensor: T, repeats: Any, dim: int | None = None, **kwargs: Any) -> Any:
    if not is_split(tensor) or not isinstance(repeats, int) or dim is None:
        return NotImplemented
    dim, layout = dim % tensor.dim(), tensor.split_as
    repeated = torch.repeat_interleave(tensor, repeats, dim)
    return tensor.axis.split(repeated, layout.stretched(repeats) if dim == layout.dim else layout)


def triangle(func: Any, tensor: SplitTensor, *args: Any, **kwargs: Any) -> Any:
    if tensor.split_as.dim >= tensor.dim() - 2:
        return NotImplemented
    return tensor.axis.split(func(tensor, *args, **kwargs), tensor.split_as)


def pad(func: Any, tensor: SplitTensor, pad: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    """Pads dims that are not split."""
    back = tensor.dim() - 1 - tensor.split_as.dim  # widths come in pairs, from the last dim on
    if any(pad[2 * back : 2 * back + 2]):
        return NotImplemented
    return tensor.axis.split(func(tensor, pad, *args, **kwargs), tensor.split_as)


def gather(*_: Any, **__: Any) -> Any:
    """Needs its tensors in full, and passes no split on."""
    return NotImplemented


def create(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A full tensor of its own, of which the split one says the type and the device."""
    if any(is_split(value) for value in (*args[1:], *kwargs.values())):
        return NotImplemented
    return func(*args, **kwargs)


def create_alike(func: Any, tensor: SplitTensor, *args: Any, **kwargs: Any) -> Any:
    """Random numbers of the same shape: drawn for the full tensor, of which this rank takes its part."""
    full = torch.empty_permuted(shape_of(tensor), memory_order(tensor), dtype=tensor.dtype, device=tensor.device)
    own = own_part(func(full, *args, **kwargs), tensor.split_as, tensor.axis.position)
    return tensor.axis.split(own, tensor.split_as)


# -------------------------------------------------------------------------------------- taking apart, joining
def index_select(func: Any, tensor: T, dim: int, index: T) -> Any:
    if not is_split(tensor) or is_split(index) or dim % tensor.dim() == tensor.split_as.dim:
        return NotImplemented
    return tensor.axis.split(func(tensor, dim, index), tensor.split_as)


def select(_: Any, tensor: SplitTensor, dim: int, index: int) -> Any:
    dim, layout = dim % tensor.dim(), tensor.split_as
    if dim == layout.dim:
        return NotImplemented
    return tensor.axis.split(tensor.select(dim, index), layout.at(layout.dim - (dim < layout.dim)))


def narrow(_: Any, tensor: SplitTensor, dim: int, start: Any, length: int) -> Any:
    if dim % tensor.dim() == tensor.split_as.dim:
        return NotImplemented
    return tensor.axis.split(tensor.narrow(dim, start, length), tensor.split_as)


def cat(_: Any, tensors: Sequence[T], dim: int = 0, *, axis: int | None = None, out: Any = None) -> Any:
    tensors = [tensor for tensor in tensors if tuple(tensor.shape) != (0,)]  # torch leaves these out, of any rank
    first = next((tensor for tensor in tensors if is_split(tensor)), None)
    if first is None or out is not None or any(tensor.dim() != first.dim() for tensor in tensors):
        return NotImplemented
    dim = (dim if axis is None else axis) % first.dim()
    if dim == first.split_as.dim:
        return NotImplemented
    layout = first.split_as.at(first.split_as.dim - first.dim())
    parts = [part_for(tensor, layout, first.axis) for tensor in tensors]
    if any(part is None for part in parts):
        return NotImplemented
    return first.axis.split(torch.cat(parts, dim), first.split_as)  # type: ignore[arg-type]


def stack(_: Any, tensors: Sequence[T], dim: int = 0, *, out: Any = None) -> Any:
    if out is not None:
        return NotImplemented
    dim %= tensors[0].dim() + 1
    turned = [UNSQUEEZE(None, t, dim) if is_split(t) else t.unsqueeze(dim) for t in tensors]
    return cat(None, turned, dim)


def glu(_: Any, tensor: SplitTensor, dim: int = -1) -> Any:
    halves = CHUNK(None, tensor, 2, dim)
    return (
        NotImplemented
        if halves is NotImplemented
        else elementwise(torch.mul, halves[0], elementwise(torch.sigmoid, halves[1]))
    )


# ---------------------------------------------------------------------------------------- along or over dims
def along(position: int, default: Any = None, names: Sequence[str] = ("dim", "dims", "axis")) -> Execution:
    """Functions that mix the elements of the dims given as argument `position`, and keep the others apart."""

    def execute(func: Any, tensor: SplitTensor, *args: Any, **kwargs: Any) -> Any:
        given = (
            args[position - 1] if len(args) >= position else next((kwargs[n] for n in names if n in kwargs), default)
        )
        if given is None:
            return NotImplemented
        dims = [given, *args[position:]] if func.__name__ == "flip" and isinstance(given, int) else given
        if tensor.split_as.dim in _counted(dims, tensor.dim()):
            return NotImplemented
        return mark(func(tensor, *args, **kwargs), tensor.split_as, tensor.axis)

    return execute


def reduced(position: int) -> Execution:
    """Functions that make one element of all those of the dims given as argument `position`."""

    def execute(func: Any, tensor: SplitTensor, *args: Any, **kwargs: Any) -> Any:
        given = args[position - 1] if len(args) >= position else kwargs.get("dim", kwargs.get("axis"))
        if not isinstance(given, (int, tuple, list)) or isinstance(given, bool) or given == ():
            return NotImplemented  # all elements
        dims, layout = _counted(given, tensor.dim()), tensor.split_as
        if layout.dim in dims:
            return NotImplemented
        found = func(tensor, *args, **kwargs)
        first = found if isinstance(found, T) else found[0]
        after = layout.dim if first.dim() == tensor.dim() else layout.dim - sum(d < layout.dim for d in dims)
        return mark(found, layout.at(after), tensor.axis)

    return execute


def extreme(func: Any, tensor: T, *args: Any, **kwargs: Any) -> Any:
    """`max` and `min`: of two tensors element by element, or along a dim."""
    if any(isinstance(value, T) for value in (*args, *kwargs.values())):
        return elementwise(func, tensor, *args, **kwargs)
    return reduced(1)(func, tensor, *args, **kwargs)


def _counted(dims: Any, rank: int) -> list[int]:
    """Dims as a list, counted from 0."""
    return [dim % rank for dim in ([dims] if isinstance(dims, int) else dims)]


def normalize_rows(func: Any, tensor: T, normalized_shape: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    if not is_split(tensor) or tensor.split_as.dim >= tensor.dim() - len(normalized_shape):
        return NotImplemented
    axis = tensor.axis

    def used(value: Any) -> Any:
        return axis.enter(value) if isinstance(value, T) else value

    given, named = [used(value) for value in args], {key: used(value) for key, value in kwargs.items()}
    return axis.split(func(tensor, normalized_shape, *given, **named), tensor.split_as)


def sum_or_mean(func: Any, tensor: SplitTensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    """Over dims that are not split each part by itself; else the parts' sums, added up."""
    dims = range(tensor.dim()) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    over, layout = sorted({d % tensor.dim() for d in dims}), tensor.split_as
    if layout.dim not in over:
        after = layout.dim if keepdim else layout.dim - sum(d < layout.dim for d in over)
        return tensor.axis.split(func(tensor, over, keepdim, **kwargs), layout.at(after))
    total = tensor.axis.total(torch.sum(tensor, over, keepdim, **kwargs))
    if func.__name__ == "sum":
        return total
    whole = shape_of(tensor)
    return total / math.prod(whole[d] for d in over)


# ---------------------------------------------------------------------------------------------- random numbers
def dropout(_: Any, tensor: SplitTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not training or p == 0:
        return tensor
    noise = own_noise(tensor, p)
    return tensor.mul_(noise) if inplace else tensor.axis.split(tensor * noise, tensor.split_as)


def own_noise(tensor: SplitTensor, p: float) -> T:
    """What dropout multiplies this rank's part with: drawn for the whole, which torch fills in the order of memory."""
    order = memory_order(tensor)
    whole = torch.empty_permuted(shape_of(tensor), order, dtype=tensor.dtype, device=tensor.device)
    noise = F.dropout(whole.fill_(1), p, training=True)
    return own_part(noise, tensor.split_as, tensor.axis.position)
