"""What code of the job finds of sharded parameters outside of a loss: whole ones.

What it computes of one is computed of the full tensor, which is gathered; of what it changes each rank takes its rows.
torch's own functions of DTensors would leave sums partial where a number is asked for, and lack many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from evenly.data.nest import map_tensors, tensors_in
from evenly.errors import RunError
from evenly.parallel.core.between_steps import FILES, Outside, changes_its_first, closed_error, name_of_call, with_first
from evenly.parallel.core.memory import local
from evenly.torch_private import (
    change_transformed,
    has_memory,
    in_transform,
    memory_key,
    outside_transforms,
    version,
    with_torch_function,
    without_subclasses,
)

T = torch.Tensor


class Shards(Protocol):
    """Between the full tensor of a parameter, or of its gradient, and what this rank has of it."""

    def full_view(self, name: str, tensor: T) -> T:
        """The full tensor; a collective."""
        ...

    def full_shape(self, name: str, tensor: T) -> torch.Size:
        """Its shape."""
        ...

    def local_part(self, name: str, full: T) -> T: ...


SAME = """
    dtype device requires_grad is_leaf retains_grad grad_fn layout ndim is_cuda is_sparse is_cpu is_meta is_quantized
    _version output_nr
"""
SAME_METHODS = "dim ndimension is_floating_point is_complex get_device element_size requires_grad_ register_hook"
QUERIES: set[Callable[..., Any]] = {
    *(getattr(T, name).__get__ for name in SAME.split()),
    *(getattr(T, name) for name in SAME_METHODS.split()),
    T.requires_grad.__set__,  # pyright: ignore
}


def _size(shape: torch.Size, dim: int | None = None) -> Any:
    return shape if dim is None else shape[dim]


SHAPES: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys([T.shape.__get__, T.size], _size),  # pyright: ignore
    **dict.fromkeys([T.numel, T.nelement, torch.numel], torch.Size.numel),
    T.__len__: lambda shape: shape[0],  # pyright: ignore[reportUnknownLambdaType]
}
SHARED = (T.data.__get__, T.detach, T.grad.__get__)  # pyright: ignore  # as sharded as the parameter
SETTERS = {T.data.__set__: "data", T.grad.__set__: "grad"}  # pyright: ignore


class ShardedParameter(DTensor):
    """A parameter, or its gradient, of which each rank of the data axis has some rows; the whole where it is shown.

    computes_mixed: whether functions of it and of tensors of other classes are its own to compute.
    """

    name_in_model: str
    outside: Outside
    shards: Shards
    rows: slice
    computes_mixed: ClassVar[bool] = True

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with without_subclasses():
            return _of_sharded(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return T.__repr__(self) if self.outside.shown else super().__repr__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A parameter of the full tensor."""
        if id(self) not in memo:
            with torch.no_grad(), without_subclasses():
                memo[id(self)] = nn.Parameter(_gathered(self).clone(), self.requires_grad)
        return memo[id(self)]


def show_sharded(parameter: DTensor, name: str, rows: slice, shards: Shards, outside: Outside) -> ShardedParameter:
    """From now on `parameter`, of which this rank has `rows`, is the whole where `outside` shows it to the job."""
    change_transformed(ShardedParameter, _full_for_transform)
    sharded: Any = parameter
    sharded.__class__ = ShardedParameter
    sharded.name_in_model, sharded.outside, sharded.shards, sharded.rows = name, outside, shards, rows
    return sharded


def _gathered(tensor: ShardedParameter) -> T:
    wholes = tensor.outside.wholes
    if wholes and (whole := wholes.of(local(tensor), tensor)) is not None:
        return whole
    with outside_transforms() if in_transform() else nullcontext():
        return tensor.shards.full_view(tensor.name_in_model, tensor)


def _full_for_transform(tensor: ShardedParameter) -> T:
    with without_subclasses():
        return _gathered(tensor) if tensor.outside.shown else tensor


def _write(tensor: ShardedParameter, full: T) -> None:
    tensor.outside.wholes.clear()
    local(tensor).copy_(tensor.shards.local_part(tensor.name_in_model, full)[tensor.rows])


