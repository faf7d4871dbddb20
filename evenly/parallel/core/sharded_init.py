"""Building a model that no rank can hold: its own constructor, the same values, one large tensor whole at a time.

The job's constructor and initialisers run as they are on every rank, and draw the same random numbers. While they run,
every large storage but the last one used is *offloaded*: each rank keeps one slice of its bytes and frees the rest. An
operation that reads a offloaded tensor finds it whole again, put together from the slices of all ranks; one that
overwrites it altogether needs no slices. Storages are offloaded and not tensors, so that views and tied weights stay
views and tied.

Order: `with` the constructor and what comes after it; `freeze` when the model is built, since from then on large
storages may differ between ranks (shards) and are no longer offloaded; what is still offloaded when the block ends is
made whole.

All ranks do the same operations in the same order: restoring is a collective. Who reads memory past torch's operations
(numpy, a deep copy) finds it whole too, and from then on it stays so. Not seen is who pickles a large tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from evenly.comm.collectives import broadcast
from evenly.comm.groups import Group
from evenly.comm.transport import even_sizes
from evenly.data.nest import tensors_in
from evenly.parallel.core.memory import of_subclasses
from evenly.parallel.core.mutation_guard import fingerprint_of_bytes
from evenly.torch_private import TorchDispatchMode

LEAST_BYTES = 1 << 20  # smaller storages stay where they are
BYTES_AT_ONCE = 1 << 22  # that are read of a file
NO_STORAGE = 0

_aten = torch.ops.aten
OVERWRITES = {_aten.normal_, _aten.uniform_, _aten.zero_, _aten.fill_, _aten.copy_, _aten.random_, _aten.bernoulli_}
# Other views than these want their storage to be there.
SHAPES_ONLY = {
    _aten.detach, _aten.alias, _aten.view,
    _aten.new_zeros, _aten.new_empty, _aten.new_empty_strided, _aten.new_ones, _aten.new_full,
    _aten.zeros_like, _aten.empty_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like,
}  # fmt: skip
READ_MEMORY = {
    torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.tolist, torch.Tensor.data_ptr, torch.Tensor.__dlpack__,
    torch.Tensor.__deepcopy__, torch.Tensor.share_memory_,
}  # fmt: skip


@dataclass(eq=False)
class _Large:
    """A large storage. `slice` is this rank's part of its bytes while it is offloaded, None while it is whole."""

    storage: weakref.ref[torch.UntypedStorage]
    size: int
    pinned: bool  # never offloaded
    slice: torch.Tensor | None = None
    fingerprint: int = 0  # of the bytes when they were offloaded last


