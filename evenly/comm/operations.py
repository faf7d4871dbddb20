"""What ranks say to each other: point-to-point and the collectives, over a `Group`.

Every operation is called as a function, which returns when it is done, or begun: `all_reduce.begin(x, group)` returns a
`Pending` at once, and what was given may be neither read nor written before its `wait()`. All ranks of a group call the
same collectives in the same order. `to` and `source` are positions in the group. Over a group of one rank each is the
identity.

*pieces* are what a tensor is cut into along `dim`, or joined from, one per rank in the order of positions; they may
differ in length and may be empty. Where `sizes` (the lengths of all pieces) are not given they are found: for a cut, as
`even_sizes`; for a join, by an exchange of numbers first, which `begin` waits for.

Tensors may have any dtype, any strides and no elements; gradients do not flow (see `pairs`). What only moves data moves
bytes, so every dtype travels everywhere; reductions are made in a type that the backends add in. What a backend lacks
(pieces of different lengths, `scatter` and `gather`) is made of operations that all have, the same on each.

In a *checked* group each collective first compares what the ranks ask for, and differences raise one `RunError` that
names each rank's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import update_wrapper
from time import perf_counter, sleep
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist

from evenly.comm.added import add
from evenly.comm.agreement import check_call
from evenly.comm.backend import all_gather_single, reduce_scatter_single
from evenly.comm.groups import Group
from evenly.errors import UserError
from evenly.observe.recorder import CollectiveCall, call_text, here

_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
_DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _DTYPES}

# On the CPU a rank that waits for a collective gives way to other threads for so long before it sleeps.
AWAKE_S = 0.002
_give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: sleep(0))

Reduction = Literal["sum", "mean", "min", "max", "product"]

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_TORCH = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
_LOCAL: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}
# What no backend reduces, and the type that holds its values and that they do.
_REDUCED_AS = {
    torch.bool: torch.uint8,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
_REDUCED = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    *_REDUCED_AS,
)


class Pending(Protocol[T_co]):
    """An operation under way."""

    def wait(self) -> T_co:
        """Returns its result once it is done; may be called again."""
        ...


class _Work(Protocol):
    def is_completed(self) -> bool: ...

    def wait(self) -> object: ...


class _SinglePending(Generic[T]):
    """Works of torch, and what is left to do after them; `told` if torch tells of them that they are completed."""

    told = True

    def __init__(self, group: Group, serial: int, works: Sequence[_Work], finish: Callable[[], T]) -> None:
        self._group, self._serial = group, serial
        self._works, self._finish = works, finish
        self._result: list[T] = []

    def wait(self) -> T:
        if not self._result:
            for work in self._works:
                if self.told and self._group.device.type == "cpu":
                    _stay_awake(work)
                work.wait()
            if self._group.recorder is not None and self._serial:
                self._group.recorder.leave(self._serial)
            self._result.append(self._finish())
        return self._result[0]


class _Messages(_SinglePending[T]):
    """From one rank to another: torch does not tell that they have come."""

    told = False


def _stay_awake(work: _Work) -> None:
    """Gives way to other threads, the backend's among them, until `work` is done, for a moment at most.

    To wake a thread takes up to milliseconds on a virtual machine, longer than an operation on a few numbers.
    """
    until = perf_counter() + AWAKE_S
    while not work.is_completed() and perf_counter() < until:
        _give_way()


class AwakeWork(dist.Work):
    """A work of torch's on the CPU, for others to wait for: who does stays awake for a moment."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        """Returns once the work is done."""
        _stay_awake(self._work)
        return self._work.wait(*args, **kwargs)


class Operation(Generic[P, T]):
    """A function over ranks: call it to have the result, `begin` it to go on meanwhile."""

    def __init__(self, begin: Callable[P, Pending[T]]) -> None:
        self.begin = begin
        update_wrapper(self, begin)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.begin(*args, **kwargs).wait()


# --------------------------------------------------------------------------------------------- point to point
@Operation
def send(tensor: torch.Tensor, to: int, group: Group, *, tag: int = 0) -> Pending[None]:
    """Sends `tensor` to the rank at position `to`, which receives the same shape and dtype under the same `tag`."""
    group.check_position(to, "receiver")
    serial = _enter(group, "send", tensor, detail=f"to {to}, tag {tag}", collective=False)
    carried = _bytes(_contiguous(tensor))
    works = [_isend(carried, to, group, tag)] if carried.numel() else []
    return _Messages(group, serial, works, lambda: None)


