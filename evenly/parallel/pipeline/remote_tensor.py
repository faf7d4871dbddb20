"""Stand-ins for the tensors of other stages while a stage runs the model's code.

A stage runs the model's code as it is written. What other stages compute is a *remote* tensor in it, with a shape, a
dtype and a device but no data; so is everything computed from one. When the stage has received a tensor, the remote one
is *filled*, wherever the code has stored it, and then computes as the received tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from evenly.data.nest import map_tensors, tensors_in
from evenly.errors import PlanError, RunError
from evenly.model.fake import DeferredTensor, shared_fake_mode
from evenly.parallel.pipeline.example_tensor import example_of, remotes_are_examples
from evenly.parallel.pipeline.memory_layout import laid_out, packed_size
from evenly.torch_private import (
    PACKED_SEQUENCES,
    TorchDispatchMode,
    has_memory,
    is_fake,
    memory_key,
    operation_of,
    without_subclasses,
    wrapper_subclass,
)

RUNNING_STAGE = "running a stage of the model by itself"
OTHER_PLAN = "use a plan without pipeline (ddp, zero3, tp)"
IN_PLACE = re.compile(
    r"__setitem__|__set__|.*[a-z]_|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__"
)
# Methods and attributes that a fake tensor answers.
METADATA_METHODS = frozenset(
    ["size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "get_device", "__len__"]
) | frozenset(["is_floating_point", "is_complex", "is_signed", "is_contiguous"])
METADATA_ATTRIBUTES = frozenset(["shape", "ndim", "dtype", "device", "layout", "is_cuda", "itemsize", "nbytes"])
PLAIN_TYPES = (int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, type)
OF_NUMBERS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class TensorOwner(Protocol):
    """The run of the model's code that made a remote tensor."""

    @property
    def function_context(self) -> AbstractContextManager[object] | None:
        """A context for every function called with remote tensors."""

    def value_of(self, tensor: RemoteTensor) -> torch.Tensor | None:
        """The data of `tensor`, if it is available by now."""

    def note_inputs(self, tensors: list[torch.Tensor]) -> None:
        """Called with the argument tensors of every function whose result is remote."""

    def draws(self) -> bool:
        """Called for every function of remote tensors that draws random numbers; whether to draw as many here."""
        ...

    def refuses_write(self, target: torch.Tensor, function: str) -> Exception:
        """What is raised where a function writes a remote tensor into `target`, which has data."""
        ...

    def note_write(self, target: RemoteTensor) -> None:
        """Called for every function that modifies a filled tensor."""

    def want_numbers(self, tensors: list[RemoteTensor]) -> None:
        """Called where a function asks for numbers of remote tensors, before that fails."""

    def note_shaped(self) -> None:
        """Called for every function whose result has a shape that follows from numbers of tensors here."""


