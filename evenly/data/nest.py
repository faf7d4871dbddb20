"""Nests of tensors: what a `collate` may return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def map_tensors(function: Callable[[torch.Tensor], Any], nest: Any) -> Any:
    """`nest` with every tensor replaced by `function` of it.

    A nest is a tensor, a mapping, list, tuple, named tuple, slice or dataclass instance of nests, or anything else,
    which stays as it is. Containers keep their types.
    """
    if isinstance(nest, torch.Tensor):
        return function(nest)
    if isinstance(nest, Mapping):
        kind: Any = type(nest)
        return kind({key: map_tensors(function, value) for key, value in nest.items()})
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


def tensors_by_path(nest: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a nest with its path, such as `0.mask`, in the order of `map_tensors`."""
    if isinstance(nest, torch.Tensor):
        yield path, nest
        return
    for key, value in _items(nest):
        yield from tensors_by_path(value, f"{path}.{key}" if path else str(key))


def _items(nest: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(nest, Mapping):
        yield from nest.items()
    elif isinstance(nest, list | tuple):
        yield from enumerate(nest)
    elif dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        yield from ((f.name, getattr(nest, f.name)) for f in dataclasses.fields(nest) if f.init)


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
