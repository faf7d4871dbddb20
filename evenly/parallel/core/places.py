"""Where the code of a job keeps what it counts, outside of a model's state.

Numbers, small tensors and arrays, lists that grow, and generators of random numbers: in attributes of modules, of other
objects and of the job's own classes, in containers there, in closures, and in global variables that the job's own
functions name.
"""

from __future__ import annotations

import pickle
import random
import sys
import sysconfig
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from operator import setitem
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from evenly.torch_private import without_dispatch_modes, without_torch_function

FEW = 1000  # elements: of a container that is looked into, and of a tensor or an array that may be a count
MOST = 100_000  # objects that are looked at
LONGER = 100  # elements, by which a list is made longer at most: code may stack them
APART = ("evenly", "torch", "numpy")  # packages whose objects are no part of a job
STATE = ("_parameters", "_buffers", "_modules")  # of a module, and its children, which have names of their own
TABLES = frozenset(key for key, one in vars(nn.Module()).items() if isinstance(one, dict))  # those, and hooks
NUMBERS = (int, float, np.integer, np.floating)
INSTALLED = sysconfig.get_path("purelib"), sysconfig.get_path("platlib")
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
NO_OBJECTS = (type, FunctionType, MethodType, BuiltinMethodType, classmethod, staticmethod, partial)
NOTES = (bool, str, bytes, type(None))  # by which code knows what it has done


@dataclass(frozen=True)
class Drawn:
    """How far a generator has drawn. state: its own, which is the same where the bytes are. draw: draws some more."""

    state: Any = field(compare=False)
    draw: Callable[[int], Any] = field(compare=False)
    bytes: bytes


@dataclass(frozen=True)
class ValuePlace:
    """Where a value is kept: a copy of it, how another is put there, and how none is."""

    value: Any
    write: Callable[[Any], Any]
    drop: Callable[[], Any] | None = None

    def differs(self, other: ValuePlace | None) -> bool:
        """Whether `other` has another value, or is none; of lists, whether it is longer or shorter."""
        if other is None or not self.is_like(other):
            return True
        one, its = self.value, other.value
        if isinstance(one, list):
            return len(one) != len(its)
        if isinstance(one, (torch.Tensor, np.ndarray)):
            return not bool((one == its).all())
        return one != its and (one == one or its == its)

    def is_like(self, other: ValuePlace) -> bool:
        one, its = self.value, other.value
        if type(one) is not type(its) or isinstance(one, (list, Drawn, *NUMBERS)):
            return type(one) is type(its)
        return one.shape == its.shape and getattr(one, "device", None) == getattr(its, "device", None)

    def put(self, before: ValuePlace, by: int = 0) -> None:
        """Puts what was there `before`, as it would be after `by` more counts."""
        value = before.value
        if isinstance(value, list):
            value = [*value, *(self.value[-1:] * min(by, LONGER))]
        elif by and not isinstance(value, Drawn):
            value = value + by
        self.write(value)
        if by and isinstance(value, Drawn):
            self.value.draw(by)


Held = tuple[str, Any, Any, Any]  # the way to an object, itself, and which entry of what it is


def places(roots: Iterable[tuple[str, Any]]) -> dict[str, ValuePlace]:
    """Those that can be reached from named objects, by the way there; each object is come to once."""
    with without_torch_function(), without_dispatch_modes():
        return _places(roots)


def _places(roots: Iterable[tuple[str, Any]]) -> dict[str, ValuePlace]:
    found: dict[str, ValuePlace] = {}
    for name, value, holder, key in _reached(roots):
        if isinstance(value, NOTES):
            continue
        if isinstance(value, NUMBERS) and holder is not None:
            drop = partial(_methods(holder).pop, holder, key, None) if isinstance(holder, dict) else None
            found[name] = ValuePlace(value, partial(_write, holder, key), drop)
        elif (place := _place_of(value)) is not None:
            found[name] = place
    return found


def _reached(roots: Iterable[tuple[str, Any]], *, of_libraries: bool = True) -> Iterator[Held]:
    """All that can be reached; each object once, and each number, flag or word wherever it is kept.

    of_libraries: whether objects of other classes than the job's are looked into, besides modules and containers.
    """
    seen: dict[int, Any] = {}  # with the objects, which keeps their ids theirs
    waiting: deque[Held] = deque((name, root, None, None) for name, root in roots)
    while waiting and len(seen) < MOST:
        found = waiting.popleft()
        name, value, holder, _ = found
        if isinstance(value, NOTES) or (isinstance(value, NUMBERS) and holder is not None):
            yield found
        elif id(value) not in seen and (of_libraries or not _is_of_library(value)):
            seen[id(value)] = value
            yield found
            waiting.extend(one for one in _held_by(name, value) if type(one[1]) not in weakref.ProxyTypes)


