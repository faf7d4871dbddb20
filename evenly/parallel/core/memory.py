"""Memory, counted: the bytes of live tensors, by device and category, without asking an allocator.

The counter sees every operation while it is active, and every storage that one allocates from then until it is
freed. It counts what tensors hold, not what an allocator rounds that up to. Storages that exist already are counted
once they are claimed; memory that numpy or a library allocates is not seen.

A storage lies on the device of the tensors that it was computed from, or where there are none on the device at work
(`on`): so devices of one process are distinguished even where they are virtual and share the CPU's memory. An operation
that mixes tensors of several devices, which GPUs would refuse, is noted.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch

from evenly.data.nest import tensors_in
from evenly.torch_private import TorchDispatchMode, has_memory, is_fake, without_subclasses

Category = Literal["parameters", "gradients", "sums", "optimizer", "activations", "temporaries"]

HOST = -1  # where batches are read: its tensors are counted apart, and go with any device's on the CPU

# The number of the device at work among those of this process, and whether tensors of others are carried to it.
_working: ContextVar[tuple[int, bool]] = ContextVar("working", default=(0, False))


class _On:
    """Sets what is at work; a generator would take three times as long, and a step does this a few times."""

    def __init__(self, working: tuple[int, bool]) -> None:
        self._now = working

    def __enter__(self) -> None:
        self._before = _working.set(self._now)

    def __exit__(self, *_: object) -> None:
        _working.reset(self._before)


def on(number: int, *, carrying: bool = False) -> AbstractContextManager[None]:
    """Within, device `number` is at work; `carrying` if it takes over tensors of other devices."""
    return _On((number, carrying))


@dataclass(eq=False)
class _Allocation:
    """A live storage."""

    number: int
    category: Category
    size: int  # bytes


class MemoryCounter(TorchDispatchMode):
    """A context manager; `now` and `peaks` tell bytes by device number and category, also after leaving it.

    category: of what is allocated from now on; the caller sets it as the step goes on.
    mixed:    operations on tensors of several devices, whose results are counted on the lowest of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.category: Category = "activations"
        self.mixed: set[str] = set()
        self.now: Counter[tuple[int, Category]] = Counter()
        self._totals: Counter[int] = Counter()
        self._peaks: dict[int, tuple[int, dict[Category, int]]] = {}
        self._allocations: dict[int, _Allocation] = {}  # by id of the storage, for as long as it lives

    def track(self, tensors: Iterable[torch.Tensor], category: Category, number: int = 0) -> None:
        """Counts the storages of `tensors` as `category` on device `number` from now on, whatever they were."""
        for tensor in tensors:
            allocation = self._hold(tensor, number)
            if allocation is not None:
                self._count(allocation, -allocation.size)
                allocation.category, allocation.number = category, number
                self._count(allocation, allocation.size)

    @property
    def peaks(self) -> Mapping[int, dict[Category, int]]:
        """By device number, the bytes of each category at the moment when that device had most."""
        return {number: dict(categories) for number, (_, categories) in sorted(self._peaks.items())}

    def peak_bytes(self, number: int = 0) -> int:
        return self._peaks.get(number, (0, {}))[0]

    def __enter__(self) -> MemoryCounter:
        self._resize = torch.UntypedStorage.resize_
        counter, resize = self, self._resize

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if (allocation := counter._allocations.get(id(storage))) is not None:
                counter._count(allocation, -allocation.size)
                # So FSDP frees whole parameters, and takes them back.
                allocation.size, allocation.category = size, "parameters" if size == 0 else allocation.category
                counter._count(allocation, size)
            return result

        torch.UntypedStorage.resize_ = counted  # pyright: ignore[reportAttributeAccessIssue]
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        torch.UntypedStorage.resize_ = self._resize

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return that code compiled by the job is compiled, and run, without this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (other := of_subclasses(func, types, args, kwargs)) is not None:
            return other  # DTensors are counted by the operations on their local tensors
        with without_subclasses():
            working, carrying = _working.get()
            found = set() if carrying else self._numbers((args, kwargs or {})) - {HOST}
            if len(found) > 1:
                self.mixed.add(f"{func} of devices {sorted(found)}")
            number = min(found, default=working)
            results = func(*args, **(kwargs or {}))
            for tensor in tensors_in(results):
                self._hold(tensor, number)
            return results

    def _numbers(self, nest: Any) -> set[int]:
        """The devices of the counted tensors of `nest`; numbers (scalar tensors) go with any device."""
        counted = (t for t in tensors_in(nest) if has_memory(t) and t.dim() > 0)
        found = (self._allocations.get(id(t.untyped_storage())) for t in counted)
        return {one.number for one in found if one is not None}

    def _hold(self, tensor: torch.Tensor, number: int) -> _Allocation | None:
        if is_fake(type(tensor)):  # made of nothing, as a stage makes forms: no memory
            return None
        if not has_memory(tensor):
            return None
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._allocations:
            allocation = self._allocations[key] = _Allocation(number, self.category, storage.nbytes())
            weakref.finalize(storage, self._release, key)
            self._count(allocation, allocation.size)
        return self._allocations[key]

    def _release(self, key: int) -> None:
        allocation = self._allocations.pop(key)
        self._count(allocation, -allocation.size)

    def _count(self, allocation: _Allocation, size: int) -> None:
        self.now[allocation.number, allocation.category] += size
        self._totals[allocation.number] += size
        if size > 0:
            self._note_peak(allocation.number)

    def _note_peak(self, number: int) -> None:
        total = self._totals[number]
        if total > self._peaks.get(number, (0, {}))[0]:
            categories: dict[Category, int] = {c: size for (n, c), size in self.now.items() if n == number and size}
            self._peaks[number] = (total, categories)


def of_subclasses(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """What a mode that only knows plain tensors answers to an operation on others; None where all are plain.

    Fake tensors, with which DTensor asks for shapes, have no memory: the operation runs and is not seen. Other kinds
    get their turn, and come back with the tensors inside.
    """
    if all(kind is torch.Tensor or issubclass(kind, torch.nn.Parameter) for kind in types):
        return None
    if any(map(is_fake, types)):
        return func(*args, **(kwargs or {}))
    return NotImplemented


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from map(local, tensors_in(state))


def local(tensor: torch.Tensor) -> torch.Tensor:
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
