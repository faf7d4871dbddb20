"""Tensors that another stage has, as a stage's own run of the model's code meets them.

A stage runs the model's code as it is written. What other stages compute is *remote* in it: it has a shape, a type and
a device, and no numbers, and so has all that is computed of it. As soon as the stage has received a tensor, the remote
one is *filled*, wherever the code has kept it, and computes as what it was filled with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from evenly.data.nest import map_tensors, tensors_in
from evenly.errors import PlanError
from evenly.model.fake import DeferredTensor, shared_fake_mode
from evenly.torch_private import without_subclasses, wrapper_subclass

ASKED = "running a stage of the model by itself"
OTHER_AXIS = "use a plan without pipeline (ddp, zero3, tp)"
OVERWRITING = re.compile(
    r"__setitem__|__set__|.*[a-z]_|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__"
)
# What is asked of a tensor and follows from its form.
OF_FORM = frozenset(
    ["size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "get_device", "__len__"]
) | frozenset(["is_floating_point", "is_complex", "is_signed", "is_contiguous"])
ATTRIBUTES_OF_FORM = frozenset(["shape", "ndim", "dtype", "device", "layout", "is_cuda", "itemsize", "nbytes"])
PLAIN = (int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, type)


class Owner(Protocol):
    """Whose run of the model's code met a remote tensor."""

    @property
    def watching(self) -> AbstractContextManager[object] | None:
        """What runs around every function of remote tensors."""
        ...

    def value_of(self, tensor: RemoteTensor) -> torch.Tensor | None:
        """The numbers of `tensor`, if it has any by now."""
        ...

    def note_inputs(self, tensors: list[torch.Tensor]) -> None:
        """These were among the arguments of a function that gave a fake tensor."""
        ...


class RemoteTensor(DeferredTensor):
    """A tensor with a shape and no numbers until it is filled. Made by `remote`."""

    @staticmethod
    def __new__(cls: Any, form: torch.Tensor) -> RemoteTensor:
        """A tensor of torch's that wraps no numbers, of the shape, strides, type and device of `form`."""
        return wrapper_subclass(cls, form)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Reached only past torch's functions, by code that torch does not show to a subclass."""
        raise PlanError(ASKED, f"{func} needs a tensor of another stage", OTHER_AXIS)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """With all remote arguments filled the function itself; else its shapes alone."""
        with without_subclasses():
            kwargs = kwargs or {}
            tensors = [*tensors_in((args, kwargs))]
            met = [one for one in tensors if isinstance(one, RemoteTensor)]
            if _asks_for_form(func):
                return _forms(func, args, kwargs, met[0].owner)
            values = {id(one): value for one in met if (value := one.value) is not None}
            if len(values) < len({id(one) for one in met}):
                return _without_numbers(func, args, kwargs, tensors, met)

        def filled(tensor: torch.Tensor) -> torch.Tensor:
            return values.get(id(tensor), tensor)

        return func(*map_tensors(filled, args), **map_tensors(filled, kwargs))

    @property
    def form(self) -> torch.Tensor:
        """A fake tensor of the same shape."""
        return vars(self)["form"]

    @property
    def owner(self) -> Owner:
        """The run in which it came up."""
        return vars(self)["owner"]

    @property
    def value(self) -> torch.Tensor | None:
        """What it was filled with."""
        attributes = vars(self)
        if attributes["value"] is None:
            attributes["value"] = attributes["owner"].value_of(self)
        return attributes["value"]

    @property
    def arrived(self) -> bool:
        """Whether it has numbers by now."""
        return self.value is not None

    def fill(self, value: torch.Tensor) -> None:
        """From now on it computes as `value`."""
        vars(self)["value"] = value

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"RemoteTensor(shape={tuple(self.form.shape)}, dtype={self.form.dtype})"


def remote(form: torch.Tensor, owner: Owner) -> RemoteTensor:
    """A remote tensor of the shape of `form`, which has no numbers."""
    made = RemoteTensor(form)
    vars(made).update(form=form, owner=owner, value=None)
    return made


def is_remote(tensor: Any) -> bool:
    """Whether it is a tensor that has no numbers here."""
    return isinstance(tensor, RemoteTensor) and tensor.value is None


def present(tensor: torch.Tensor) -> torch.Tensor:
    """What a remote tensor was filled with, if it was; any other as it is."""
    if isinstance(tensor, RemoteTensor) and (value := tensor.value) is not None:
        return value
    return tensor


