"""Runs a model's code on torch's fake tensors, which have a shape and a dtype but no data."""

from __future__ import annotations

import copy
import logging
import random
import sys
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from evenly.data.generators import undisturbed
from evenly.launcher.frozen import all_caches
from evenly.torch_private import FAKE_TENSOR_LOGGER, fake_mode, masks_not_compared

Source = Literal["parameter", "buffer", "constant"]


class DeferredTensor(torch.Tensor):
    """A tensor whose data may arrive later; until then it has only a shape, a dtype and a device."""

    @property
    def arrived(self) -> bool:
        raise NotImplementedError


@cache
def shared_fake_mode() -> Any:
    """One mode for all cached fake tensors, since torch does not mix tensors of several modes."""
    return fake_mode()


def fake_tensor(tensor: torch.Tensor, fakes: Any, device: str = "cpu") -> torch.Tensor:
    """A fake tensor of the same shape, strides and dtype on `device`; for a parameter, a parameter."""
    with fakes, torch.no_grad():
        return _fake_tensor(tensor, device)


def _fake_tensor(tensor: torch.Tensor, device: str) -> torch.Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def fake_model(
    model: nn.Module, fakes: Any, note: Callable[[torch.Tensor, Source, str], object], *, without: Collection[str] = ()
) -> nn.Module:
    """A copy of `model` that shares no tensor with it and has its ties.

    note: called with each tensor of the copy, its source, and each of its names ("" for a constant). without: names of
    modules that the copy lacks.
    """
    memo: dict[int, Any] = {id(model.get_submodule(name)): None for name in without}
    lacks = tuple(f"{name}." for name in without)

    def add(tensor: torch.Tensor, source: Source, name: str) -> None:
        if id(tensor) not in memo:
            memo[id(tensor)] = _fake_tensor(tensor, "cpu")
        note(memo[id(tensor)], source, name)

    with fakes, torch.no_grad():
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if not name.startswith(lacks):
                add(parameter, "parameter", name)
        for name, buffer in model.named_buffers():
            if not name.startswith(lacks):
                add(buffer, "buffer", name)
        for name, module in model.named_modules():
            for attribute in vars(module).values():
                if isinstance(attribute, torch.Tensor) and not f"{name}.".startswith(lacks):
                    add(attribute, "constant", "")
    copied = copy.deepcopy(model, memo)
    for name in without:
        parent, _, child = name.rpartition(".")
        delattr(copied.get_submodule(parent), child)
    return copied


@contextmanager
def parameters_on_meta() -> Generator[None]:
    """Within, a parameter has a shape and no memory as soon as a module has it; buffers have their numbers."""
    register, known = nn.Module.register_parameter, WeakIdKeyDictionary()

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if type(param) is nn.Parameter and param.device.type != "meta":
            if param not in known:  # else one that several modules have
                known[param] = nn.Parameter(param.detach().to("meta"), param.requires_grad)
            param = known[param]
        register(self, name, param)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


@contextmanager
def running_fake() -> Generator[None]:
    """Within, a model's code can run on fake tensors; random states are restored on exit, and no cache keeps one."""
    with _restored_random_state(), _without_log(), _caches_cleared(), masks_not_compared():
        yield


@contextmanager
def _caches_cleared() -> Generator[None]:
    """Clears, on exit, every `functools.lru_cache` of others that took something up within."""
    before = {id(one): one.cache_info().misses for one in _caches(len(sys.modules))}
    try:
        yield
    finally:
        for one in _caches(len(sys.modules)):
            if one.cache_info().misses > before.get(id(one), 0):
                one.cache_clear()


@lru_cache(maxsize=1)
def _caches(modules: int) -> list[Any]:
    """All that there are while so many `modules` are imported; to look through all objects takes a second."""
    return [one for one in all_caches() if getattr(one, "__module__", "").partition(".")[0] not in ("torch", "evenly")]


@contextmanager
def _without_log() -> Generator[None]:
    """Within, torch does not log operations that need data; they raise too."""
    logger = logging.getLogger(FAKE_TENSOR_LOGGER)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _restored_random_state() -> Generator[None]:
    """Restores the generators of torch, Python and numpy on exit."""
    numpy: Any = sys.modules.get("numpy")
    state, numpy_state = random.getstate(), numpy and numpy.random.get_state()
    try:
        with undisturbed():
            yield
    finally:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(numpy_state)
