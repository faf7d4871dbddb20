"""Lists and dicts that a part of the model is given, and changes.

Where its arguments are taken apart and put together again (by `fully_shard`, and where a stage fills in what other ones
have sent), the part gets containers of its own: what it appends to a list, counts in one or caches in a dict would be
lost for its caller.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Pair = tuple[Any, Any, Any]  # the caller's container, the part's, and a copy of the latter before the forward


class ArgumentContainers:
    """Carries what a unit changes in its containers over to those of its caller. Made after `fully_shard`."""

    def __init__(self, unit: nn.Module) -> None:
        self._given: list[tuple[Any, Any]] = []  # of calls that are about to begin
        self._pairs: list[list[Pair]] = []  # of calls that are under way, the innermost last
        self.handles: list[Any] = [
            unit.register_forward_pre_hook(self._note_given, prepend=True, with_kwargs=True),
            unit.register_forward_pre_hook(self._pair, with_kwargs=True),
            # Also where a forward is broken off, as one that is computed again is once it has what it is for.
            unit.register_forward_hook(self._carry_over, prepend=True, always_call=True),
        ]

    def _note_given(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._given.append((args, kwargs))

    def _pair(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._pairs.append([*_pairs_of(self._given.pop(), (args, kwargs))])

    def _carry_over(self, _: nn.Module, __: Any, ___: Any) -> None:
        _carry_over(self._pairs.pop() if self._pairs else ())


@contextmanager
def carried_over(callers: Any, own: Any) -> Generator[None]:
    """Within, a part of the model runs on `own`, a nest as that of its caller; what it changes is changed there too."""
    pairs = [*_pairs_of(callers, own)]
    try:
        yield
    finally:
        _carry_over(pairs)


def _carry_over(pairs: Iterable[Pair]) -> None:
    for callers, own, before in pairs:
        if isinstance(own, dict):
            _carry_over_dict(callers, own, before)
        elif len(own) != len(before) or any(a is not b for a, b in zip(own, before, strict=True)):
            callers[:] = [callers[n] if n < len(before) and item is before[n] else item for n, item in enumerate(own)]


def _carry_over_dict(callers: dict[Any, Any], own: dict[Any, Any], before: dict[Any, Any]) -> None:
    for key in before.keys() - own.keys():
        del callers[key]
    for key, value in own.items():
        if key not in before or value is not before[key]:
            callers[key] = value


def _pairs_of(callers: Any, own: Any) -> Iterator[Pair]:
    if isinstance(callers, list | tuple) and isinstance(own, list | tuple):
        if callers is not own and isinstance(callers, list):
            yield callers, own, [*own]
        for mine, its in zip(callers, own, strict=False):
            yield from _pairs_of(mine, its)
    elif isinstance(callers, dict) and isinstance(own, dict):
        if callers is not own:
            yield callers, own, {**own}
        for key in callers.keys() & own.keys():
            yield from _pairs_of(callers[key], own[key])