def key_of(nest: Any) -> tuple[Any, ...] | None:
    """What the forms that a function of `nest` gives follow from; None where that is unknown."""
    found: list[Any] = [torch.is_grad_enabled()]
    found += [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    try:
        found.extend(_parts_of_key(nest))
        hash(tuple(found))
    except TypeError:
        return None
    return tuple(found)


# From a function and the forms of its arguments to what it returned: found once, and not in every microbatch.
_known_results: dict[Any, Any] = {}
MOST_KNOWN = 100_000


def _asks_for_form(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return (
        name in OF_FORM
        or name.startswith("is_")
        or (name == "__get__" and getattr(func.__self__, "__name__", "") in ATTRIBUTES_OF_FORM)
    )


def _without_numbers(
    func: Any, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor], met: list[RemoteTensor]
) -> Any:
    """Runs `func` on shapes alone; the tensors of the result are remote."""
    owner = met[0].owner
    target = _overwritten(func, args, kwargs)
    key = None if target is not None or owner.watching is not None else key_of((func, args, kwargs))
    if target is not None:
        results = _changed_forms(func, args, kwargs, target, owner)
    elif key is not None and key in _known_results:
        results = _known_results[key]
    else:
        results = _forms(func, args, kwargs, owner)
        if key is not None:
            if len(_known_results) > MOST_KNOWN:
                _known_results.clear()
            results = _known_results[key] = map_tensors(_alone, results)
    own = {} if target is None else {id(one.form): one for one in met}
    found: list[RemoteTensor] = []

    def wrapped(form: torch.Tensor) -> RemoteTensor:
        found.append(own[id(form)] if id(form) in own else remote(form, owner))
        return found[-1]

    results = map_tensors(wrapped, results)
    if found or target is not None:
        owner.note_inputs(tensors)
    return results


def _changed_forms(func: Any, args: Any, kwargs: dict[str, Any], target: Any, owner: Owner) -> Any:
    """As `_forms`, of what overwrites `target`: forms that are kept are leaves, and autograd guards those."""
    if owner.watching is not None:
        return _forms(func, args, kwargs, owner)
    others = [tensor for tensor in tensors_in((args, kwargs)) if tensor is not target]
    recorded = torch.is_grad_enabled() and any(form_of(tensor).requires_grad for tensor in others)
    with torch.no_grad():
        results = _forms(func, args, kwargs, owner)
    if recorded and isinstance(target, RemoteTensor):
        target.form.requires_grad_()
    return results


def _forms(func: Any, args: Any, kwargs: dict[str, Any], owner: Owner) -> Any:
    args, kwargs = map_tensors(form_of, args), map_tensors(form_of, kwargs)
    if owner.watching is None:
        with shared_fake_mode():
            return func(*args, **kwargs)
    with shared_fake_mode(), owner.watching:
        return func(*args, **kwargs)


def _alone(form: torch.Tensor) -> torch.Tensor:
    """`form` without the graph that led to it."""
    return form.detach().requires_grad_(form.requires_grad)


def form_of(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, RemoteTensor):
        return tensor
    value = vars(tensor)["value"]
    return tensor.form if value is None else value


def _overwritten(func: Any, args: Any, kwargs: Any) -> Any:
    """What `func` overwrites, if it does; raises `PlanError` where that has numbers, which would be lost."""
    name = getattr(func, "__name__", "")
    target = kwargs.get("out", args[0] if OVERWRITING.fullmatch(name) and args else None)
    if isinstance(target, torch.Tensor) and not is_remote(target):
        raise PlanError(
            ASKED,
            f"{name} writes a tensor of another stage into one that every stage has",
            f"make a new tensor (torch.where, torch.cat) in the model, or {OTHER_AXIS}",
        )
    return target


def _parts_of_key(nest: Any) -> Iterator[Any]:
    if isinstance(nest, torch.Tensor):
        tensor = form_of(nest)
        yield (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
    elif isinstance(nest, list | tuple):
        yield (type(nest), len(nest))
        for one in nest:
            yield from _parts_of_key(one)
    elif isinstance(nest, dict):
        yield tuple(nest)
        yield from _parts_of_key(list(nest.values()))
    elif isinstance(nest, slice):
        yield from _parts_of_key((nest.start, nest.stop, nest.step))
    elif nest is None or nest is Ellipsis or isinstance(nest, PLAIN) or callable(nest):
        yield (type(nest), nest)  # 1 is not True here
    else:
        raise TypeError
