"""What the ranks of a run say to each other: the operations that training is made of, over a `Group`.

Every operation is called as a function, which returns when it is done, or begun: `all_reduce.begin(x, group)` returns a
`Pending` at once, and what was given may be neither read nor written before its `wait()`. All ranks of a group call the
same collectives in the same order. `to` and `source` are positions in the group. Over a group of one rank each is the
identity; over a fake group (see `fake`) those that gradients flow through do nothing.

*pieces* are what a tensor is cut into along `dim`, or joined from, one per rank in the order of positions; they may
differ in length and may be empty. Where `sizes` (the lengths of all pieces) are not given they are found: for a cut, as
`even_sizes`; for a join, by an exchange of numbers first, which `begin` waits for.

Tensors may have any dtype, any strides and no elements; gradients do not flow (see `pairs`). What only moves data moves
bytes, so every dtype travels everywhere; reductions are made in a type that the backends add in. What a backend lacks
(pieces of different lengths) is made of operations that all have, the same on each.

In a *checked* group each collective first compares what the ranks ask for, and differences raise one `RunError` that
names each rank's. `operations` has those that a run does not need.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from typing import Any, Generic

import torch
import torch.distributed as dist

from evenly.comm.groups import Group
from evenly.comm.transport import (
    ADDED,
    FEW_BYTES,
    P,
    Pending,
    Reduction,
    T,
    added_up,
    as_bytes,
    carried_as,
    contiguous,
    delivered,
    detail_of,
    enter,
    exchange_packed,
    is_plain,
    post_all_gather,
    post_recv,
    post_send,
    put_back,
    reduced_back,
    reduced_here,
    sizes_of_cut,
    sizes_of_join,
    torch_reduction,
    wait_for,
    with_length,
    works_of,
)
from evenly.errors import EvenlyError, UserError
from evenly.torch_private import reduce_scatter_single

AT_ONCE = 1 << 26  # bytes of what is gathered on the first rank


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
    serial = enter(group, "send", tensor, detail=f"to {to}, tag {tag}", collective=False)
    carried = as_bytes(contiguous(tensor))
    works = [post_send(carried, to, group, tag)] if carried.numel() else []
    return Pending(group, serial, works, lambda: None, polled=False)


@Operation
def recv(tensor: torch.Tensor, source: int, group: Group, *, tag: int = 0) -> Pending[torch.Tensor]:
    """Fills `tensor` with what the rank at position `source` sends, and returns it."""
    group.check_position(source, "source")
    serial = enter(group, "recv", tensor, detail=f"from {source}, tag {tag}", collective=False)
    landing = contiguous(tensor)
    works = [post_recv(as_bytes(landing), source, group, tag)] if tensor.numel() else []
    return Pending(group, serial, works, lambda: put_back(landing, tensor), polled=False)


@Operation
def broadcast(tensor: torch.Tensor, source: int, group: Group) -> Pending[torch.Tensor]:
    """Replaces `tensor` by that of the rank at position `source`, in place."""
    group.check_position(source, "source")
    serial = enter(group, "broadcast", tensor, detail=f"from {source}")
    if not tensor.numel() or group.size == 1:
        return Pending(group, serial, (), lambda: tensor)
    landing = contiguous(tensor)
    work = dist.broadcast(as_bytes(landing), group=group.handle, group_src=source, async_op=True)
    return Pending(group, serial, works_of(work), lambda: put_back(landing, tensor))


@Operation
def all_reduce(
    tensor: torch.Tensor, group: Group, reduction: Reduction = "sum", *, label: str = ""
) -> Pending[torch.Tensor]:
    """Replaces `tensor` by its reduction over the ranks, in place; the same bits on all ranks.

    label: what it is, for messages.
    """
    if group.fake is not None:
        return group.fake.all_reduce(tensor, group)
    carried = carried_as(tensor, reduction)
    serial = enter(group, "all_reduce", tensor, detail=reduction, label=label)
    if not tensor.numel() or group.size == 1:
        return Pending(group, serial, (), lambda: tensor)
    if reduction == "sum" and (carried is tensor or carried.data_ptr() == tensor.data_ptr()):
        # The group's own method: what dist.all_reduce does around it takes 0.07 ms, 2 % of a small step.
        return Pending(group, serial, [group.handle.allreduce([carried])], lambda: tensor)
    work = dist.all_reduce(carried, torch_reduction(reduction), group=group.handle, async_op=True)
    return Pending(group, serial, works_of(work), lambda: reduced_back(carried, tensor, group.size, reduction))


def sum_at_once(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """`all_reduce(tensor, group)` by the shortest way: each block that is split over the tensor axis asks for four."""
    if tensor.dtype not in ADDED or group.size == 1 or group.fake is not None or not tensor.numel():
        return all_reduce(tensor, group)
    # Whether memory is shared is decided by what all ranks have in common: strides are each rank's own.
    if group.shared is not None and group.shared.takes(tensor):
        landing, serial = contiguous(tensor), enter(group, "all_reduce", tensor, detail="sum")
        looked_s = group.shared.add_up(landing, partial(_meet, group))
        if group.recorder is not None:
            group.recorder.waited_s += looked_s
            group.recorder.leave(serial)
        return put_back(landing, tensor)
    if not is_plain(tensor):
        return all_reduce(tensor, group)
    serial = enter(group, "all_reduce", tensor, detail="sum")
    wait_for((group.handle.allreduce([tensor]),), group, 0, polled=tensor.is_cpu)
    if group.recorder is not None:
        group.recorder.leave(serial)
    return tensor


def _meet(group: Group, number: torch.Tensor) -> None:
    wait_for((group.handle.allreduce([number]),), group, 0, polled=True)


@Operation
def all_gather(
    tensor: torch.Tensor,
    group: Group,
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    into: torch.Tensor | None = None,
    label: str = "",
) -> Pending[torch.Tensor]:
    """A new tensor on every rank: the ranks' tensors joined along `dim`.

    into: takes the result in place of a new tensor, where all pieces have one length and dim is 0; contiguous.
    label: what it is, for messages.
    """
    if group.fake is not None:
        return group.fake.all_gather(tensor, group, dim, sizes)
    serial = enter(group, "all_gather", tensor, free=(dim,), detail=detail_of(f"along {dim}", sizes), label=label)
    lengths = sizes_of_join(tensor, dim, sizes, group)
    if group.size == 1:
        return Pending(group, serial, (), lambda: tensor.detach().clone() if into is None else put_back(tensor, into))
    longest, own = max(lengths), tensor.detach().movedim(dim, 0)
    if own.shape[0] < longest:  # backends gather pieces of one size
        own = torch.cat([own, own.new_empty(longest - own.shape[0], *own.shape[1:])])
    own = contiguous(own)
    whole = own.new_empty(group.size * longest, *own.shape[1:]) if into is None else into
    works, polled = post_all_gather(as_bytes(own), as_bytes(whole), group)

    def finish() -> torch.Tensor:
        if min(lengths) == longest:
            return whole.movedim(0, dim)
        starts = range(0, group.size * longest, longest)
        return torch.cat([whole[s : s + n] for s, n in zip(starts, lengths, strict=True)]).movedim(0, dim)

    return Pending(group, serial, works, finish, polled=polled)


@Operation
def exchange(packed: torch.Tensor, group: Group, *, label: str = "") -> Pending[torch.Tensor]:
    """Row i of `packed` (ranks x elements) goes to position i; the rows that come, by position (ranks x elements).

    label: what it is, for messages.
    """
    serial = enter(group, "exchange", packed, label=label)
    if group.size == 1 or not packed.numel():
        return Pending(group, serial, (), lambda: packed)
    ranks, length = packed.shape
    lengths, few = [length] * ranks, packed.nbytes <= FEW_BYTES
    landing, works, polled = exchange_packed(contiguous(packed).view(-1), lengths, lengths, group, few=few)
    return Pending(group, serial, works, lambda: landing.view(ranks, length), polled=polled)


def _check_target(into: torch.Tensor, shape: Sequence[int]) -> None:
    if list(into.shape) != list(shape) or not into.is_contiguous():
        raise UserError(
            f"reduce_scatter into a tensor of shape {list(into.shape)}",
            f"this rank's piece has shape {list(shape)}, one element behind the other",
            "give a contiguous tensor of that shape",
        )


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
    if group.fake is not None:
        return group.fake.reduce_scatter(tensor, group, dim, sizes, into)
    carried, becomes = carried_as(tensor, reduction), tensor.dtype if into is None else into.dtype
    detail = detail_of(f"{reduction} along {dim}", sizes)
    serial = enter(group, "reduce_scatter", tensor, detail=detail, label=label)
    lengths = sizes_of_cut(tensor, dim, sizes, group)
    dim %= tensor.ndim  # complex numbers are carried with one more dim
    shape = with_length(tensor.shape, dim, lengths[group.position])
    if into is not None:
        _check_target(into, shape)
    if group.size == 1:
        return Pending(
            group, serial, (), lambda: delivered(tensor.detach().to(becomes, copy=into is None), into, adding)
        )
    if not tensor.numel():
        return Pending(group, serial, (), lambda: delivered(tensor.new_empty(shape, dtype=becomes), into, adding))
    carried = carried.movedim(dim, 0).contiguous()
    plain = into is not None and not tensor.is_complex()
    added = becomes if plain else carried.dtype

    def finish(reduced: torch.Tensor) -> torch.Tensor:
        if reduction == "mean":
            reduced.div_(group.size)
        whole = torch.view_as_complex(reduced) if tensor.is_complex() else reduced
        return delivered(whole.movedim(0, dim).to(becomes).contiguous(), into, adding)

    if len(set(lengths)) == 1 and not adds_here(group):
        landing = carried.new_empty(lengths[group.position], *carried.shape[1:], dtype=added)
        how = torch_reduction(reduction)
        work = reduce_scatter_single(landing, carried.to(added), how, group=group.handle, async_op=True)
        return Pending(group, serial, works_of(work), lambda: finish(landing))
    row, piece = carried[0].numel(), (lengths[group.position], *carried.shape[1:])
    mine = row * lengths[group.position]
    counts, few = [row * length for length in lengths], carried.nbytes <= FEW_BYTES
    landing, works, polled = exchange_packed(carried.view(-1), counts, [mine] * group.size, group, few=few)

    def add_up() -> torch.Tensor:
        received = landing.split(mine)
        if into is not None and plain and reduction == "sum" and dim == 0:
            return added_up(received, into, adding)
        return finish(reduced_here(received, added, reduction).view(piece))

    return Pending(group, serial, works, add_up, polled=polled)


def adds_here(group: Group) -> bool:
    """Whether what `reduce_scatter` reduces are the pieces as they came, exchanged as they are.

    gloo has no other way than to reduce whole tensors on every rank, which moves twice the bytes, in the type that they
    are added in.
    """
    return group.device.type == "cpu"


# ----------------------------------------------------------------------------------------------- small objects
def gather_values(value: Any, group: Group) -> list[Any]:
    """`value` (small, picklable) of every rank, by position, on every rank."""
    if group.size == 1:
        return [value]
    serial = enter(group, "gather_values", None)
    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.handle)
    if group.recorder is not None:
        group.recorder.leave(serial)
    return values


def gather_to_first(value: Any, group: Group) -> list[Any]:
    """`value` (picklable, of any size) of every rank, by position, on the first rank; nothing on the others.

    It travels from one rank after the other, so that a GPU holds no more than `AT_ONCE` bytes of it.
    """
    packed = pickle.dumps(value) if group.position else b""
    sizes = gather_values(len(packed), group)
    if group.position:
        for start in range(0, len(packed), AT_ONCE):
            piece = torch.frombuffer(bytearray(packed[start : start + AT_ONCE]), dtype=torch.uint8)
            send(piece.to(group.device), 0, group)
        return []
    return [value, *(_received(size, source, group) for source, size in enumerate(sizes) if source)]


def _received(size: int, source: int, group: Group) -> Any:
    packed = bytearray()
    for start in range(0, size, AT_ONCE):
        landing = torch.empty(min(AT_ONCE, size - start), dtype=torch.uint8, device=group.device)
        packed += recv(landing, source, group).cpu().numpy().tobytes()
    return pickle.loads(packed)


def decided_by_first(act: Callable[[], T], group: Group) -> T:
    """Calls `act` on the first rank of `group`; returns its result (picklable), or raises its `EvenlyError`, on all."""
    mine: T | EvenlyError | None = None
    if group.position == 0:
        try:
            mine = act()
        except EvenlyError as problem:
            mine = problem
    first = gather_values(mine, group)[0]
    if isinstance(first, EvenlyError):
        raise first
    return first
