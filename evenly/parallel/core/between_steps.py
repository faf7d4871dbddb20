"""What code of the job finds of parameters outside of a loss, where this rank has not all of them.

That is in its own loop, in a schedule, and as it builds its optimizer.

The engine works with what this rank has. To the job's code a parameter is the whole: each axis has a class for what it
leaves of one (`tensor.axis.PartParameter`, `data.sharded_parameter`), whose functions gather. Of one on another rank of
the pipeline (`RemoteParameter`) the job may change the values, which that rank does as well; no number comes of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from evenly.data.nest import map_tensors, tensors_in
from evenly.errors import RunError
from evenly.parallel.core.parameter_views import ViewedParameters
from evenly.torch_private import memory_key, tensor_dict, version, without_subclasses

T = torch.Tensor
IN_PLACE = re.compile(r"__i(add|sub|mul|matmul|truediv|div|floordiv|mod|pow|and|or|xor|[lr]shift)__|__set(item)?__")


FILES = ("numpy", "__array__", "__repr__", "__format__", "__reduce_ex__")  # numbers leave torch, on one rank alone


class Wholes(dict[Any, T]):
    """The full tensors that `run.whole_parameters()` has gathered, by `form` of what this rank has of them."""

    @staticmethod
    def form(part: T) -> Any:
        """Return what `part` is known by; of a split tensor for as long as it has these numbers."""
        changes = version(part) if hasattr(part, "split_as") else 0  # DTensors share memory and no version
        with without_subclasses():
            return memory_key(part), part.storage_offset(), part.shape, part.stride(), changes

    def of(self, part: T, whole: T) -> T | None:
        """Return the full tensor of `part`, or None if there is none, or a gradient has to pass to `whole`."""
        return None if torch.is_grad_enabled() and whole.requires_grad else self.get(self.form(part))

    def to_write(self, call: str, part: T) -> T:
        """Return the full tensor of `part` for `call`, one of `FILES`; raise `RunError` if there is none."""
        if (whole := self.get(self.form(part))) is not None:
            return whole
        raise RunError(
            f"{call} of a tensor that is cut over ranks",
            "one rank alone cannot gather it, and nothing says that the others come to this line",
            "enter `with run.whole_parameters():` on all ranks, and write within it on the main one (run.is_main); or "
            "save a checkpoint, and let `evenly export` write its weights",
        )


@dataclass(eq=False)
class Outside:
    """Whether code outside of a loss is the job's, which finds whole parameters, or the engine's.

    closed:   whether the run has ended, and nothing can be gathered any more.
    stepping: whether an optimizer steps full parameters in the place of those that the job may hold.
    """

    shown: bool = False
    closed: bool = False
    stepping: bool = False
    wholes: Wholes = field(default_factory=Wholes)

    @contextmanager
    def showing(self, shown: bool) -> Generator[None]:
        """Within, it is the job's, or the engine's."""
        before, self.shown = self.shown, shown
        try:
            yield
        finally:
            self.shown = before

    @contextmanager
    def step(self) -> Generator[None]:
        """Within, an optimizer steps full parameters."""
        self.stepping = True
        try:
            yield
        finally:
            self.stepping = False


def name_of_call(func: Callable[..., Any]) -> str:
    """As users of a function of torch call it; of a property with how it is asked for."""
    name: str = getattr(func, "__name__", str(func))
    owner = getattr(getattr(func, "__self__", None), "__name__", "")
    return f"{owner}.{name}" if name in ("__get__", "__set__") else name


def changes_its_first(name: str) -> bool:
    last = name.rpartition(".")[2]
    return IN_PLACE.fullmatch(last) is not None or (last.endswith("_") and not last.endswith("__"))


def with_first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of which the first has no name; functions of torch.nn.init are given all by name."""
    if args or not kwargs:
        return args, kwargs
    key, *_ = kwargs
    return (kwargs[key],), {one: value for one, value in kwargs.items() if one != key}


def closed_error(what: str) -> RunError:
    """The error for what came after the end of the run."""
    return RunError(
        f"{what} of a parameter that is cut over ranks",
        "the run has ended, and no rank has all of it",
        "use the model before run.close(), or a checkpoint (evenly export)",
    )


NUMBERS = (*("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__"), *("cpu", "cuda"))


class RemoteParameter(nn.Parameter):
    """The placeholder of a parameter of another stage, and what is computed of it: shapes, and no numbers."""

    name_in_model: str
    outside: Outside

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """On another rank as well."""
        if id(self) not in memo:
            with without_subclasses():
                memo[id(self)] = show_remote(nn.Parameter(self.detach().clone()), self.name_in_model, self.outside)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _elsewhere("saving", self.name_in_model)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with without_subclasses():
            return _of_remote(func, *with_first(args, kwargs or {}))


def show_placeholders(model: nn.Module, placeholders: Mapping[str, Any], outside: Outside) -> None:
    """Has the job's code find the `placeholders` of parameters of `model`, by name, where `outside` shows them."""
    for name, placeholder in placeholders.items():
        if isinstance(placeholder, nn.Parameter):
            show_remote(placeholder, name, outside)
    for module in model.modules():
        tensors = tensor_dict(module, "_parameters")
        if isinstance(tensors, ViewedParameters) and any(map(tensors.is_hidden, tensors)):
            tensors.add_view(partial(_placeholder_of, tensors, outside))


def _placeholder_of(tensors: ViewedParameters, outside: Outside, name: str, _: T | None) -> T | None:
    return tensors.placeholder(name) if outside.shown else None


def show_remote(placeholder: Any, name: str, outside: Outside) -> Any:
    """From now on no number comes of `placeholder` without an error where `outside` shows it to the job."""
    placeholder.__class__ = RemoteParameter
    placeholder.name_in_model, placeholder.outside = name, outside
    return placeholder


def _of_remote(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = [*tensors_in((args, *kwargs.values()))]
    one: Any = next(tensor for tensor in found if isinstance(tensor, RemoteParameter))
    name = name_of_call(func)
    attribute = getattr(func, "__name__", "") == "__get__" and func != T.data.__get__  # pyright: ignore
    if not one.outside.shown or attribute:
        return func(*args, **kwargs)
    first = args[0] if args else None
    written = changes_its_first(name) and all(isinstance(t, RemoteParameter) for t in tensors_in(first))
    mixed = not written and any(not isinstance(tensor, RemoteParameter) for tensor in found)
    if mixed or name in NUMBERS:
        raise _elsewhere(name, one.name_in_model)
    if written:  # by the rank that has it
        return first
    result = func(*args, **kwargs)
    return map_tensors(lambda tensor: show_remote(tensor, one.name_in_model, one.outside), result)


def _elsewhere(call: str, parameter: str) -> RunError:
    return RunError(
        f"{call} of parameter {parameter} outside of a loss",
        "it is on another rank of the pipeline, and this rank does not have its numbers",
        "compute with each parameter by itself, let the gradient do it, or use a plan without pipeline",
    )


def refuse_inference(*_: object) -> None:
    """Raise `RunError` in `torch.inference_mode`, before a forward under zero3."""
    if torch.is_inference_mode_enabled():
        found = "parameters are gathered for it, and change in memory that inference tensors do not share"
        raise RunError("a call of the model in torch.inference_mode() under zero3", found, "use torch.no_grad()")
