"""Tensors that are split over the ranks of the tensor axis, and how they become whole again.

A `SplitTensor` is, in memory and to autograd, this rank's part; to whoever asks for its shape, and to every function of
torch, it is the whole tensor. Functions in the table of `ops` compute on the parts. For any other the whole is gathered
first: this costs communication, and never a number.

A plain tensor is *whole*: every rank holds the same values, and the same gradient, which is complete. This stays so
because nothing passes between whole and split but by a pair of `comm.pairs`, whose backward is the adjoint of its
forward:

    enter   a whole tensor that each rank computes with on its own; the gradients of all ranks are added up
    part    this rank's part of a whole tensor; gradients are gathered
    gather  the whole of a split tensor, for each rank to compute with on its own; gradients are added up and cut
    gather_full    the full tensor of a split one; of gradients each rank takes its part
    total   the sum of what the ranks computed, whole
    rows    the same, split along the rows (the sequence) where the axis is asked to

Random numbers are drawn for the whole tensor, the same on all ranks, of which each uses its part.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeGuard

import torch
from torch.autograd.function import FunctionCtx

from evenly.comm import pairs
from evenly.comm.groups import Group
from evenly.data.nest import map_tensors, tensors_in
from evenly.errors import RunError
from evenly.observe.recorder import frame_place
from evenly.parallel.core.between_steps import FILES, Wholes, changes_its_first, closed_error, name_of_call, with_first
from evenly.parallel.tensor.layout import Layout
from evenly.torch_private import (
    change_transformed,
    in_transform,
    memory_key,
    outside_transforms,
    subclass_of,
    version,
    without_subclasses,
    without_torch_function,
)

# Attributes of a whole tensor: its version, and what it has been entered as, for products or for anything.
MULTIPLIED, ENTERED = "_evenly_multiplied", "_evenly_entered"


@dataclass(eq=False)
class Axis:
    """The tensor axis as this rank sees it.

    group:     the ranks among which tensors are split.
    sequence:  whether sums of whole activations are left split along the sequence.
    recomputed: whether products may be saved, to be taken in place of their recomputation.
    overlapped: whether sums of inputs' gradients are under way while those of weights are computed
                (`sums_under_products`).
    computing: how deeply nested what the job computes is, a loss or its backward: its code sees split parameters, the
               engine and the optimizer this rank's parts.
    shown:     whether code outside of a loss, too, finds whole parameters: the job's own, between steps.
    closed:    whether the run has ended, and nothing can be gathered any more.
    """

    group: Group
    sequence: bool = False
    recomputed: bool = False
    overlapped: bool = False
    computing: int = 0
    shown: bool = False
    closed: bool = False
    wholes: Wholes = field(default_factory=Wholes)  # those of `Outside`
    position: int = field(init=False)
    _views: dict[tuple[int, bool], SplitTensor] = field(default_factory=dict[tuple[int, bool], "SplitTensor"])

    def __post_init__(self) -> None:
        self.position = self.group.position

    def __enter__(self) -> None:
        self.computing += 1

    def __exit__(self, *_: object) -> None:
        self.computing -= 1
        if not self.computing:
            self.forget_views()

    @contextmanager
    def showing(self, shown: bool) -> Generator[None]:
        """Within, code outside of a loss finds parameters whole (the job's), or as this rank's parts (the engine's)."""
        before, self.shown, self.computing = (self.shown, self.computing), shown, 0
        self.forget_views()
        try:
            yield
        finally:
            self.shown, self.computing = before
            self.forget_views()

    def forget_views(self) -> None:
        """Makes new ones from now on, on which nothing is kept that was computed of the values so far."""
        self._views.clear()
        self.wholes.clear()  # what is changed through `.data` shows in no version

    def view_of(self, local: torch.nn.Parameter, layout: Layout) -> SplitTensor:
        """The split tensor of which `local` is this rank's part; one object, under whatever names it is asked for."""
        key = (id(local), torch.is_grad_enabled())
        view = self._views.get(key)
        if view is None:
            with without_torch_function():  # not a call of the job's
                view = self._views[key] = self.split(local.view_as(local), layout)
            view.local = local  # outlives its view, so that no other parameter gets its id
        return view

    # ------------------------------------------------------------------------------------------- conversions
    def enter(self, tensor: torch.Tensor, *, products: bool = False) -> torch.Tensor:
        """The whole of a tensor for computing with parts; what enters twice shares one sum of gradients.

        products: whether it is for a product, whose gradient can be summed where it lies.
        """
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return self.gather_full(tensor) if is_split(tensor) else tensor
        name = MULTIPLIED if products else ENTERED
        known: tuple[int, torch.Tensor] | None = vars(tensor).get(name)
        if known is not None and known[0] == version(tensor):
            return known[1]
        entered = self._gather(tensor) if is_split(tensor) else pairs.copy(tensor, self.group, in_place=products)
        if tensor.grad_fn is not None:  # a leaf outlives the graph
            setattr(tensor, name, (version(tensor), entered))
        return entered

    def _gather(self, tensor: SplitTensor) -> torch.Tensor:
        layout = tensor.split_as
        opened = opened_at(tensor, layout.dim, layout.outer, layout.sizes[self.position])
        joined = pairs.gather(opened, self.group, layout.dim + 1, layout.sizes)
        return in_order(joined.flatten(layout.dim, layout.dim + 1), memory_order(tensor))

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `tensor`, whole, in its memory: what is given are results that nobody else has."""
        return pairs.reduce(tensor, self.group, in_place=not self.recomputed)

    def rows(self, tensor: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
        """`total` of an activation [..., L, D], with `sequence` split along L; shape: of what it is a view of."""
        shape = shape or tensor.shape
        if not self.sequence or len(shape) < 3 or not Layout.deals(shape[-2], self.group.size):
            return self.total(tensor)
        outer = 1 if len(shape) == tensor.dim() else math.prod(shape[:-2])
        layout = Layout.of(tensor.dim() - 2, outer, shape[-2], 1, self.group.size)
        opened = opened_at(tensor, layout.dim, layout.outer, layout.units * layout.inner)
        own = pairs.reduce_scatter(opened, self.group, layout.dim + 1, layout.sizes)
        return self.split(own.flatten(layout.dim, layout.dim + 1), layout)

    def part(self, tensor: torch.Tensor, layout: Layout) -> SplitTensor:
        dim = layout.dim
        if tensor.requires_grad and torch.is_grad_enabled():
            opened = opened_at(tensor, dim, layout.outer, layout.units * layout.inner)
            own = pairs.split(opened, self.group, dim + 1, layout.sizes).flatten(dim, dim + 1)
        else:
            own = own_part(tensor, layout, self.position)
        return self.split(own, layout)

    def gather_full(self, tensor: SplitTensor) -> torch.Tensor:
        layout = tensor.split_as
        if self.wholes and (whole := self.wholes.of(tensor, tensor)) is not None:
            return whole
        with without_subclasses():
            opened = opened_at(tensor, layout.dim, layout.outer, layout.sizes[self.position])
            joined = pairs.join(opened, self.group, layout.dim + 1, layout.sizes)
            return in_order(joined.flatten(layout.dim, layout.dim + 1), memory_order(tensor))

    def split(self, own: torch.Tensor, layout: Layout) -> SplitTensor:
        """`own`, this rank's part, as the split tensor that it is a part of. The object itself changes its class."""
        own.__class__ = SplitTensor if type(own) in _PLAIN else subclass_of(SplitTensor, type(own))
        own.split_as, own.axis = layout, self  # pyright: ignore[reportAttributeAccessIssue]
        return own  # type: ignore[return-value]


def memory_order(tensor: torch.Tensor) -> list[int]:
    """The dims of `tensor` as its elements follow each other in memory: functions that draw numbers keep to it."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def in_order(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """`tensor` with its dims in memory in `order`."""
    if all(dim == place for place, dim in enumerate(order)):
        return tensor.contiguous()
    back = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(*order).contiguous().permute(back) if order else tensor


def opened_at(tensor: torch.Tensor, dim: int, outer: int, length: int) -> torch.Tensor:
    """`tensor` with its dim `dim` as two, outer x length; `Tensor.unflatten`, in Python, takes longer."""
    shape = tensor.shape
    return tensor.view(*shape[:dim], outer, length, *shape[dim + 1 :])


def own_part(tensor: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """What `rank` holds of the whole `tensor`: a copy, without gradient."""
    start = sum(layout.sizes[:rank])
    opened = opened_at(tensor.detach(), layout.dim, layout.outer, layout.units * layout.inner)
    own = opened.narrow(layout.dim + 1, start, layout.sizes[rank])
    return own.flatten(layout.dim, layout.dim + 1).clone(memory_format=torch.contiguous_format)


# A function of torch -> how it computes on parts; filled by `ops`.
EXECUTIONS: dict[Callable[..., Any], Callable[..., Any]] = {}
# What no part and no copy of the whole could stand in for.
REFUSED = (
    *("retain_grad", "requires_grad_", "backward", "set_", "data_ptr", "storage", "untyped_storage"),
    *("__dlpack__", "__cuda_array_interface__.__get__", "register_post_accumulate_grad_hook"),
)


def compute(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func` of tensors, some of which are split; torch sees the parts as ordinary tensors in here."""
    if in_transform() and func not in LOCAL:
        return _compute_transformed(func, args, kwargs)
    if not torch.is_grad_enabled():
        _refuse_own_functions(func)
    execute = EXECUTIONS.get(func)
    if execute is not None:
        try:
            result = execute(func, *args, **kwargs)
        except TypeError as problem:
            if problem.__traceback__ is None or problem.__traceback__.tb_next is not None:
                raise
            result = NotImplemented  # arguments that it does not take
        if result is not NotImplemented:
            return result
    return compute_full(func, args, kwargs)


def compute_full(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func` of full tensors: what is split is gathered."""
    name = name_of_call(func)
    args, kwargs = with_first(args, kwargs)
    if name in FILES and is_split(args[0]) and args[0].axis.shown:
        return func(args[0].axis.wholes.to_write(name, args[0]), *args[1:], **kwargs)
    first = args[0] if changes_its_first(name) else None
    if is_split(first) and not (torch.is_grad_enabled() and first.requires_grad):
        return _change_full(func, first, args[1:], kwargs)
    changed = tensors_in((kwargs.get("out"), first))
    if name in REFUSED or any(isinstance(tensor, (SplitTensor, FullCopy)) for tensor in changed):
        raise _refusal(name, "it would change or watch this rank's part, where the whole is meant")
    copies: list[torch.Tensor] = []

    def gathered(tensor: torch.Tensor) -> torch.Tensor:
        full = tensor.axis.gather_full(tensor) if is_split(tensor) else tensor
        if full is not tensor or isinstance(tensor, FullCopy):
            copies.append(full)
        return full

    result = func(*map_tensors(gathered, args), **map_tensors(gathered, kwargs))
    memory = {*map(memory_key, copies)}
    return map_tensors(lambda tensor: _as_copy(tensor) if memory_key(tensor) in memory else tensor, result)


def _compute_transformed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func` within a transformation of `torch.func`: of full tensors, which are gathered outside of it."""
    changed = tensors_in((kwargs.get("out"), args[0] if args and changes_its_first(name_of_call(func)) else None))
    if any(map(is_split, changed)):
        raise _refusal(name_of_call(func), "it would change this rank's part, where the whole is meant")
    return func(*map_tensors(full_for_transform, args), **map_tensors(full_for_transform, kwargs))


def full_for_transform(tensor: torch.Tensor) -> torch.Tensor:
    """What takes the place of a split tensor within a transformation of `torch.func`."""
    if isinstance(tensor, PartParameter) and (tensor.axis.shown or tensor.axis.computing):
        tensor = tensor.axis.view_of(tensor, tensor.split_as)
    if not is_split(tensor) or is_part(tensor):
        return tensor
    with outside_transforms():
        return tensor.axis.gather_full(tensor)


def _refusal(name: str, why: str) -> RunError:
    return RunError(
        f"{name} on a tensor that is split over the ranks of the tensor axis",
        why,
        "write it out of place, or keep the parameter behind it whole (tensor_exclude=PATTERN in the plan)",
    )


def _change_full(func: Callable[..., Any], first: SplitTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func` changes the full tensor, and this rank keeps its part: for code that records no gradient."""
    full = first.axis.gather_full(first)
    shape = full.shape
    compute_full(func, (full, *args), kwargs)
    if full.shape != shape:
        raise _refusal(name_of_call(func), "it changes the tensor's shape in place")
    first.copy_(own_part(full, first.split_as, first.axis.position))
    return first


def _as_copy(tensor: torch.Tensor) -> torch.Tensor:
    tensor.__class__ = FullCopy if type(tensor) in _PLAIN else subclass_of(FullCopy, type(tensor))
    return tensor


def _refuse_own_functions(func: Callable[..., Any]) -> None:
    """Raises `RunError` in the forward of a `torch.autograd.Function`, whose own backward knows nothing of parts."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        named = code.co_argcount and code.co_name in ("forward", "setup_context")  # what is local takes long to ask for
        if named and isinstance(frame.f_locals.get(code.co_varnames[0]), FunctionCtx):
            raise RunError(
                f"{name_of_call(func)} on a split tensor in {frame_place(frame)}",
                "a torch.autograd.Function has a backward of its own, which would see this rank's part alone",
                "keep the parameters that meet it whole (tensor_exclude=PATTERN in the plan), or use another axis",
            )
        frame = frame.f_back


class SplitTensor(torch.Tensor):
    """This rank's part of a tensor, taken for the whole by all code that does not know better.

    split_as: how it is split. axis: among whom. local: of a parameter's view, the parameter. rows: the shape of what
    it is a view of, its last dim apart, where that was flattened.
    """

    split_as: Layout
    axis: Axis
    local: torch.nn.Parameter
    rows: tuple[int, ...] | None = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        run = _computation(types)
        if run is None:
            return NotImplemented  # torch asks that class
        with without_subclasses():
            return run(func, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return compute_shown(
            torch.Tensor.__reduce_ex__, (self, protocol), {}
        )  # not as a parameter's, which has a state

    def __iter__(self) -> Iterator[torch.Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return iter(self.unbind(0))  # torch's own asks for the number of dims first

    def __repr__(self, **_: Any) -> str:
        """Local: printing on one rank must not wait for the others."""
        with without_subclasses():
            return f"SplitTensor({self.split_as.full_shape(self.shape)}, {self.split_as}, {self.dtype})"


class FullCopy(torch.Tensor):
    """What torch would have made a view, of a copy that the whole was gathered in: it cannot be written through."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        run = compute if any(issubclass(one, SplitTensor) for one in types) else compute_full
        run = compute_shown if any(issubclass(one, PartParameter) for one in types) else run
        with without_subclasses():
            return run(func, args, kwargs or {})


class PartParameter(SplitTensor, torch.nn.Parameter):
    """This rank's part of a parameter, as all have it that hold the parameter: the engine, the optimizer, the job.

    The engine works with the part. Code of the job (a loss, its own loop, what holds the parameter by a list or a
    closure) finds the whole, as split as the parameter is: no function of torch sees a part.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _computation(types) is None:
            return NotImplemented  # torch asks that class
        with without_subclasses():
            for one in args:
                if not is_part(one):
                    continue
                if one is args[0] and not (one.axis.shown or one.axis.computing):
                    return func(*args, **kwargs or {})  # the engine's
                if func in PRODUCTS and one.axis.computing:
                    return compute(func, args, kwargs or {})
                break
            return compute_shown(func, args, kwargs or {})

    __repr__ = torch.nn.Parameter.__repr__  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A parameter of the full shape where it is shown, which is no longer split."""
        if id(self) not in memo:
            full = torch.Tensor.clone(self.detach())
            full = full.axis.gather_full(full) if is_split(full) else full
            memo[id(self)] = torch.nn.Parameter(full, self.requires_grad)
        return memo[id(self)]


# A function of torch -> how it is computed on the part itself, of a parameter that is shown whole; filled by `ops`.
OF_PARAMETERS: dict[Callable[..., Any], Callable[..., Any]] = {}
# Functions that take a parameter's part as they take any: what they return is another tensor. They need no view of it.
PRODUCTS: set[Callable[..., Any]] = set()
# Functions that need no other rank.
LOCAL: set[Callable[..., Any]] = set()


def compute_shown(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func` of tensors, of which some are parameters that this rank has a part of."""
    part = next((one for one in tensors_in((args, *kwargs.values())) if is_part(one)), None)
    if part is None or not (part.axis.shown or part.axis.computing):
        return func(*args, **kwargs)
    if part.axis.closed and func not in LOCAL:
        raise closed_error(name_of_call(func))
    first = args[0] if args and is_part(args[0]) else None
    if first is not None and (execute := OF_PARAMETERS.get(func)) is not None:
        return execute(func, *args, **kwargs)

    def view(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.axis.view_of(tensor, tensor.split_as) if is_part(tensor) else tensor

    result = compute(func, map_tensors(view, args), map_tensors(view, kwargs))
    return first if first is not None and result is view(first) else result  # changed in place


@cache
def _computation(types: tuple[type, ...]) -> Callable[..., Any] | None:
    """What computes functions of tensors of these classes, of which one is split; None where another class does."""
    if len(types) > 1 and any(getattr(one, "computes_mixed", False) for one in types):
        return None
    return compute_shown if any(issubclass(one, PartParameter) for one in types) else compute


_PLAIN = (torch.Tensor, SplitTensor, FullCopy)  # others are fake, say


def is_split(value: object) -> TypeGuard[SplitTensor]:
    return isinstance(value, SplitTensor)


def is_part(value: object) -> TypeGuard[PartParameter]:
    """Whether `value` is a part of a parameter; isinstance, which torch has in Python for parameters, takes longer."""
    return issubclass(type(value), PartParameter)


def whole_of(value: Any) -> Any:
    """`value` as a plain tensor that is whole, if it is one that the axis has computed: what a buffer is set to."""
    if not isinstance(value, (SplitTensor, FullCopy)):
        return value
    with without_subclasses():
        return value.axis.gather_full(value) if isinstance(value, SplitTensor) else value.view_as(value)


def transform_full() -> None:
    """Has transformations of `torch.func` take the whole of split tensors and of parameters that are shown."""
    for kind in (SplitTensor, PartParameter):
        change_transformed(kind, full_for_transform)