@Operation
def recv(tensor: torch.Tensor, source: int, group: Group, *, tag: int = 0) -> Pending[torch.Tensor]:
    """Fills `tensor` with what the rank at position `source` sends, and returns it."""
    group.check_position(source, "source")
    serial = _enter(group, "recv", tensor, detail=f"from {source}, tag {tag}", collective=False)
    landing = _contiguous(tensor)
    works = [_irecv(_bytes(landing), source, group, tag)] if tensor.numel() else []
    return _Messages(group, serial, works, lambda: _put_back(landing, tensor))


isend, irecv = send.begin, recv.begin


# ------------------------------------------------------------------------------------- whole tensors, in place
@Operation
def broadcast(tensor: torch.Tensor, source: int, group: Group) -> Pending[torch.Tensor]:
    """Replaces `tensor` by that of the rank at position `source`, in place."""
    group.check_position(source, "source")
    serial = _enter(group, "broadcast", tensor, detail=f"from {source}")
    if not tensor.numel() or group.size == 1:
        return _SinglePending(group, serial, (), lambda: tensor)
    landing = _contiguous(tensor)
    work = dist.broadcast(_bytes(landing), group=group.handle, group_src=source, async_op=True)
    return _SinglePending(group, serial, _works(work), lambda: _put_back(landing, tensor))


@Operation
def all_reduce(
    tensor: torch.Tensor, group: Group, reduction: Reduction = "sum", *, label: str = ""
) -> Pending[torch.Tensor]:
    """Replaces `tensor` by its reduction over the ranks, in place; the same bits on all ranks.

    label: what it is, for messages.
    """
    carried = _carried(tensor, reduction)
    serial = _enter(group, "all_reduce", tensor, detail=reduction, label=label)
    if not tensor.numel() or group.size == 1:
        return _SinglePending(group, serial, (), lambda: tensor)
    if reduction == "sum" and carried.data_ptr() == tensor.data_ptr():
        # The group's own method: what dist.all_reduce does around it takes 0.07 ms, 2 % of a small step.
        return _SinglePending(group, serial, [group.handle.allreduce([carried])], lambda: tensor)
    work = dist.all_reduce(carried, _torch_reduction(reduction), group=group.handle, async_op=True)
    return _SinglePending(group, serial, _works(work), lambda: _reduced_back(carried, tensor, group.size, reduction))


@Operation
def reduce(tensor: torch.Tensor, to: int, group: Group, reduction: Reduction = "sum") -> Pending[torch.Tensor]:
    """Replaces `tensor` of the rank at position `to` by the reduction over the ranks; the others keep theirs."""
    group.check_position(to, "receiver")
    carried = _carried(tensor, reduction)
    serial = _enter(group, "reduce", tensor, detail=f"{reduction} to {to}")
    if not tensor.numel() or group.size == 1:
        return _SinglePending(group, serial, (), lambda: tensor)
    mine = group.position == to
    if not mine and carried.data_ptr() == tensor.data_ptr():
        carried = carried.clone()  # backends use it as room for partial sums
    work = dist.reduce(carried, group_dst=to, op=_torch_reduction(reduction), group=group.handle, async_op=True)
    finish = (lambda: _reduced_back(carried, tensor, group.size, reduction)) if mine else (lambda: tensor)
    return _SinglePending(group, serial, _works(work), finish)


@Operation
def barrier(group: Group) -> Pending[None]:
    """Returns when every rank has come here."""
    serial = _enter(group, "barrier", None)
    if group.size == 1:
        return _SinglePending(group, serial, (), lambda: None)
    return _SinglePending(group, serial, _works(dist.barrier(group=group.handle, async_op=True)), lambda: None)


# -------------------------------------------------------------------------------------------- pieces of a tensor
def even_sizes(length: int, parts: int) -> list[int]:
    """Lengths of `parts` pieces of `length`, as even as can be, the longer ones first."""
    least, longer = divmod(length, parts)
    return [least + (part < longer) for part in range(parts)]