@contextmanager
def places_restored(roots: Sequence[tuple[str, Any]]) -> Generator[None]:
    """Undoes what is done within to the values that are kept there."""
    before = places(roots)
    try:
        yield
    finally:
        put_back(roots, before)


@contextmanager
def all_restored(roots: Sequence[tuple[str, Any]]) -> Generator[None]:
    """As `places_restored`, and undoes what code notes next to such values: flags and words, entries of dicts and sets.

    So what the first call of a function sets once, and notes that it has, is to be set again.
    """
    with without_torch_function(), without_dispatch_modes():
        notes = [undo for found in _reached(roots, of_libraries=False) if (undo := _undo_of(*found[1:]))]
    with places_restored(roots):
        try:
            yield
        finally:
            for undo in notes:
                undo()


def _undo_of(value: Any, holder: Any, key: Any) -> Callable[[], object] | None:
    """What puts back a note; None where the value is none."""
    if isinstance(value, NOTES):
        return partial(_note_again, holder, key, value) if isinstance(holder, (dict, type, CellType)) else None
    plain = type(value).items in (dict.items, OrderedDict.items) if isinstance(value, dict) else isinstance(value, set)
    if plain and len(value) <= FEW and not _is_table(holder, key):
        return partial(_refill, value, value.copy())
    if isinstance(value, nn.Module) or (not isinstance(value, (*NO_OBJECTS, ModuleType)) and _is_kept(value)):
        return partial(_drop_new, vars(value), frozenset(vars(value)))
    return None


def _is_table(holder: Any, key: Any) -> bool:
    return isinstance(holder, dict) and key in TABLES and holder.keys() >= {*STATE}


def _note_again(holder: Any, key: Any, before: Any) -> None:
    if isinstance(holder, CellType):
        now = holder.cell_contents
    else:
        now = vars(holder).get(key, before) if isinstance(holder, type) else dict.get(holder, key, before)
    if type(now) is not type(before) or now != before:  # an array may be there now
        _write(holder, key, before)


def _refill(value: dict[Any, Any] | set[Any], before: Any) -> None:
    is_same = [*map(id, value)] == [*map(id, before)]
    if is_same and isinstance(value, dict):
        is_same = all(one is other for one, other in zip(value.values(), before.values(), strict=True))
    if not is_same:
        value.clear()
        value.update(before)


def _drop_new(attributes: dict[str, Any], before: frozenset[str]) -> None:
    for name in attributes.keys() - before:
        if isinstance(attributes[name], (*NOTES, *NUMBERS)):
            del attributes[name]


def put_back(roots: Sequence[tuple[str, Any]], before: Mapping[str, ValuePlace]) -> None:
    """Puts back what was there before, where it is another now."""
    with without_torch_function(), without_dispatch_modes():
        for name, place in _places(roots).items():
            if name in before and place.is_like(before[name]) and place.differs(before[name]):
                place.put(before[name])


def _write(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, type):
        setattr(holder, key, value)
    elif isinstance(holder, CellType):
        holder.cell_contents = value
    elif isinstance(holder, dict):
        _methods(holder).__setitem__(holder, key, value)
    else:
        holder[key] = value


def _methods(holder: dict[Any, Any]) -> type[dict[Any, Any]]:
    """Return the class whose methods find entries as they are kept: a class of its own may compute or rename them."""
    return OrderedDict if isinstance(holder, OrderedDict) else dict


def _place_of(value: Any) -> ValuePlace | None:
    """That of what is changed in place: a list, a small tensor or array."""
    if isinstance(value, (list, deque)):
        return ValuePlace([*value], partial(_replace, value))
    if isinstance(value, np.ndarray) and value.size <= FEW and value.dtype.kind in "iuf" and value is not np.ma.masked:
        return ValuePlace(value.copy(), partial(setitem, value, ...))  # pyright: ignore[reportArgumentType, reportCallIssue]
    if type(value) is torch.Tensor and value.numel() <= FEW and not (value.requires_grad or value.is_meta):
        is_number = value.dtype is not torch.bool and value.layout is torch.strided and not value.is_complex()
        return ValuePlace(value.clone(), value.copy_) if is_number else None
    return _place_of_generator(value) if is_generator(value) else None


