"""Nests of tensors: what a `collate` may return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy, deepcopy
from types import FunctionType, ModuleType
from typing import Any

import torch


def map_tensors(function: Callable[[torch.Tensor], Any], nest: Any) -> Any:
    """`nest` with every tensor replaced by `function` of it.

    A nest is a tensor, a mapping, list, tuple, named tuple, slice or dataclass instance of nests, or anything else,
    which stays as it is. Containers keep their types.
    """
    if isinstance(nest, torch.Tensor):
        return function(nest)
    if type(nest) is tuple or type(nest) is list:  # most of all there is; the questions below take longer
        return type(nest)([map_tensors(function, value) for value in nest])
    if isinstance(nest, Mapping):
        return _mapping_like(nest, {key: map_tensors(function, value) for key, value in nest.items()})
    if isinstance(nest, slice):
        return slice(*(map_tensors(function, one) for one in (nest.start, nest.stop, nest.step)))
    if type(nest).__module__ == "torch.return_types":
        return type(nest)([map_tensors(function, value) for value in nest])
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(map_tensors(function, value) for value in nest))
    if isinstance(nest, list | tuple):
        return type(nest)(map_tensors(function, value) for value in nest)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        parts = {f.name: map_tensors(function, getattr(nest, f.name)) for f in dataclasses.fields(nest) if f.init}
        return dataclasses.replace(nest, **parts)
    return nest


def _mapping_like(nest: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if type(nest) is dict:
        return values
    if not isinstance(nest, dict):  # a copy of another may have its items in common with it
        kind: Any = type(nest)
        return kind(values)
    found: Any = copy(nest)  # pyright: ignore[reportUnknownVariableType]
    for key, value in values.items():
        found[key] = value
    return found


def tensors_by_path(nest: Any) -> list[tuple[str, torch.Tensor]]:
    """Every tensor of a nest with its path, such as `0.mask`, in the order of `map_tensors`."""
    found: list[tuple[str, torch.Tensor]] = []
    _collect(nest, "", found)
    return found


def _collect(nest: Any, path: str, found: list[tuple[str, torch.Tensor]]) -> None:
    if isinstance(nest, torch.Tensor):
        found.append((path, nest))
        return
    for key, value in _items(nest):
        _collect(value, f"{path}.{key}" if path else str(key), found)


def _items(nest: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(nest, list | tuple):
        return enumerate(nest)
    if isinstance(nest, Mapping):
        return nest.items()
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        return [(f.name, getattr(nest, f.name)) for f in dataclasses.fields(nest) if f.init]
    return ()


def has_tensor(kind: type, nest: Any) -> bool:
    if isinstance(nest, torch.Tensor):
        return isinstance(nest, kind)
    if type(nest) is tuple or type(nest) is list:
        for value in nest:  # noqa: SIM110  a generator takes twice as long
            if has_tensor(kind, value):
                return True
        return False
    return any(has_tensor(kind, value) for _, value in _items(nest))


def tensors_in(arguments: Any) -> Iterator[torch.Tensor]:
    """Every tensor among the arguments or the results of a function of torch, in order."""
    if isinstance(arguments, torch.Tensor):
        yield arguments
    elif isinstance(arguments, list | tuple):
        for one in arguments:
            yield from tensors_in(one)
    elif isinstance(arguments, dict):
        for one in arguments.values():
            yield from tensors_in(one)
    elif isinstance(arguments, slice):
        yield from tensors_in((arguments.start, arguments.stop, arguments.step))


def copied(nest: Any) -> Any:
    """Return a copy of `nest`; `deepcopy` fails on sparse tensors and separates jagged ones from their lengths."""
    found = (*(tensor for _, tensor in tensors_by_path(nest)), *hidden_in(nest))
    odd = [one for one in found if isinstance(one, torch.Tensor) and (one.layout != torch.strided or one.is_nested)]
    return deepcopy(nest, {id(one): one.detach().clone() for one in odd})


PARTS = {
    torch.sparse_coo: ("indices", "values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
    torch.jagged: ("values", "offsets"),
}


def strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the strided tensors that `tensor` is made of: itself alone, or those of another layout."""
    if tensor.layout == torch.strided:
        return [*tensor.unbind()] if tensor.is_nested else [tensor]
    whole = tensor.coalesce() if tensor.layout == torch.sparse_coo else tensor
    return [getattr(whole, name)() for name in PARTS.get(tensor.layout, ())]


def hidden_in(nest: Any) -> Iterator[Any]:
    """What `map_tensors` does not see: tensors in attributes of objects in a nest; and iterators, which are not asked.

    Modules, classes and functions are not looked into.
    """
    left, seen = [(nest, False)], set[int]()
    while left:
        one, hidden = left.pop()
        if isinstance(one, torch.Tensor):
            if hidden:
                yield one
        elif isinstance(one, Iterator):
            if not hidden:
                yield one
        elif not isinstance(one, NOT_LOOKED_INTO) and id(one) not in seen:
            seen.add(id(one))
            items = [value for _, value in _items(one)]
            known = {id(value) for value in items}
            left += [(value, hidden) for value in items]
            left += [(value, True) for value in _attributes(one) if id(value) not in known]


NOT_LOOKED_INTO = (bool, int, float, complex, str, bytes, type(None), type, torch.nn.Module, FunctionType, ModuleType)


def _attributes(one: Any) -> Iterator[Any]:
    yield from getattr(one, "__dict__", {}).values()
    for kind in type(one).__mro__:
        names = vars(kind).get("__slots__", ())
        yield from (getattr(one, name, None) for name in ([names] if isinstance(names, str) else names))