@Operation
def scatter(
    tensor: torch.Tensor | None, source: int, group: Group, *, dim: int = 0, sizes: Sequence[int] | None = None
) -> Pending[torch.Tensor]:
    """A new tensor with this rank's piece of the `tensor` at position `source`; the other ranks give None.

    sizes: of the pieces, needed at `source` only. All ranks wait for its announcement of shape and dtype.
    """
    group.check_position(source, "source")
    serial = _enter(group, "scatter", None, detail=f"from {source} along {dim}")
    here_is_source = group.position == source
    if here_is_source != (tensor is not None):
        raise UserError(
            f"scatter from {source} in group {group.label}",
            f"position {group.position} gave {'no tensor' if tensor is None else 'a tensor'}",
            "give the tensor at the source and None elsewhere",
        )
    pieces = [] if tensor is None else _cut(tensor, dim, _sizes_of_cut(tensor, dim, sizes, group))
    shape, dtype = _announce(pieces, source, group)
    if pieces:
        sent = [_contiguous(piece) for piece in pieces]
        works = [
            _isend(_bytes(piece), to, group) for to, piece in enumerate(sent) if to != group.position and piece.numel()
        ]
        return _Messages(group, serial, works, lambda: sent[source].clone())
    landing = torch.empty(shape, dtype=dtype, device=group.device)
    works = [_irecv(_bytes(landing), source, group)] if landing.numel() else []
    return _Messages(group, serial, works, lambda: landing)


@Operation
def gather(
    tensor: torch.Tensor, to: int, group: Group, *, dim: int = 0, sizes: Sequence[int] | None = None
) -> Pending[torch.Tensor | None]:
    """A new tensor at position `to`: the ranks' tensors joined along `dim`; None on the other ranks."""
    group.check_position(to, "receiver")
    serial = _enter(group, "gather", tensor, free=(dim,), detail=_detail(f"to {to} along {dim}", sizes))
    lengths = _sizes_of_join(tensor, dim, sizes, group)
    own = _contiguous(tensor)
    if group.position != to:
        works = [_isend(_bytes(own), to, group)] if own.numel() else []
        return _Messages(group, serial, works, lambda: None)
    pieces = [own if p == to else own.new_empty(_with(own.shape, dim, n)) for p, n in enumerate(lengths)]
    works = [_irecv(_bytes(piece), p, group) for p, piece in enumerate(pieces) if p != to and piece.numel()]
    return _Messages(group, serial, works, lambda: torch.cat(pieces, dim))


@Operation
def all_gather(
    tensor: torch.Tensor, group: Group, *, dim: int = 0, sizes: Sequence[int] | None = None, label: str = ""
) -> Pending[torch.Tensor]:
    """A new tensor on every rank: the ranks' tensors joined along `dim`. label: what it is, for messages."""
    serial = _enter(group, "all_gather", tensor, free=(dim,), detail=_detail(f"along {dim}", sizes), label=label)
    lengths = _sizes_of_join(tensor, dim, sizes, group)
    if group.size == 1:
        return _SinglePending(group, serial, (), tensor.detach().clone)
    longest, own = max(lengths), tensor.detach().movedim(dim, 0)
    if own.shape[0] < longest:  # backends gather pieces of one size
        own = torch.cat([own, own.new_empty(longest - own.shape[0], *own.shape[1:])])
    own = _contiguous(own)
    whole = own.new_empty(group.size * longest, *own.shape[1:])
    works = _works(
        all_gather_single(_bytes(whole), _bytes(own), group=group.handle, async_op=True) if own.numel() else None
    )

    def finish() -> torch.Tensor:
        if min(lengths) == longest:
            return whole.movedim(0, dim)
        starts = range(0, group.size * longest, longest)
        return torch.cat([whole[s : s + n] for s, n in zip(starts, lengths, strict=True)]).movedim(0, dim)

    return _SinglePending(group, serial, works, finish)


