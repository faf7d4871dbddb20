"""What a block leaves behind besides what it returns: in what it is given, and in what its modules hold.

Where its result is known and the block is skipped, what it would leave behind has to be there all the same.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
CONTAINERS = (list, dict, set, deque)
OPAQUE = (torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
OF_EVERY_MODULE = {*vars(nn.Module())}
NOTHING = object()  # where there was no such name


class LeftBehind:
    """Made before a block `module` runs on `arguments`; says afterwards what it has left behind."""

    def __init__(self, module: nn.Module, arguments: Any) -> None:
        self._own = {id(one) for one in module.modules()}
        seen: set[int] = set()
        self._given = [(one, _items(one)) for one in _changeable([arguments], seen)]
        self._attributes = [(one, _items(one)) for one in _changeable(module.modules(), seen)]

    def values(self) -> bool:
        """Whether it has changed what it was given, a list, dict or set that it holds, or a number in an object.

        What a module of the block notes where nothing was before, as at its first call, stays there: it does not count.
        """
        if any(_changes(self._given)):
            return True
        return any(
            isinstance(one, CONTAINERS)
            or not (isinstance(value, torch.Tensor) or (id(one) in self._own and (before is None or before is NOTHING)))
            for one, value, before in _changes(self._attributes)
        )

    def tensors(self) -> bool:
        """Whether it has left a tensor in an attribute of a module or an object that it holds."""
        return any(isinstance(value, torch.Tensor) for _, value, _ in _changes(self._attributes))


def _changes(found: Iterable[tuple[Any, dict[Any, Any]]]) -> Iterator[tuple[Any, Any, Any]]:
    """What was changed, with the value that is in it, and the one before."""
    for one, before in found:
        after = _items(one)
        for name in {**before, **after}:
            pair = after.get(name, NOTHING), before.get(name, NOTHING)
            if not _same(*pair):
                yield one, *pair


def _changeable(roots: Iterable[Any], seen: set[int]) -> Iterator[Any]:
    left = [*roots]
    while left:
        one = left.pop()
        if isinstance(one, (*PLAIN, *OPAQUE)) or id(one) in seen:
            continue
        seen.add(id(one))
        if not isinstance(one, tuple):
            yield one
        left += _items(one).values()


def _items(one: Any) -> dict[Any, Any]:
    if isinstance(one, dict):
        return {**one}
    if isinstance(one, (*CONTAINERS, tuple)):
        return dict(enumerate(one))
    held: dict[str, Any] = getattr(one, "__dict__", {})
    own = held.keys() - OF_EVERY_MODULE if isinstance(one, nn.Module) else held
    return {name: held[name] for name in own}


def _same(value: Any, before: Any) -> bool:
    if value is before:
        return True
    if isinstance(value, list | tuple) and isinstance(before, list | tuple):
        return len(value) == len(before) and all(map(_same, value, before))
    return isinstance(value, PLAIN) and type(value) is type(before) and value == before
