"""`x[...]`: numbers, slices, None, Ellipsis and tensors as indices, for the derivation and on parts.

Whole slices pass a split on; every other item needs the dim that it takes in full. Tensors among the items together
make new dims, where the first of them stands if they are neighbours, else in front: as torch has it, numbers first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from evenly.parallel.tensor.axis import is_split
from evenly.parallel.tensor.dim_factors import Dim
from evenly.parallel.tensor.graph import Graph, NoRule, argument, input_of
from evenly.parallel.tensor.trace import Ref, TracedCall

T = torch.Tensor


@dataclass(frozen=True)
class Item:
    """One item of an index. takes: how many dims of the source; value: as it was given."""

    kind: Literal["number", "slice", "new", "tensor"]
    takes: int
    value: Any = None


def items_of(index: Any, rank: int, tensor_item: Any) -> list[Item] | None:
    """The items of an index into a tensor of `rank`, Ellipsis written out; None for an index of another form.

    tensor_item: the item of what is not a number, a slice, None or Ellipsis, or None.
    """
    found: list[Item | None] = []  # None: the Ellipsis
    for one in index if isinstance(index, tuple) else (index,):
        if one is ...:
            found.append(None)
        elif one is None:
            found.append(Item("new", 0))
        elif isinstance(one, slice):
            found.append(Item("slice", 1, one))
        elif isinstance(one, int) and not isinstance(one, bool):
            found.append(Item("number", 1, one))
        elif (item := tensor_item(one)) is not None:
            found.append(item)
        else:
            return None
    rest = rank - sum(one.takes for one in found if one is not None)
    at = found.index(None) if None in found else len(found)
    found[at : at + 1] = [Item("slice", 1, slice(None))] * rest
    return [one for one in found if one is not None]


def sources_of(items: Sequence[Item], broadcast: int) -> list[int | None]:
    """For each dim of the result the dim of the source that it was; None for a new one.

    broadcast: dims that all tensors among the items have together.
    """
    result: list[int | None] = []
    tensors: list[int] = []
    at = 0
    for item in items:
        if item.kind == "tensor":
            tensors.append(len(result) + len(tensors))
        elif item.kind != "number":
            result.append(at if item.kind == "slice" else None)
        at += item.takes
    if tensors:
        neighbours = tensors == [*range(tensors[0], tensors[0] + len(tensors))]
        place = tensors[0] if neighbours else 0
        result[place:place] = [None] * broadcast
    return result


def _is_whole(item: Item, length: int) -> bool:
    return item.kind == "slice" and item.value.indices(length) == (0, length, 1)


def propagate(graph: Graph, call: TracedCall) -> None:
    """Whole slices pass; numbers, parts and tensors forbid their dims."""
    source, values = input_of(call), graph.trace.values

    def tensor_item(one: Any) -> Item | None:
        return None if not isinstance(one, Ref) else _item(one, values[one.index].shape, values[one.index].dtype)

    shape, dims = graph.shape(source), graph.of(source)
    items = items_of(argument(call, 1), len(shape), tensor_item)
    if items is None or any(_asks_a_tensor(item) for item in items):
        raise NoRule
    at, kept = 0, dict[int, Dim]()
    for item in items:
        for dim in range(at, at + item.takes):
            if _is_whole(item, shape[dim]):
                kept[dim] = dims[dim]
            else:
                graph.forbid(dims[dim], call)
        at += item.takes
        if isinstance(item.value, Ref):
            for dim in graph.of(item.value):
                graph.forbid(dim, call)
    out = graph.output_shape(call)
    broadcast = len(out) - sum(item.kind in ("slice", "new") for item in items)
    places = sources_of(items, broadcast)
    if len(places) != len(out):
        raise NoRule
    found = [kept.get(-1 if dim is None else dim) for dim in places]
    graph.give(
        call, [graph.forbidden(size, call) if dim is None else dim for dim, size in zip(found, out, strict=True)]
    )


def _asks_a_tensor(item: Item) -> bool:
    return item.kind == "slice" and any(
        isinstance(end, Ref) for end in (item.value.start, item.value.stop, item.value.step)
    )


def _item(value: Any, shape: Sequence[int], dtype: torch.dtype) -> Item | None:
    """The item of a tensor as index; of one without dims that of a number."""
    if dtype in (torch.bool, torch.uint8):
        return Item("tensor", len(shape), value) if shape else None
    return Item("tensor", 1, value) if shape else Item("number", 1, value)


def execute(func: Any, tensor: T, index: Any) -> Any:
    if not is_split(tensor):
        return NotImplemented
    axis, layout = tensor.axis, tensor.split_as

    def tensor_item(one: Any) -> Item | None:
        one = torch.tensor(one, device=tensor.device) if isinstance(one, list) else one
        if not isinstance(one, T):
            return None
        return _item(axis.gather_full(one) if is_split(one) else one, one.shape, one.dtype)

    items = items_of(index, tensor.dim(), tensor_item)
    if items is None:
        return NotImplemented
    at = 0
    for place, item in enumerate(items):
        if at <= layout.dim < at + item.takes:
            if not _is_whole(item, layout.length):
                return NotImplemented
            items[place] = Item("slice", 1, slice(None))
        at += item.takes
    result = tensor[tuple(item.value for item in items)]
    broadcast = result.dim() - sum(item.kind in ("slice", "new") for item in items)
    return axis.split(result, layout.at(sources_of(items, broadcast).index(layout.dim)))