@Operation
def reduce_scatter(
    tensor: torch.Tensor,
    group: Group,
    reduction: Reduction = "sum",
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    into: torch.Tensor | None = None,
    adding: bool = False,
    label: str = "",
) -> Pending[torch.Tensor]:
    """A new tensor: this rank's piece of the reduction of the ranks' tensors, which all have one shape.

    into: takes the result in place of a new tensor; contiguous, and numbers are added up in its type.
    adding: whether the result is added to what `into` holds.
    label: what it is, for messages.
    """
    carried, becomes = _carried(tensor, reduction), tensor.dtype if into is None else into.dtype
    detail = _detail(f"{reduction} along {dim}", sizes)
    serial = _enter(group, "reduce_scatter", tensor, detail=detail, label=label)
    lengths = _sizes_of_cut(tensor, dim, sizes, group)
    dim %= tensor.ndim  # complex numbers are carried with one more dim
    shape = _with(tensor.shape, dim, lengths[group.position])
    if into is not None and (list(into.shape) != list(shape) or not into.is_contiguous()):
        raise UserError(
            f"reduce_scatter into a tensor of shape {list(into.shape)}",
            f"this rank's piece has shape {list(shape)}, one element behind the other",
            "give a contiguous tensor of that shape",
        )
    if group.size == 1:
        return _SinglePending(
            group, serial, (), lambda: _delivered(tensor.detach().to(becomes, copy=into is None), into, adding)
        )
    if not tensor.numel():
        return _SinglePending(
            group, serial, (), lambda: _delivered(tensor.new_empty(shape, dtype=becomes), into, adding)
        )
    carried = carried.movedim(dim, 0).contiguous()
    plain = into is not None and not tensor.is_complex()
    added = becomes if plain else carried.dtype

    def finish(reduced: torch.Tensor) -> torch.Tensor:
        if reduction == "mean":
            reduced.div_(group.size)
        whole = torch.view_as_complex(reduced) if tensor.is_complex() else reduced
        return _delivered(whole.movedim(0, dim).to(becomes).contiguous(), into, adding)

    if len(set(lengths)) == 1 and not adds_here(group):
        landing = carried.new_empty(lengths[group.position], *carried.shape[1:], dtype=added)
        work = reduce_scatter_single(
            landing, carried.to(added), _torch_reduction(reduction), group=group.handle, async_op=True
        )
        return _SinglePending(group, serial, _works(work), lambda: finish(landing))
    row = carried[0].numel()
    exchange = _exchange_packed(
        carried.view(-1), [row * n for n in lengths], [row * lengths[group.position]] * group.size, group
    )
    piece = (lengths[group.position], *carried.shape[1:])

    def add_up() -> torch.Tensor:
        received = exchange.wait().split(row * lengths[group.position])
        if into is not None and plain and reduction == "sum" and dim == 0:
            return _added_up(received, into, adding)
        return finish(_reduced_here(received, added, reduction).view(piece))

    return _SinglePending(group, serial, (), add_up)


def adds_here(group: Group) -> bool:
    """Whether what `reduce_scatter` reduces are the pieces as they came, exchanged as they are.

    gloo has no other way than to reduce whole tensors on every rank, which moves twice the bytes, in the type that they
    are added in.
    """
    return group.device.type == "cpu"


@Operation
def all_to_all(
    tensor: torch.Tensor,
    group: Group,
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    join: int | None = None,
    received: Sequence[int] | None = None,
) -> Pending[torch.Tensor]:
    """A new tensor: `tensor` is cut along `dim`, piece i goes to position i, what came is joined along `join`.

    join:     by default `dim`. With another, all ranks give the same `sizes`.
    received: lengths along `join` of the pieces that come, by position.
    """
    join = dim if join is None else join
    same = dim % max(tensor.ndim, 1) == join % max(tensor.ndim, 1)
    detail = _detail(f"along {dim}, joined along {join}", None if same else sizes)
    serial = _enter(group, "all_to_all", tensor, free=(dim, join) if same else (join,), detail=detail)
    lengths = _sizes_of_cut(tensor, dim, sizes, group)
    if group.size == 1:
        return _SinglePending(group, serial, (), tensor.detach().clone)
    if received is None:
        told = lengths if same else [tensor.shape[join]] * group.size
        received = _exchange_numbers(told, group)
    shape = tensor.shape if same else _with(tensor.shape, dim, lengths[group.position])
    exchange = _exchange(_cut(tensor, dim, lengths), [_with(shape, join, n) for n in received], group)
    return _SinglePending(group, serial, (), lambda: torch.cat(exchange.wait(), join))


# ----------------------------------------------------------------------------------------------- small objects
def gather_values(value: Any, group: Group) -> list[Any]:
    """`value` (small, picklable) of every rank, by position, on every rank."""
    if group.size == 1:
        return [value]
    serial = _enter(group, "gather_values", None)
    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.handle)
    if group.recorder is not None:
        group.recorder.leave(serial)
    return values