class RemoteTensor(DeferredTensor):
    """A tensor without data until it is filled. Made by `remote`."""

    @staticmethod
    def __new__(cls: Any, fake: torch.Tensor) -> RemoteTensor:
        """A wrapper subclass of the shape, strides, dtype and device of `fake`, without data."""
        return wrapper_subclass(cls, fake)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Reached only by code that bypasses `__torch_function__`."""
        raise PlanError(RUNNING_STAGE, f"{func} needs a tensor of another stage", OTHER_PLAN)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs `func` itself if all remote arguments are filled, else on fake tensors."""
        with without_subclasses():
            kwargs = kwargs or {}
            tensors = [*tensors_in((args, kwargs))]
            remotes = [one for one in tensors if isinstance(one, RemoteTensor)]
            if _reads_metadata(func):
                return _run_fake(func, args, kwargs, remotes[0].owner)
            values = {id(one): value for one in remotes if (value := one.value) is not None}
            if remotes_are_examples():
                values |= {id(one): example_of(one.fake) for one in remotes if id(one) not in values}
            if len(values) < len({id(one) for one in remotes}):
                return _run_remote(func, args, kwargs, tensors, remotes)
            if isinstance(target := _written(func, args, kwargs), RemoteTensor):
                target.owner.note_write(target)

        def filled(tensor: torch.Tensor) -> torch.Tensor:
            return values.get(id(tensor), tensor)

        return func(*map_tensors(filled, args), **map_tensors(filled, kwargs))

    @property
    def fake(self) -> torch.Tensor:
        """A fake tensor of the same shape."""
        return vars(self)["fake"]

    @property
    def root(self) -> RemoteTensor:
        return vars(self).get("root", self)

    @property
    def owner(self) -> TensorOwner:
        return vars(self)["owner"]

    @property
    def value(self) -> torch.Tensor | None:
        """The tensor it was filled with, or None."""
        attributes = vars(self)
        if attributes["value"] is None:
            attributes["value"] = attributes["owner"].value_of(self)
        return attributes["value"]

    @property
    def arrived(self) -> bool:
        return self.value is not None

    def fill(self, value: torch.Tensor) -> None:
        """Makes it compute as `value` from now on."""
        vars(self)["value"] = value

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"RemoteTensor(shape={tuple(self.fake.shape)}, dtype={self.fake.dtype})"


def remote(fake: torch.Tensor, owner: TensorOwner) -> RemoteTensor:
    """A remote tensor of the shape of `fake`."""
    made = RemoteTensor(fake)
    vars(made).update(fake=fake, owner=owner, value=None)
    return made


def fake_like(tensor: torch.Tensor, device: str | None = None) -> torch.Tensor:
    """A fake tensor of the shape, strides and dtype of `tensor`, on `device` or its own."""
    with shared_fake_mode(), torch.no_grad():
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device)
    return fake.requires_grad_(tensor.requires_grad)


def is_remote(tensor: Any) -> bool:
    return isinstance(tensor, RemoteTensor) and tensor.value is None


