"""Fake tensors together with tensors that have numbers, so that shapes may follow from the numbers of a batch.

What is computed of tensors that have numbers alone (masks and positions of a batch) has numbers, and code may look at
them. What meets a fake tensor is fake.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from evenly.data.nest import map_tensors, tensors_in
from evenly.planner.fake_results import FakeResults, Form
from evenly.torch_private import (
    DEVICE_OF,
    PACK_PADDED_SEQUENCE,
    FakeMaker,
    PlainDispatchMode,
    fake_mode,
    is_fake,
    without_fake_mode,
    without_subclasses,
)

_aten = torch.ops.aten
# The shape of what these return follows from the numbers of what comes after the first argument.
SHAPED_BY_OTHERS = {_aten.index, _aten.masked_select, PACK_PADDED_SEQUENCE}


class PartlyFake(PlainDispatchMode):
    """Within, operations on fake tensors return fake ones, and all others compute.

    results: what operations on fake tensors make, as far as it is known.
    note: called after every operation with it, its arguments, its results and the key of these in `results`; what it
    returns is what the operation returns.
    """

    def __init__(self, results: FakeResults) -> None:
        super().__init__()
        self.fakes = fake_mode(cached=False)  # `results` are kept in fewer words
        self.note: Callable[[Any, Any, dict[str, Any], Any, Form | None], Any] | None = None
        self._results, self._maker = results, FakeMaker(self.fakes)
        self._overwritten: set[int] = set()  # ids of storages that a fake tensor was written into
        self._entered = ExitStack()

    def __enter__(self) -> PartlyFake:
        self._entered.enter_context(self.fakes)  # below this mode: what it calls with fake tensors goes there
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        self._entered.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF:  # autograd asks more often than all operations together are called
            one = args[0]
            return (
                one.device if type(one) is self._maker.kind else one.__torch_dispatch__(func, types, args, kwargs or {})
            )
        with without_subclasses():
            results, key = self._run(func, args, kwargs or {})
            return results if self.note is None else self.note(func, args, kwargs or {}, results, key)

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Form | None]:
        tensors = [*tensors_in((args, kwargs))]
        if tensors and all(is_fake(type(one)) for one in tensors):
            return self._of_fakes(func, args, kwargs, tensors)
        if func.is_view or not any(map(self._is_fake, tensors)):
            with without_fake_mode():
                return func(*args, **kwargs), None
        if func.overloadpacket in SHAPED_BY_OTHERS and not any(map(self._is_fake, tensors_in((args[1:], kwargs)))):
            with without_fake_mode():
                results = func(_empty(args[0]), *args[1:], **kwargs)
            number = next(tensors_in(results))
            return map_tensors(lambda made: self._faked(made) if made is number else made, results), None
        fakes = {id(one): self._faked(one) for one in tensors}
        given = {id(fakes[id(one)]): one for one in tensors}

        def faked(tensor: torch.Tensor) -> torch.Tensor:
            return fakes[id(tensor)]

        asked = map_tensors(faked, args), map_tensors(faked, kwargs)
        results, key = self._of_fakes(func, *asked, [*map(faked, tensors)])
        return map_tensors(lambda made: self._written(given[id(made)]) if id(made) in given else made, results), key

    def _of_fakes(
        self, func: Any, args: Any, kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
    ) -> tuple[Any, Form | None]:
        """As the operation returned before for what is alike; else it runs."""
        key = self._results.key(func, args, kwargs)
        found = NotImplemented if key is None else self._results.again(key, tensors, self._maker)
        if found is NotImplemented:
            found = func(*args, **kwargs)
            if key is not None:
                self._results.find(key, self._results.key(func, args, kwargs), tensors, found, self._maker)
        return found, key

    def _faked(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor of its shape; the tensor itself if it is one."""
        if is_fake(type(tensor)):
            return tensor
        return self._maker.make((tensor.shape, tensor.stride(), 0, tensor.dtype, tensor.device))

    def _written(self, target: torch.Tensor) -> torch.Tensor:
        """Notes that an operation on a fake tensor has changed `target`: its numbers are gone."""
        storage = target.untyped_storage()
        if not is_fake(type(target)) and id(storage) not in self._overwritten:
            self._overwritten.add(id(storage))
            weakref.finalize(storage, self._overwritten.discard, id(storage))
        return target

    def _is_fake(self, tensor: torch.Tensor) -> bool:
        return is_fake(type(tensor)) or id(tensor.untyped_storage()) in self._overwritten


def _empty(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
