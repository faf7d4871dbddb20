"""Functions of one split tensor and of numbers (views, transpositions, pieces), decided once and replayed.

What such a function does to a part follows from how the tensor is split, from the shape of the part and from the
numbers. A *decision* is that, as data: what is called on the part, and how its results are split. It is made the first
time that a layout, a shape and arguments meet, and kept; where one of them is another, another is made. A decision of
None has the tensor gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from evenly.data.nest import tensors_in
from evenly.parallel.tensor.axis import Axis, SplitTensor
from evenly.parallel.tensor.layout import Layout

T = torch.Tensor
DECISIONS = 4096  # that are kept of each function


class Part(NamedTuple):
    """What a decision knows of a tensor: how it is split, and the shape of the part that `position` has."""

    layout: Layout
    shape: tuple[int, ...]
    position: int

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the full tensor."""
        return self.layout.full_shape(self.shape)

    @property
    def rank(self) -> int:
        """How many dims it has."""
        return len(self.shape)


class Call(NamedTuple):
    """What is called on the part, and how the result, or each of several, is split.

    rows: the shape that the result is a view of, its last dim apart, where that was flattened.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    layouts: Layout | tuple[Layout, ...]
    rows: tuple[int, ...] | None = None


Decide = Callable[..., Call | None]


def decided(decide: Decide) -> Callable[..., Any]:
    known: dict[Any, Call | None] = {}

    def execute(_: Any, tensor: SplitTensor, *args: Any, **kwargs: Any) -> Any:
        axis = tensor.axis
        key = (tensor.split_as, tensor.shape, axis.position, args, *kwargs.items())
        try:
            call = known[key]
        except (KeyError, TypeError):  # a list has no hash
            call = _decide_anew(known, decide, Part(*key[:3]), args, kwargs)
        return NotImplemented if call is None else replayed(call, tensor, axis)

    return execute


def _decide_anew(
    known: dict[Any, Call | None], decide: Decide, part: Part, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Call | None:
    if any(True for _ in tensors_in((args, kwargs))):
        return None  # its numbers may be others the next time
    args = tuple(map(_hashable, args))
    kwargs = {name: _hashable(value) for name, value in kwargs.items()}
    key = (*part, args, *kwargs.items())
    if key not in known:
        if len(known) >= DECISIONS:
            known.clear()
        known[key] = _decision(decide, part, args, kwargs)
    return known[key]


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def _decision(decide: Decide, part: Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    try:
        return decide(part, *args, **kwargs)
    except TypeError as problem:
        if problem.__traceback__ is None or problem.__traceback__.tb_next is not None:
            raise
        return None  # arguments that it does not take


def replayed(call: Call, tensor: SplitTensor, axis: Axis) -> Any:
    layouts, result = call.layouts, call.function(tensor, *call.arguments)
    if isinstance(result, T):
        result = axis.split(result, layouts)  # pyright: ignore[reportArgumentType]
        if call.rows is not None:
            result.rows = call.rows
        return result
    each: Sequence[Layout] = (layouts,) * len(result) if isinstance(layouts, Layout) else layouts
    return tuple([axis.split(one, layout) for one, layout in zip(result, each, strict=True)])


# ---------------------------------------------------------------------------------------------- the same elements
def _viewed(part: Part, shape: Sequence[int]) -> Call | None:
    """A view of the whole as `shape`, in which one length may be -1."""
    whole = part.whole
    if -1 in shape:
        known = -math.prod(shape)
        if known <= 0 or math.prod(whole) % known:
            return None  # torch says what is wrong
        shape = tuple(math.prod(whole) // known if length == -1 else length for length in shape)
    layout = part.layout.viewed(whole, shape)
    if layout is None or math.prod(shape) != math.prod(whole):
        return None
    flattened = len(shape) == 2 and len(whole) > 2 and shape[1] == whole[-1]
    own = layout.part(shape, part.position)
    return Call(T.reshape, (own,), layout, whole[:-1] if flattened else None)


def lengths(args: tuple[Any, ...]) -> tuple[int, ...] | None:
    """From `2, 3` or `(2, 3)`; None for anything else (a dtype)."""
    given = args[0] if len(args) == 1 and isinstance(args[0], tuple) else args
    return tuple(given) if all(isinstance(length, int) for length in given) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def view(part: Part, *args: Any, **kwargs: Any) -> Call | None:
    shape = lengths(args or tuple(kwargs.values()))
    return None if shape is None else _viewed(part, shape)


def flatten(part: Part, start_dim: int = 0, end_dim: int = -1) -> Call | None:
    whole = part.whole
    start, end = start_dim % len(whole), end_dim % len(whole)
    return _viewed(part, (*whole[:start], math.prod(whole[start : end + 1]), *whole[end + 1 :]))


def unflatten(part: Part, dim: int, sizes: Sequence[int]) -> Call | None:
    whole = part.whole
    dim %= len(whole)
    if -1 in sizes:
        sizes = [whole[dim] // -math.prod(sizes) if size == -1 else size for size in sizes]
    return _viewed(part, (*whole[:dim], *sizes, *whole[dim + 1 :]))


def unsqueeze(part: Part, dim: int) -> Call:
    dim %= part.rank + 1
    return Call(T.unsqueeze, (dim,), part.layout.at(part.layout.dim + (dim <= part.layout.dim)))


def squeeze(part: Part, *dims: Any, dim: Any = None) -> Call | None:
    whole = part.whole
    asked = dims[0] if dims else dim
    named = range(len(whole)) if asked is None else [asked] if isinstance(asked, int) else asked
    gone = {d % len(whole) for d in named if whole[d] == 1}
    return _viewed(part, [length for d, length in enumerate(whole) if d not in gone])


def transpose(part: Part, dim0: int, dim1: int) -> Call:
    order = list(range(part.rank))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permuted(part, order)


def reverse_dims(part: Part) -> Call:
    return _permuted(part, list(reversed(range(part.rank))))


def permute(part: Part, *dims: Any, **kwargs: Any) -> Call | None:
    order = lengths(dims or tuple(kwargs.values()))
    return None if order is None else _permuted(part, [d % part.rank for d in order])


def movedim(part: Part, source: Any, destination: Any) -> Call:
    order = torch.movedim(torch.empty(tuple(range(part.rank)), device="meta"), source, destination).shape
    return _permuted(part, list(order))


def _permuted(part: Part, order: list[int]) -> Call:
    return Call(T.permute, tuple(order), part.layout.at(order.index(part.layout.dim)))


# ------------------------------------------------------------------------------------------------------- repeated
def expand(part: Part, *sizes: Any, **kwargs: Any) -> Call | None:
    shape = lengths(sizes or tuple(kwargs.values()))
    if shape is None:
        return None
    layout = part.layout.at(part.layout.dim + len(shape) - part.rank)
    if shape[layout.dim] not in (-1, layout.length):
        return None
    return Call(T.expand, tuple(-1 if dim == layout.dim else length for dim, length in enumerate(shape)), layout)


def repeat(part: Part, *sizes: Any, **kwargs: Any) -> Call | None:
    """Copies one behind the other: blocks of the split dim are repeated as a whole."""
    times, layout = lengths(sizes or tuple(kwargs.values())), part.layout
    if times is None:
        return None
    dim = layout.dim + len(times) - part.rank
    if dim < 0 or len(times) < part.rank:
        return None
    return Call(T.repeat, times, Layout.of(dim, layout.outer * times[dim], layout.units, layout.inner, layout.ranks))


def tile(part: Part, *sizes: Any, **kwargs: Any) -> Call | None:
    """`repeat`, with ones in front where there are fewer numbers than dims."""
    times = lengths(sizes or tuple(kwargs.values()))
    return None if times is None else repeat(part, *[1] * (part.rank - len(times)), *times)


# --------------------------------------------------------------------------------------------------------- pieces
def unbind(part: Part, dim: int = 0) -> Call | None:
    dim, layout = dim % part.rank, part.layout
    if dim == layout.dim:
        return None
    return Call(T.unbind, (dim,), layout.at(layout.dim - (dim < layout.dim)))


def chunk(part: Part, chunks: int, dim: int = 0) -> Call | None:
    return split(part, -(-part.whole[dim] // chunks), dim)


def split(part: Part, split_size: Any = None, dim: int = 0, **kwargs: Any) -> Call | None:
    sizes = kwargs.get("split_size_or_sections", kwargs.get("split_sizes", split_size))
    dim, layout = dim % part.rank, part.layout
    if isinstance(sizes, int):
        length = part.whole[dim]
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    if dim != layout.dim:
        return Call(torch.split, (list(sizes), dim), layout)
    layouts = layout.pieces(sizes)
    if layouts is None:
        return None
    return Call(torch.split, ([piece.own_length(part.position) for piece in layouts], dim), tuple(layouts))