def materialized(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a remote one was filled with; any other tensor itself."""
    if isinstance(tensor, RemoteTensor) and (value := tensor.value) is not None:
        return value
    return tensor


def check_received(site: object, tensor: RemoteTensor, value: torch.Tensor) -> None:
    """Raises `RunError` where a received tensor differs in shape or dtype from the remote one at the same site."""
    if tensor.shape != value.shape or tensor.dtype is not value.dtype:
        raise RunError(
            f"receiving {site} from an earlier stage",
            f"it has shape {tuple(value.shape)} and type {value.dtype}, "
            f"and here {tuple(tensor.shape)} and {tensor.dtype}",
            f"let the model's code do the same on every stage, or {OTHER_PLAN}",
        )


def cache_key(nest: Any, *, sizes: bool = True) -> tuple[Any, ...] | None:
    """Key of all that determines the shapes a function of `nest` returns; None where that is unknown.

    sizes: whether the lengths of dims count, not their number alone.
    """
    found: list[Any] = [torch.is_grad_enabled()]
    found += [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    try:
        found.extend(_key_parts(nest, sizes))
        hash(tuple(found))
    except TypeError:
        return None
    return tuple(found)


# By `cache_key`, the fake results of a function, so that it runs on fake tensors once and not in every microbatch.
_cached_results: dict[Any, Any] = {}
MAX_CACHED = 100_000


def _reads_metadata(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return (
        name in METADATA_METHODS
        or name.startswith("is_")
        or (name == "__get__" and getattr(func.__self__, "__name__", "") in METADATA_ATTRIBUTES)
    )


def _run_remote(
    func: Any, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor], remotes: list[RemoteTensor]
) -> Any:
    """Runs `func` on fake tensors; the tensors of the result are remote."""
    owner = remotes[0].owner
    target = _in_place_target(func, args, kwargs, owner)
    key = None if target is not None or owner.function_context is not None else cache_key((func, args, kwargs))
    viewed: int | None = None
    if target is not None:
        results, draws = _run_fake_in_place(func, args, kwargs, target, owner)
    elif key is not None and key in _cached_results:
        results, draws, viewed = _cached_results[key]
    else:
        try:
            results, draws = _run_watched(func, args, kwargs, owner)
            viewed = _viewed(results, tensors)
        except Exception as problem:
            wanted = operation_of(problem) or getattr(func, "__name__", "") in {*PACKED_SEQUENCES, "tolist"}
            if not wanted or not _shaped_by_others(tensors, remotes):
                if wanted:
                    owner.want_numbers([one for one in remotes if one.value is None])
                raise
            results, draws, key = _run_shaped(func, args, kwargs, owner), False, None
        if key is not None:
            if len(_cached_results) > MAX_CACHED:
                _cached_results.clear()
            results = map_tensors(lambda fake: fake.detach().requires_grad_(fake.requires_grad), results)
            _cached_results[key] = results, draws, viewed
    if draws and owner.draws():
        draw_as(func, args, kwargs)
    # Results that are cached are one fake tensor for several remote ones: what is written is the target.
    written = [target] if isinstance(target, RemoteTensor) else []
    own = {} if target is None else {id(one.fake): one for one in (*remotes, *written)}
    found: list[RemoteTensor] = []

    def wrapped(fake: torch.Tensor) -> torch.Tensor:
        if not is_fake(type(fake)):
            return fake
        found.append(own[id(fake)] if id(fake) in own else remote(fake, owner))
        if viewed is not None and isinstance(base := tensors[viewed], RemoteTensor):
            vars(found[-1])["root"] = base.root
        return found[-1]

    results = map_tensors(wrapped, results)
    if found or target is not None:
        owner.note_inputs(tensors)
    return results


def _viewed(results: Any, tensors: list[torch.Tensor]) -> int | None:
    result = next(tensors_in(results), None)
    if result is None or not has_memory(result):
        return None
    memory = memory_key(result)
    fakes = [fake_of(tensor) for tensor in tensors]
    return next((n for n, one in enumerate(fakes) if has_memory(one) and memory_key(one) == memory), None)


def _run_fake_in_place(
    func: Any, args: Any, kwargs: dict[str, Any], target: Any, owner: TensorOwner
) -> tuple[Any, bool]:
    if owner.function_context is not None:
        return _run_watched(func, args, kwargs, owner)
    others = [tensor for tensor in tensors_in((args, kwargs)) if tensor is not target]
    recorded = torch.is_grad_enabled() and any(fake_of(tensor).requires_grad for tensor in others)
    with torch.no_grad():
        results, draws = _run_watched(func, args, kwargs, owner)
    if recorded and isinstance(target, RemoteTensor):
        target.fake.requires_grad_()
    return results, draws


def _shaped_by_others(tensors: list[torch.Tensor], remotes: list[RemoteTensor]) -> bool:
    here = {id(one) for one in remotes}
    others = [one for one in tensors if id(one) not in here and not one.is_floating_point()]
    return (
        all(one.fake.is_floating_point() or one.fake.is_complex() for one in remotes)
        and bool(others)
        and not any(is_fake(type(one)) for one in others)
    )


def _run_shaped(func: Any, args: Any, kwargs: dict[str, Any], owner: TensorOwner) -> Any:
    """The results of `func` as fake tensors, their shapes found on made-up numbers in place of remote tensors."""
    owner.note_shaped()

    def made_up(tensor: torch.Tensor) -> torch.Tensor:
        fake = fake_of(tensor)
        return example_of(fake).as_subclass(torch.Tensor) if is_fake(type(fake)) else fake

    results = func(*map_tensors(made_up, args), **map_tensors(made_up, kwargs))
    if not all(isinstance(one, torch.Tensor) for one in (results if isinstance(results, tuple) else [results])):
        raise PlanError(RUNNING_STAGE, f"{func.__name__} needs numbers that another stage has", OTHER_PLAN)
    # What these return besides numbers of the job are lengths, which follow from the lengths that they are given.
    kept = getattr(func, "__name__", "") in PACKED_SEQUENCES
    return map_tensors(lambda one: one if kept and not one.is_floating_point() else fake_like(one), results)


class DrawWatch(TorchDispatchMode):
    """Within, finds out whether an operation draws random numbers, or hands Python numbers or a size that they give."""

    draws = reads = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
        masks = func is not torch.ops.aten.index.Tensor or any(one is not None and one.itemsize == 1 for one in args[1])
        self.reads = self.reads or (masks and not OF_NUMBERS.isdisjoint(func.tags))
        return func(*args, **(kwargs or {}))


def _run_watched(func: Any, args: Any, kwargs: dict[str, Any], owner: TensorOwner) -> tuple[Any, bool]:
    args, kwargs = map_tensors(fake_of, args), map_tensors(fake_of, kwargs)
    context = owner.function_context or nullcontext()
    with shared_fake_mode(), DrawWatch() as watch, context:
        return func(*args, **kwargs), watch.draws


def draw_as(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Draws as many random numbers as `func` does, so that what is drawn after it is the same on all stages."""

    def some(tensor: torch.Tensor) -> torch.Tensor:
        fake = fake_of(tensor)
        size = packed_size(fake.shape, fake.stride())  # in which order numbers are drawn depends on the strides
        return laid_out(torch.ones(size, dtype=fake.dtype, device=fake.device), fake.shape, fake.stride())

    with torch.no_grad():
        func(*map_tensors(some, args), **map_tensors(some, kwargs))


def _run_fake(func: Any, args: Any, kwargs: dict[str, Any], owner: TensorOwner) -> Any:
    args, kwargs = map_tensors(fake_of, args), map_tensors(fake_of, kwargs)
    if owner.function_context is None:
        with shared_fake_mode():
            return func(*args, **kwargs)
    with shared_fake_mode(), owner.function_context:
        return func(*args, **kwargs)


def fake_of(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, RemoteTensor):
        return tensor
    value = vars(tensor)["value"]
    return tensor.fake if value is None else value


def _in_place_target(func: Any, args: Any, kwargs: Any, owner: TensorOwner) -> Any:
    """The tensor that `func` modifies, if any; raises where it has data, which would be lost."""
    target = _written(func, args, kwargs)
    if isinstance(target, torch.Tensor) and not is_remote(target):
        raise owner.refuses_write(target, getattr(func, "__name__", ""))
    return target


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    in_place = IN_PLACE.fullmatch(getattr(func, "__name__", "")) or kwargs.get("inplace") is True
    return kwargs.get("out", args[0] if in_place and args else None)


def write_refusal(function: str) -> PlanError:
    """The error for a remote tensor that is written into one that has data, which would be lost."""
    return PlanError(
        RUNNING_STAGE,
        f"{function} writes a tensor of another stage into one that every stage has",
        f"make a new tensor (torch.where, torch.cat) in the model, or {OTHER_PLAN}",
    )


def _key_parts(nest: Any, sizes: bool) -> Iterator[Any]:
    if isinstance(nest, torch.Tensor):
        tensor = fake_of(nest)
        shape = (tensor.shape, tensor.stride()) if sizes else (tensor.dim(),)
        yield (*shape, tensor.dtype, tensor.device, tensor.requires_grad)
    elif isinstance(nest, list | tuple):
        yield (type(nest), len(nest))
        for one in nest:
            yield from _key_parts(one, sizes)
    elif isinstance(nest, dict):
        yield tuple(nest)
        yield from _key_parts(list(nest.values()), sizes)
    elif isinstance(nest, slice):
        yield from _key_parts((nest.start, nest.stop, nest.step), sizes)
    elif nest is None or nest is Ellipsis or isinstance(nest, PLAIN_TYPES) or callable(nest):
        yield (type(nest), nest)  # 1 is not True here
    else:
        raise TypeError