def is_generator(value: Any) -> bool:
    """Whether it draws random numbers, of its own: those that all code shares are seeded for each microbatch."""
    if not isinstance(value, GENERATORS) or isinstance(value, random.SystemRandom):
        return False
    shared: tuple[Any, ...] = (random.random, np.random.random_sample)
    of_torch = (torch.default_generator, *torch.cuda.default_generators)
    return not any(value is one for one in (*of_torch, *(one.__self__ for one in shared)))


def _place_of_generator(value: Any) -> ValuePlace:
    if isinstance(value, torch.Generator):
        state = value.get_state()
        drawn = Drawn(state, partial(torch.rand, generator=value, device=value.device), state.numpy().tobytes())
        return ValuePlace(drawn, lambda before: value.set_state(before.state))
    draw: Callable[[int], Any] = value.random
    if isinstance(value, random.Random):
        state, write, draw = value.getstate(), value.setstate, partial(_draw, value)
    elif isinstance(value, np.random.RandomState):
        state, write = value.get_state(), value.set_state
    else:
        state, write = value.bit_generator.state, partial(setattr, value.bit_generator, "state")
    return ValuePlace(Drawn(state, draw, pickle.dumps(state)), lambda before: write(before.state))


def _draw(own: random.Random, by: int) -> None:
    for _ in range(by):
        own.random()


def _replace(value: list[Any] | deque[Any], elements: Iterable[Any]) -> None:
    value.clear()
    value.extend(elements)


def _held_by(name: str, value: Any) -> Iterator[Held]:
    if isinstance(value, (dict, list, tuple, set, frozenset, deque)):
        if len(value) <= FEW:
            # What a dict of a class of its own would compute, or import, is not kept there.
            entries = [*(dict.items(value) if isinstance(value, dict) else enumerate(value))]
            holder = value if isinstance(value, (dict, list, deque)) else None
            for number, (key, one) in enumerate(entries):
                yield f"{name}[{key!r}]" if isinstance(key, (int, str)) else f"{name}[({number})]", one, holder, key
    elif isinstance(value, (MethodType, BuiltinMethodType, classmethod, staticmethod, partial)):
        parts = ("__func__", "__self__", "func", "args", "keywords")
        yield from ((name, getattr(value, part, None), None, None) for part in parts)
    elif isinstance(value, FunctionType):
        if _is_own(value.__globals__.get("__name__", "")):
            yield from _named_by(name, value)
    elif isinstance(value, type):
        if _is_own(value.__module__):
            way = f"{value.__module__}.{value.__qualname__}"
            yield from ((f"{way}.{key}", one, value, key) for key, one in [*vars(value).items()])
    elif isinstance(value, nn.Module) or _is_kept(value):
        own = vars(value)
        ways = {**own, **own.get("_modules", {})} if isinstance(value, nn.Module) else own
        for key, one in [*ways.items()]:  # which other threads may add to
            if key not in STATE or ways is own:
                yield f"{name}.{key}".lstrip("."), one, own, key
        yield from ((one.__name__, one, None, None) for one in type(value).__mro__ if _is_own(one.__module__))


def _is_of_library(value: Any) -> bool:
    if isinstance(value, (*NO_OBJECTS, dict, list, tuple, set, frozenset, deque, nn.Module, ModuleType)):
        return False
    return hasattr(value, "__dict__") and not _is_own(str(type(value).__module__))


def _is_kept(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return _is_own(value.__name__)
    return hasattr(value, "__dict__") and str(type(value).__module__).partition(".")[0] not in APART


def _named_by(name: str, function: FunctionType) -> Iterator[Held]:
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{name}.{variable}", cell.cell_contents, cell, None
        except ValueError:  # it is empty yet
            continue
    yield from ((f"{name}.{key}", one, vars(function), key) for key, one in vars(function).items())
    yield from ((f"{name}()", one, None, None) for one in (function.__defaults__, function.__kwdefaults__))
    known = function.__globals__
    for variable in _names(function.__code__) & known.keys():
        yield f"{known['__name__']}.{variable}", known[variable], known, variable


@cache
def _names(code: CodeType) -> frozenset[str]:
    return frozenset(code.co_names).union(*(_names(one) for one in code.co_consts if isinstance(one, CodeType)))


@cache
def _is_own(module: str) -> bool:
    if module.partition(".")[0] in (*APART, *sys.stdlib_module_names):
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not file.startswith(INSTALLED)
