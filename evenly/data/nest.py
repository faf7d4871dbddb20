"""Nests of tensors: what a `collate` may return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], nest: Any) -> Any:
    """`nest` with every tensor replaced by `function` of it.

    A nest is a tensor, a mapping, list, tuple, named tuple or dataclass instance of nests, or anything else,
    which stays as it is. Containers keep their types.
    """
    if isinstance(nest, torch.Tensor):
        return function(nest)
    if isinstance(nest, Mapping):
        kind: Any = type(nest)
        return kind({key: map_tensors(function, value) for key, value in nest.items()})
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(map_tensors(function, value) for value in nest))
    if isinstance(nest, list | tuple):
        return type(nest)(map_tensors(function, value) for value in nest)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        parts = {f.name: map_tensors(function, getattr(nest, f.name)) for f in dataclasses.fields(nest) if f.init}
        return dataclasses.replace(nest, **parts)
    return nest
