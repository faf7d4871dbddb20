"""Tensors in the host's memory whose numbers nobody writes or reads: plain ones, for code that changes their class.

Operations on *hollow* tensors compute nothing: what they return is hollow too, allocated and left as it is, so that the
machine gives it no memory (pages that are never touched). Only views are made by torch itself. Shapes are those that
fake tensors (`model.fake`) would have. What is computed from a batch alone, masks and places, has its
numbers, and code may look at them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from evenly.data.nest import map_tensors, tensors_in
from evenly.torch_private import (
    PACK_PADDED_SEQUENCE,
    RESHAPE_ALIAS,
    UNSAFE_VIEW,
    TorchDispatchMode,
    fake_mode,
    memory_key,
    without_subclasses,
)

_aten = torch.ops.aten
# Not views by their schema, and no copies.
SAME_MEMORY = {
    UNSAFE_VIEW, RESHAPE_ALIAS, _aten.detach, _aten.alias, _aten.lift_fresh, _aten.set_,
}  # fmt: skip


# Of the numbers of what follows the first argument, not of its own, the shape of what these return is made.
SHAPED_BY_OTHERS = {_aten.index, _aten.masked_select, PACK_PADDED_SEQUENCE}


class Hollow(TorchDispatchMode):
    """Within, operations allocate what they return and compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._fakes = fake_mode()
        self._hollow: set[int] = set()  # ids of storages

    def know(self, tensors: Iterable[torch.Tensor]) -> None:
        """Marks these as hollow."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if id(storage) not in self._hollow:
                self._hollow.add(id(storage))
                weakref.finalize(storage, self._hollow.discard, id(storage))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_subclasses():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func.is_view or func.overloadpacket in SAME_MEMORY:
            return func(*args, **kwargs)
        if not self._any_hollow((args, kwargs)):
            return func(*args, **kwargs)
        if func.overloadpacket in SHAPED_BY_OTHERS and not self._any_hollow((args[1:], kwargs)):
            results = func(*args, **kwargs)
            self.know([next(iter(tensors_in(results)))])
            return results
        given: dict[int, torch.Tensor] = {}
        fakes: dict[int, torch.Tensor] = {}

        def faked(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in fakes:
                fakes[id(tensor)] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
                given[id(fakes[id(tensor)])] = tensor
            return fakes[id(tensor)]

        with self._fakes:
            results = func(*map_tensors(faked, args), **map_tensors(faked, kwargs))
        storages = {memory_key(fake): given[id(fake)] for fake in tensors_in([*fakes.values()])}

        def real(fake: torch.Tensor) -> torch.Tensor:
            if id(fake) in given:
                self.know([given[id(fake)]])  # what was written into it has no numbers
                return given[id(fake)]
            if (base := storages.get(memory_key(fake))) is not None:
                return base.as_strided(fake.shape, fake.stride(), fake.storage_offset())
            made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="cpu")
            self.know([made])
            return made

        return map_tensors(real, results)

    def _any_hollow(self, nest: Any) -> bool:
        return any(id(tensor.untyped_storage()) in self._hollow for tensor in tensors_in(nest))
