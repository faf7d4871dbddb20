"""Building a model that no rank can hold: its own constructor, the same values, one large tensor whole at a time.

The job's constructor and initialisers run as they are on every rank, and draw the same random numbers. While they run,
every large storage but the last one used is *parked*: each rank keeps one slice of its bytes and frees the rest. An
operation that reads a parked tensor finds it whole again, put together from the slices of all ranks; one that
overwrites it altogether needs no slices. Storages are parked and not tensors, so that views and tied weights stay views
and tied.

Order: `with` the constructor and what comes after it; `settle` when the model is built, since from then on large
storages may differ between ranks (shards) and are no longer parked; what is still parked when the block ends is made
whole.

All ranks do the same operations in the same order: restoring is a collective. Not seen is who reads a tensor's memory
past torch (`numpy()` of a large parameter in a constructor).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from evenly.comm.groups import Group
from evenly.comm.operations import broadcast, even_sizes
from evenly.parallel.memory import of_subclasses

LEAST_BYTES = 1 << 20  # smaller storages stay where they are

_aten = torch.ops.aten
OVERWRITES = {_aten.normal_, _aten.uniform_, _aten.zero_, _aten.fill_, _aten.copy_, _aten.random_, _aten.bernoulli_}
# Other views than these want their storage to be there.
SHAPES_ONLY = {
    _aten.detach, _aten.alias, _aten.view,
    _aten.new_zeros, _aten.new_empty, _aten.new_empty_strided, _aten.new_ones, _aten.new_full,
    _aten.zeros_like, _aten.empty_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like,
}  # fmt: skip


@dataclass(eq=False)
class _Large:
    """A large storage. `slice` is this rank's part of its bytes while it is parked, None while it is whole."""

    storage: weakref.ref[torch.UntypedStorage]
    size: int
    slice: torch.Tensor | None = None
    fingerprint: int = 0  # of the bytes when they were parked last


class Parking(TorchDispatchMode):
    """A context manager; `group` are the ranks that build the same model."""

    def __init__(self, group: Group, *, least_bytes: int | None = None) -> None:
        super().__init__()
        self._group = group
        self._least_bytes = LEAST_BYTES if least_bytes is None else least_bytes
        self._large: dict[int, _Large] = {}  # by id of the storage, the one used last at the end
        self._settled = False

    def settle(self) -> None:
        """The model is built: what is allocated from now on stays as it is."""
        self._settled = True

    def fingerprint(self, tensor: torch.Tensor) -> int | None:
        """A sum over the bytes of the storage of a parked tensor, None of any other."""
        large = self._large.get(id(tensor.untyped_storage()))
        return None if large is None or large.slice is None else large.fingerprint

    @property
    def parked_bytes(self) -> int:
        """What all ranks together hold in slices."""
        return sum(large.size for large in self._large.values() if large.slice is not None)

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        for large in [*self._large.values()]:
            # After an error the others may be gone; the memory must be there even so, for whoever prints a tensor.
            self._restore(large, fill=problem[0] is None)
        self._large.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (other := of_subclasses(func, types, args, kwargs)) is not None:
            return other
        given = list(_plain_tensors((args, kwargs or {})))
        for position, tensor in enumerate([] if func.overloadpacket in SHAPES_ONLY else given):
            large = self._large.get(id(tensor.untyped_storage()))
            if large is not None:
                covers = tensor.numel() * tensor.element_size() == large.size
                overwritten = position == 0 and covers and func.overloadpacket in OVERWRITES
                self._use(large, fill=not overwritten)
        results = func(*args, **(kwargs or {}))
        if not self._settled:
            for tensor in _plain_tensors(results):
                self._admit(tensor)
        self._park_all_but_the_last()
        return results

    def _use(self, large: _Large, *, fill: bool) -> None:
        storage = self._restore(large, fill=fill)
        if storage is not None:
            self._large[id(storage)] = self._large.pop(id(storage))

    def _admit(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._large and storage.nbytes() >= self._least_bytes and storage.resizable():
            self._large[key] = _Large(weakref.ref(storage), storage.nbytes())
            weakref.finalize(storage, self._large.pop, key, None)

    def _park_all_but_the_last(self) -> None:
        whole = [large for large in self._large.values() if large.slice is None]
        for large in whole[:-1]:
            self._park(large)

    def _park(self, large: _Large) -> None:
        storage = large.storage()
        if storage is None:
            return
        content = _bytes_of(storage)
        if not self._settled:
            large.fingerprint = _sum_of_bytes(content)
        large.slice = content.split(even_sizes(large.size, self._group.size))[self._group.position].clone()
        storage.resize_(0)

    def _restore(self, large: _Large, *, fill: bool) -> torch.UntypedStorage | None:
        storage = large.storage()
        if storage is not None and large.slice is not None:
            storage.resize_(large.size)
            if fill:
                parts = _bytes_of(storage).split(even_sizes(large.size, self._group.size))
                parts[self._group.position].copy_(large.slice)
                for source, part in enumerate(parts):
                    broadcast(part, source, self._group)
            large.slice = None
        return storage


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # pyright: ignore[reportCallIssue, reportArgumentType]


def _sum_of_bytes(content: torch.Tensor) -> int:
    words = content.numel() // 8 * 8
    return int(content[:words].view(torch.int64).sum()) + int(content[words:].sum(dtype=torch.int64))


def _plain_tensors(nest: Any) -> Iterator[torch.Tensor]:
    if isinstance(nest, torch.Tensor):
        if nest.device.type == "cpu" and nest.layout is torch.strided:
            yield nest
    elif isinstance(nest, dict):
        for value in nest.values():
            yield from _plain_tensors(value)
    elif isinstance(nest, list | tuple):
        for value in nest:
            yield from _plain_tensors(value)
