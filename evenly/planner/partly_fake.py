"""Fake tensors together with tensors that have numbers, so that shapes may follow from the numbers of a batch.

What is computed of tensors that have numbers alone (masks and positions of a batch) has numbers, and code may look at
them. What meets a fake tensor is fake.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from evenly.data.nest import map_tensors, tensors_in
from evenly.torch_private import PACK_PADDED_SEQUENCE, TorchDispatchMode, fake_mode, is_fake, without_subclasses

_aten = torch.ops.aten
# The shape of what these return follows from the numbers of what comes after the first argument.
SHAPED_BY_OTHERS = {_aten.index, _aten.masked_select, PACK_PADDED_SEQUENCE}


class PartlyFake(TorchDispatchMode):
    """Within, operations on fake tensors return fake ones, and all others compute."""

    def __init__(self) -> None:
        super().__init__()
        self.fakes = fake_mode()
        self._overwritten: set[int] = set()  # ids of storages that a fake tensor was written into

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_subclasses():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func.is_view or not self._any_fake((args, kwargs)):
            return func(*args, **kwargs)
        if func.overloadpacket in SHAPED_BY_OTHERS and not self._any_fake((args[1:], kwargs)):
            results = func(_empty(args[0]), *args[1:], **kwargs)
            number = next(tensors_in(results))
            return map_tensors(lambda made: self._faked(made) if made is number else made, results)
        fakes = {id(one): self._faked(one) for one in tensors_in((args, kwargs))}
        given = {id(fakes[id(one)]): one for one in tensors_in((args, kwargs))}

        def faked(tensor: torch.Tensor) -> torch.Tensor:
            return fakes[id(tensor)]

        with self.fakes:
            results = func(*map_tensors(faked, args), **map_tensors(faked, kwargs))
        return map_tensors(lambda made: self._written(given[id(made)]) if id(made) in given else made, results)

    def _faked(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor of its shape; the tensor itself if it is one."""
        if is_fake(type(tensor)):
            return tensor
        with self.fakes:
            return _empty(tensor)

    def _written(self, target: torch.Tensor) -> torch.Tensor:
        """Notes that an operation on a fake tensor has changed `target`: its numbers are gone."""
        storage = target.untyped_storage()
        if not is_fake(type(target)) and id(storage) not in self._overwritten:
            self._overwritten.add(id(storage))
            weakref.finalize(storage, self._overwritten.discard, id(storage))
        return target

    def _any_fake(self, nest: Any) -> bool:
        return any(is_fake(type(one)) or id(one.untyped_storage()) in self._overwritten for one in tensors_in(nest))


def _empty(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
