"""What code of the job that holds a parameter may ask of it outside of a loss, where this rank has a part of it.

Functions of numbers are computed on a split tensor (`axis.compute_shown`). Those of this module are about the parameter
itself: its gradient, its data, whether it is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from evenly.errors import RunError
from evenly.parallel.tensor.axis import Axis, PartParameter, SplitTensor, is_split
from evenly.parallel.tensor.execution import part_for, register_hook
from evenly.torch_private import FOREACH, subclass_of, with_torch_function

T = torch.Tensor


def of_part(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs)


def data(_: Any, parameter: PartParameter) -> SplitTensor:
    """Shares memory with the parameter; what is changed through it shows in no version."""
    parameter.axis.forget_views()
    return parameter.axis.split(parameter.data, parameter.split_as)


def set_data(_: Any, parameter: PartParameter, value: T) -> None:
    parameter.axis.forget_views()
    parameter.data = _part_of(parameter, value).clone()


def gradient(_: Any, parameter: PartParameter) -> SplitTensor | None:
    own = parameter.grad
    return None if own is None else parameter.axis.split(own.view_as(own), parameter.split_as)


def set_gradient(_: Any, parameter: PartParameter, value: T | None) -> None:
    parameter.grad = None if value is None else _part_of(parameter, value).clone()


def _part_of(parameter: PartParameter, value: T) -> T:
    layout = parameter.split_as
    if not (is_split(value) and value.split_as.full_shape(value.shape) == layout.full_shape(parameter.shape)):
        value = _checked(parameter, value)
    part = part_for(value, layout.at(layout.dim - parameter.dim()), parameter.axis)
    assert part is not None  # of the same shape
    return part.detach()


def _checked(parameter: PartParameter, value: T) -> T:
    shape = parameter.split_as.full_shape(parameter.shape)
    if is_split(value) or tuple(value.shape) != tuple(shape):
        raise RunError(
            f"a tensor of shape {tuple(value.shape)} in the place of a parameter's",
            f"the parameter is of shape {tuple(shape)}, and split over ranks",
            "give it a tensor of its shape",
        )
    return value


def foreach(func: Callable[..., Any], tensors: Sequence[T], *args: Any, **kwargs: Any) -> Any:
    name = FOREACH[func]
    if name == "norm":
        one: Any = torch.linalg.vector_norm
    else:
        one = getattr(T, name, None) or getattr(torch, name, None)
    if one is None or not isinstance(tensors, (list, tuple)):
        return NotImplemented
    names = ("value",) if name.startswith("addc") and len(args) > 2 else ()  # which those of one tensor want named
    named = dict(zip(names, args[2:], strict=True)) | kwargs
    args = args[: len(args) - len(names)]

    def item(value: Any, number: int) -> Any:
        return value[number] if isinstance(value, (list, tuple)) else value  # pyright: ignore[reportUnknownVariableType]

    with with_torch_function():
        found = [
            one(tensor, *(item(a, number) for a in args), **{key: item(a, number) for key, a in named.items()})
            for number, tensor in enumerate(tensors)
        ]
    return None if name.endswith("_") else tuple(found)


def show(parameter: torch.nn.Parameter, layout: Any, axis: Axis) -> None:
    """From now on `parameter`, this rank's part, is the whole to the job's code where `axis` shows it."""
    parameter.__class__ = subclass_of(PartParameter, type(parameter))  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(parameter, PartParameter)
    parameter.split_as, parameter.axis = layout, axis


# Attributes of a parameter that its part has as well.
SAME = "is_leaf requires_grad retains_grad grad_fn output_nr grad_dtype"
OF_PARAMETERS: dict[Callable[..., Any], Callable[..., Any]] = {
    **{getattr(T, name).__get__: of_part for name in SAME.split() if hasattr(T, name)},
    T.requires_grad.__set__: of_part,  # pyright: ignore
    T.requires_grad_: of_part,
    T.data.__get__: data,  # pyright: ignore
    T.data.__set__: set_data,  # pyright: ignore
    T.grad.__get__: gradient,  # pyright: ignore
    T.grad.__set__: set_gradient,  # pyright: ignore
    T.register_hook: register_hook,
}