# ------------------------------------------------------------------------------------- recording and checking
def _enter(
    group: Group,
    operation: str,
    tensor: torch.Tensor | None,
    *,
    free: tuple[int, ...] = (),
    detail: str = "",
    label: str = "",
    collective: bool = True,
) -> int:
    """Notes the beginning of an operation, checks it if the group does; the recorder's serial, 0 without one."""
    position = group.position  # refuses ranks outside
    if group.size > 1:
        group.check_open()
    if tensor is not None and tensor.device.type != group.device.type:
        raise UserError(
            f"{operation} of a tensor on {tensor.device}",
            f"group {group.label} talks about tensors on {group.device.type}",
            "move the tensor there",
        )
    number = group.operations + 1 if collective else 0
    group.operations += collective
    if group.recorder is None and not group.checked:
        return 0
    shape = None if tensor is None else _known_shape(tensor, free)
    dtype = "" if tensor is None else _DTYPE_NAMES[tensor.dtype]
    call = CollectiveCall(operation, group.label, dtype, shape, detail, label, here())
    serial = 0 if group.recorder is None else group.recorder.enter(number, call_text(call))
    if group.checked and collective and group.size > 1:
        check_call(call, number, group, position)
    return serial


def _known_shape(tensor: torch.Tensor, free: tuple[int, ...]) -> tuple[int | None, ...]:
    if not free:
        return tuple(tensor.shape)
    lengths: list[int | None] = list(tensor.shape)
    for dim in free:
        if not -tensor.ndim <= dim < tensor.ndim:
            raise UserError(f"pieces along dim {dim}", f"the tensor has {tensor.ndim} dims", "give a dim it has")
        lengths[dim] = None
    return tuple(lengths)


def _detail(words: str, sizes: Sequence[int] | None) -> str:
    return words if sizes is None else f"{words} in {list(sizes)}"


# --------------------------------------------------------------------------------------- tensors on their way
def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself where its memory is dense and in order, else a copy that is."""
    if tensor.layout is not torch.strided:
        raise UserError("talk about a tensor", f"its layout is {tensor.layout}", "make it dense first")
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _put_back(landing: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    if landing.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(landing)
    return tensor


def _delivered(result: torch.Tensor, into: torch.Tensor | None, adding: bool) -> torch.Tensor:
    if into is None:
        return result
    return into.add_(result) if adding else _put_back(result, into)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, 1D."""
    return tensor.view(-1).view(torch.uint8)


def _works(work: Any) -> list[_Work]:
    return [] if work is None else [work]


def _isend(carried: torch.Tensor, to: int, group: Group, tag: int = 0) -> _Work:
    work = dist.isend(carried, group=group.handle, group_dst=to, tag=tag)
    assert work is not None  # this rank is in the group
    return work


def _irecv(landing: torch.Tensor, source: int, group: Group, tag: int = 0) -> _Work:
    work = dist.irecv(landing, group=group.handle, group_src=source, tag=tag)
    assert work is not None  # this rank is in the group
    return work


