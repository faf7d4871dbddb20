"""Collectives that say nothing: what they give has its shape and takes its memory, and nobody is asked for it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from evenly.comm import operations
from evenly.comm.groups import Group
from evenly.comm.transport import even_sizes


def fake_group(name: str, size: int, position: int = 0) -> Group:
    """A group of so many ranks of which there is only this one; good for what runs within `fake_collectives`."""
    return Group(name, range(size), own=position, handle=None, device=torch.device("cpu"))


class _CompletedWork:
    def __init__(self, result: Callable[[], Any]) -> None:
        self._result = result

    def wait(self) -> Any:
        return self._result()


@contextmanager
def fake_collectives(summed: Callable[[int], object]) -> Generator[None]:
    """Within, the collectives that gradients flow through allocate what they would on the CPU, and do nothing.

    summed: gets the bytes of each tensor that would be added up over ranks.
    """

    def all_reduce(tensor: torch.Tensor, *_: Any, **__: Any) -> _CompletedWork:
        summed(tensor.nbytes)
        return _CompletedWork(lambda: tensor)

    instead: dict[Any, Callable[..., Any]] = {
        operations.all_reduce: all_reduce,
        operations.all_gather: _all_gather,
        operations.reduce_scatter: _reduce_scatter,
    }
    before = {operation: operation.begin for operation in instead}
    for operation, begin in instead.items():
        operation.begin = begin
    try:
        yield
    finally:
        for operation, begin in before.items():
            operation.begin = begin


def _all_gather(
    tensor: torch.Tensor, group: Group, *, dim: int = 0, sizes: Sequence[int] | None = None, label: str = ""
) -> _CompletedWork:
    lengths = [tensor.shape[dim]] * group.size if sizes is None else sizes
    longest, own = max(lengths), tensor.detach().movedim(dim, 0)
    if own.shape[0] < longest:
        own = torch.cat([own, own.new_empty(longest - own.shape[0], *own.shape[1:])])
    own = own.contiguous()
    whole = own.new_empty(group.size * longest, *own.shape[1:])
    starts = range(0, group.size * longest, longest)
    pieces = [whole[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    return _CompletedWork(lambda: (whole if min(lengths) == longest else torch.cat(pieces)).movedim(0, dim))


def _reduce_scatter(
    tensor: torch.Tensor,
    group: Group,
    *_: Any,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    into: torch.Tensor | None = None,
    adding: bool = False,
    label: str = "",
) -> _CompletedWork:
    lengths = even_sizes(tensor.shape[dim], group.size) if sizes is None else sizes
    sent = tensor.movedim(dim, 0).contiguous()
    received = [torch.empty_like(sent)]  # the ranks' pieces

    def wait() -> torch.Tensor:
        shape = (lengths[group.position], *sent.shape[1:])
        total = sent.new_empty(shape, dtype=sent.dtype) if into is None else into
        received.clear()
        return total.movedim(0, dim).contiguous()

    return _CompletedWork(wait)