class ShardedInit(TorchDispatchMode):
    """A context manager; `group` are the ranks that build the same model."""

    def __init__(self, group: Group, *, least_bytes: int | None = None) -> None:
        super().__init__()
        self._group = group
        self._least_bytes = LEAST_BYTES if least_bytes is None else least_bytes
        self._large: dict[int, _Large] = {}  # by id of the storage, the one used last at the end
        self._frozen = False
        self._reader = _ShardReader(self)

    def freeze(self) -> None:
        """The model is built: what is allocated from now on stays as it is."""
        self._frozen = True

    @property
    def has_large(self) -> bool:
        return bool(self._large)

    def fingerprint(self, tensor: torch.Tensor) -> int | None:
        """The fingerprint of the storage of an offloaded tensor; None for any other."""
        large = self._large.get(_key(tensor))
        return None if large is None or large.slice is None else large.fingerprint

    def write(self, tensor: torch.Tensor, read: Callable[[int, int], torch.Tensor]) -> bool:
        """Fills this rank's slice of an offloaded tensor; returns False, with nothing done, for any other.

        read: given the first byte of `tensor` and that behind the last, yields these bytes (1D, uint8). No collective.
        """
        large = self._large.get(_key(tensor))
        if large is None or large.slice is None or not tensor.is_contiguous():
            return False
        sizes = even_sizes(large.size, self._group.size)
        offset = sum(sizes[: self._group.position])  # of the slice in the storage
        begin = int(tensor.storage_offset()) * tensor.itemsize  # of the tensor in it
        first, end = max(offset, begin), min(offset + len(large.slice), begin + tensor.nbytes)
        for start in range(first, end, BYTES_AT_ONCE):
            stop = min(start + BYTES_AT_ONCE, end)
            large.slice[start - offset : stop - offset] = read(start - begin, stop - begin)
        return True

    @property
    def offloaded_bytes(self) -> int:
        return sum(large.size for large in self._large.values() if large.slice is not None)

    def __enter__(self) -> ShardedInit:
        self._reader.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        self._reader.__exit__(*problem)
        for large in [*self._large.values()]:
            # After an error the others may be gone; the memory must be there even so, for whoever prints a tensor.
            self._restore(large, fill=problem[0] is None)
        self._large.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (other := of_subclasses(func, types, args, kwargs)) is not None:
            return other
        if func.overloadpacket not in SHAPES_ONLY:
            given = list(tensors_in((args, kwargs or {})))
            self._offload_before({_key(tensor) for tensor in given})
            written = given.pop(0) if func.overloadpacket in OVERWRITES else None
            # What is read comes first: what is overwritten may be read too (`w.copy_(w)`).
            for tensor in given:
                self._use(tensor, fill=True)
            if written is not None:
                self._use(written, fill=not self._covers(written))
        results = func(*args, **(kwargs or {}))
        if not self._frozen:
            for tensor in tensors_in(results):
                self._admit(tensor, pinned=func.overloadpacket is _aten.set_)
        self._offload_all_but_the_last()
        return results

    def pin(self, tensor: torch.Tensor) -> None:
        """Makes `tensor` whole for good: others know its memory."""
        tensor.unsqueeze(0)  # an operation that finds it whole
        if large := self._large.get(_key(tensor)):
            large.pinned = True

    def _use(self, tensor: torch.Tensor, *, fill: bool) -> None:
        """Makes the storage of `tensor`, if it is offloaded, whole, and the one used last."""
        key = _key(tensor)
        if key in self._large:
            large = self._large[key] = self._large.pop(key)
            self._restore(large, fill=fill)

    def _covers(self, tensor: torch.Tensor) -> bool:
        large = self._large.get(_key(tensor))
        return large is not None and tensor.is_contiguous() and tensor.nbytes == large.size

    def _admit(self, tensor: torch.Tensor, *, pinned: bool) -> None:
        key = _key(tensor)
        if key == NO_STORAGE or key in self._large:
            return
        storage = tensor.untyped_storage()
        if storage.nbytes() >= self._least_bytes:
            self._large[key] = _Large(weakref.ref(storage), storage.nbytes(), pinned)
            weakref.finalize(storage, self._large.pop, key, None)

    def _offload_before(self, needed: Collection[int]) -> None:
        """Makes room where some of these keys are of offloaded storages, which are about to be made whole."""
        if any(self._large[key].slice is not None for key in needed if key in self._large):
            for key, large in [*self._large.items()]:
                if key not in needed and large.slice is None and not large.pinned:
                    self._offload(large)

    def _offload_all_but_the_last(self) -> None:
        whole = [large for large in self._large.values() if large.slice is None and not large.pinned]
        for large in whole[:-1]:
            self._offload(large)

    def _offload(self, large: _Large) -> None:
        storage = large.storage()
        if storage is None or not storage.resizable():  # numpy, say, has its address
            return
        content = _bytes_of(storage)
        if not self._frozen:
            large.fingerprint = fingerprint_of_bytes(content)
        large.slice = content.split(even_sizes(large.size, self._group.size))[self._group.position].clone()
        storage.resize_(0)

    def _restore(self, large: _Large, *, fill: bool) -> None:
        storage = large.storage()
        if storage is not None and large.slice is not None:
            storage.resize_(large.size)
            if fill:
                parts = _bytes_of(storage).split(even_sizes(large.size, self._group.size))
                parts[self._group.position].copy_(large.slice)
                for source, part in enumerate(parts):
                    broadcast(part, source, self._group)
            large.slice = None


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # pyright: ignore[reportCallIssue, reportArgumentType]


class _ShardReader(TorchFunctionMode):
    """Makes whole what is about to be read past torch's operations: by numpy, as a list, as bytes to copy."""

    def __init__(self, init: ShardedInit) -> None:
        super().__init__()
        self._init = init

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READ_MEMORY:
            self._init.pin(args[0])
        return func(*args, **(kwargs or {}))


def _key(tensor: torch.Tensor) -> int:
    """The key of the storage of `tensor`; `NO_STORAGE` where it has none in this process's memory."""
    plain = tensor.device.type == "cpu" and tensor.layout is torch.strided
    return id(tensor.untyped_storage()) if plain else NO_STORAGE