def _of_sharded(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    one = next(found for found in tensors_in((args, *kwargs.values())) if isinstance(found, ShardedParameter))
    if one.outside.stepping and func not in QUERIES:
        raise RunError(
            f"{name_of_call(func)} of parameter {one.name_in_model} in the optimizer's step",
            "the optimizer steps full parameters in the place of those that it was given, which are sharded",
            "let hooks take parameters from optimizer.param_groups, or use a plan without zero=3",
        )
    if not one.outside.shown or func in QUERIES:
        return func(*args, **kwargs)
    if func in SHAPES:
        return SHAPES[func](one.shards.full_shape(one.name_in_model, one), *args[1:], **kwargs)
    if one.outside.closed:
        raise closed_error(name_of_call(func))
    if (name := name_of_call(func)) in FILES:
        return func(one.outside.wholes.to_write(name, local(one)), *args[1:], **kwargs)
    if func in SHARED:
        found = func(*args)
        return found if found is None else show_sharded(found, one.name_in_model, one.rows, one.shards, one.outside)
    if func in SETTERS:
        return _set(one, SETTERS[func], args[1])
    return _of_full(func, *with_first(args, kwargs))


def _set(one: ShardedParameter, attribute: str, value: T | None) -> None:
    if attribute == "grad":
        one.grad = None
        if value is None:
            return
        one.grad = torch.zeros_like(one)
        target = show_sharded(one.grad, one.name_in_model, one.rows, one.shards, one.outside)  # type: ignore[arg-type]
    else:
        target = one
    assert value is not None
    _write(target, _gathered(value) if isinstance(value, ShardedParameter) else value.detach())


def _of_full(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func` of full tensors; shards that it changes are written."""
    copies: dict[int, tuple[ShardedParameter, T]] = {}

    def full(tensor: T) -> T:
        if not isinstance(tensor, ShardedParameter):
            return tensor
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor, _gathered(tensor)
        return copies[id(tensor)][1]

    name = name_of_call(func)
    full_args, full_kwargs = map_tensors(full, args), map_tensors(full, kwargs)
    with with_torch_function():  # of those that are cut otherwise
        result = func(*full_args, **full_kwargs)
    changed = [*tensors_in(args[:1] if changes_its_first(name) else ()), *tensors_in(kwargs.get("out"))]
    with torch.no_grad():
        for tensor in changed:
            if isinstance(tensor, ShardedParameter):
                _write(tensor, full(tensor))
    if changed:
        return args[0] if changes_its_first(name) else kwargs.get("out")
    return _views_of_copies(result, [Copied(*pair, version(local(pair[0]))) for pair in copies.values()])


@dataclass(eq=False)
class Copied:
    """The full copy of a parameter, as of the version that this rank's shard has."""

    parameter: ShardedParameter
    full: T
    version: int

    def check(self, what: str) -> None:
        """Raises `RunError` where the parameter has changed since."""
        if version(local(self.parameter)) != self.version:
            raise RunError(
                f"{what} on a view of parameter {self.parameter.name_in_model}",
                "the parameter is sharded over ranks, and has changed since the view was made of a copy",
                "make the view where it is used",
            )

    def write(self) -> None:
        """Has the parameter follow its copy."""
        _write(self.parameter, self.full)
        self.version = version(local(self.parameter))


class GatheredView(torch.Tensor):
    """What torch would have made a view of a parameter, of the copy that it was gathered in."""

    copied: Copied

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = name_of_call(func), kwargs or {}
        views = [one for one in tensors_in((args, *kwargs.values())) if isinstance(one, GatheredView)]
        changed = (args[:1] if changes_its_first(name) else (), kwargs.get("out"))
        with without_subclasses():
            if func not in QUERIES and func not in SHAPES:
                for one in views:
                    one.copied.check(name)
            if any(isinstance(one, ShardedParameter) for one in tensors_in((args, *kwargs.values()))):
                result = _of_sharded(func, args, kwargs)
            else:
                result = func(*args, **kwargs)
            for one in tensors_in(changed):
                if isinstance(one, GatheredView):
                    one.copied.write()
            return _views_of_copies(result, [one.copied for one in views])


def _views_of_copies(result: Any, copies: Sequence[Copied]) -> Any:
    """`result`, of which tensors that share memory with a copy are known as its views."""
    by_memory = {memory_key(one.full): one for one in copies}

    def view(tensor: T) -> T:
        found = by_memory.get(memory_key(tensor)) if type(tensor) is T and has_memory(tensor) else None
        if found is not None:
            tensor.__class__ = GatheredView
            tensor.copied = found  # type: ignore[attr-defined]
        return tensor

    return map_tensors(view, result)