# ------------------------------------------------------------------------------------------------- reductions
def _carried(tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """What is reduced in the place of `tensor`: contiguous, of a type that backends reduce; itself if it can."""
    asked, dtype = f"{reduction} of {tensor.dtype} over ranks", tensor.dtype
    if reduction not in _TORCH and reduction != "mean":
        raise UserError(asked, "there is no such reduction", "use sum, mean, min, max or product")
    if dtype.is_complex and reduction in ("sum", "mean"):
        return torch.view_as_real(_contiguous(tensor))
    if dtype not in _REDUCED:
        raise UserError(asked, "it has no meaning or no backend makes it", "convert the tensor first")
    if dtype is torch.bool and reduction in ("sum", "mean"):
        raise UserError(asked, "a sum of booleans is not one", "convert it to an integer, or take max for `any`")
    if reduction == "mean" and not dtype.is_floating_point:
        raise UserError(asked, "a mean of integers is not one", "convert it to a floating type")
    carried = _contiguous(tensor)
    return carried.to(_REDUCED_AS[dtype]) if dtype in _REDUCED_AS else carried


def _torch_reduction(reduction: Reduction) -> Any:
    return _TORCH["sum" if reduction == "mean" else reduction]  # gloo has no mean


def _reduced_back(carried: torch.Tensor, tensor: torch.Tensor, ranks: int, reduction: Reduction) -> torch.Tensor:
    if reduction == "mean":
        carried.div_(ranks)
    if tensor.is_complex():
        carried = torch.view_as_complex(carried.contiguous())
    return _put_back(carried, tensor)


def _added_up(pieces: Sequence[torch.Tensor], into: torch.Tensor, adding: bool) -> torch.Tensor:
    """In the order of positions, whatever came first."""
    flat = into.view(-1)
    if not adding:
        flat.copy_(pieces[0])
    for piece in pieces if adding else pieces[1:]:
        add(flat, piece)
    return into


def _reduced_here(pieces: Sequence[torch.Tensor], dtype: torch.dtype, reduction: Reduction) -> torch.Tensor:
    """In the order of positions, whatever came first; in memory of its own."""
    total = pieces[0].to(dtype, copy=True)
    for piece in pieces[1:]:
        if reduction in ("sum", "mean"):
            add(total, piece)
        else:
            total = _LOCAL[reduction](total, piece)
    return total


# ----------------------------------------------------------------------------------------------------- pieces
def _with(shape: Sequence[int], dim: int, length: int) -> list[int]:
    lengths = list(shape)
    lengths[dim] = length
    return lengths


def _cut(tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> list[torch.Tensor]:
    return list(tensor.detach().split(list(sizes), dim))


def _sizes_of_cut(tensor: torch.Tensor, dim: int, sizes: Sequence[int] | None, group: Group) -> list[int]:
    _known_shape(tensor, (dim,))
    length = tensor.shape[dim]
    if sizes is None:
        return even_sizes(length, group.size)
    if len(sizes) != group.size or sum(sizes) != length or min(sizes) < 0:
        raise UserError(
            f"{group.size} pieces of a tensor of length {length} along dim {dim}",
            f"sizes {list(sizes)}",
            "give one size per rank, that add up to the length",
        )
    return list(sizes)


def _sizes_of_join(tensor: torch.Tensor, dim: int, sizes: Sequence[int] | None, group: Group) -> list[int]:
    _known_shape(tensor, (dim,))
    length = tensor.shape[dim]
    if sizes is None:
        return _exchange_numbers([length] * group.size, group)
    if len(sizes) != group.size or sizes[group.position] != length:
        raise UserError(
            f"join pieces along dim {dim}, that of position {group.position} of length {length}",
            f"sizes {list(sizes)}",
            "give the length of every rank's piece, by position",
        )
    return list(sizes)


def _exchange_numbers(numbers: Sequence[int], group: Group) -> list[int]:
    """Number i goes to position i; returns those that came, by position."""
    if group.size == 1:
        return list(numbers)
    mine = torch.tensor(list(numbers), dtype=torch.int64, device=group.device)
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group.handle)
    return [int(number) for number in theirs.tolist()]


def _exchange(
    pieces: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], group: Group
) -> _SinglePending[list[torch.Tensor]]:
    """Piece i goes to position i; the pieces that come have `shapes` and the same dtype."""
    sent = torch.cat([_contiguous(piece).view(-1) for piece in pieces])
    expected = [torch.Size(shape).numel() for shape in shapes]
    exchange = _exchange_packed(sent, [piece.numel() for piece in pieces], expected, group)

    def finish() -> list[torch.Tensor]:
        parts = exchange.wait().split(expected)
        return [part.view(list(shape)) for part, shape in zip(parts, shapes, strict=True)]

    return _SinglePending(group, 0, (), finish)


def _exchange_packed(
    sent: torch.Tensor, counts: Sequence[int], expected: Sequence[int], group: Group
) -> _SinglePending[torch.Tensor]:
    """`_exchange` of pieces that lie one behind the other in `sent`, 1D; so do those that come. Lengths in elements."""
    width, landing = sent.element_size(), sent.new_empty(sum(expected))
    there, back = ([width * count for count in one] for one in (counts, expected))
    # The group's own method, as in `all_reduce`.
    work = group.handle.alltoall_base(_bytes(landing), _bytes(sent), back, there)
    return _SinglePending(group, 0, [work], lambda: landing)


_ANNOUNCED_DIMS = 16


def _announce(pieces: Sequence[torch.Tensor], source: int, group: Group) -> tuple[list[int], torch.dtype]:
    """Shape of this rank's piece and dtype, from the rank at `source`, the only one with `pieces`."""
    numbers = torch.zeros(group.size, 2 + _ANNOUNCED_DIMS, dtype=torch.int64)
    for position, piece in enumerate(pieces):
        numbers[position, 0], numbers[position, 1] = _DTYPES.index(piece.dtype), piece.ndim
        numbers[position, 2 : 2 + piece.ndim] = torch.tensor(piece.shape)
    if group.size > 1:
        numbers = numbers.to(group.device)
        dist.broadcast(numbers, group=group.handle, group_src=source)
    code, dims, *lengths = numbers[group.position].tolist()
    return lengths[:dims], _DTYPES[code]
