"""Further operations over a `Group`, by the rules of `collectives`: reduce, barrier, scatter, ...

Those of `collectives` can be imported from here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from evenly.comm.collectives import Operation, recv, send
from evenly.comm.collectives import all_gather as all_gather
from evenly.comm.collectives import all_reduce as all_reduce
from evenly.comm.collectives import broadcast as broadcast
from evenly.comm.collectives import gather_values as gather_values
from evenly.comm.collectives import reduce_scatter as reduce_scatter
from evenly.comm.groups import Group
from evenly.comm.transport import (
    Pending,
    Reduction,
    as_bytes,
    carried_as,
    contiguous,
    cut_pieces,
    detail_of,
    enter,
    exchange_numbers,
    exchange_packed,
    post_recv,
    post_send,
    reduced_back,
    sizes_of_cut,
    sizes_of_join,
    torch_reduction,
    with_length,
    works_of,
)
from evenly.errors import UserError

isend, irecv = send.begin, recv.begin


@Operation
def reduce(tensor: torch.Tensor, to: int, group: Group, reduction: Reduction = "sum") -> Pending[torch.Tensor]:
    """Replaces `tensor` of the rank at position `to` by the reduction over the ranks; other ranks' are unchanged."""
    group.check_position(to, "receiver")
    carried = carried_as(tensor, reduction)
    serial = enter(group, "reduce", tensor, detail=f"{reduction} to {to}")
    if not tensor.numel() or group.size == 1:
        return Pending(group, serial, (), lambda: tensor)
    mine = group.position == to
    if not mine and carried.data_ptr() == tensor.data_ptr():
        carried = carried.clone()  # backends use it as room for partial sums
    work = dist.reduce(carried, group_dst=to, op=torch_reduction(reduction), group=group.handle, async_op=True)
    finish = (lambda: reduced_back(carried, tensor, group.size, reduction)) if mine else (lambda: tensor)
    return Pending(group, serial, works_of(work), finish)


@Operation
def barrier(group: Group) -> Pending[None]:
    """Returns when every rank has come here."""
    serial = enter(group, "barrier", None)
    if group.size == 1:
        return Pending(group, serial, (), lambda: None)
    return Pending(group, serial, works_of(dist.barrier(group=group.handle, async_op=True)), lambda: None)


@Operation
def scatter(
    tensor: torch.Tensor | None, source: int, group: Group, *, dim: int = 0, sizes: Sequence[int] | None = None
) -> Pending[torch.Tensor]:
    """A new tensor with this rank's piece of the `tensor` at position `source`; the other ranks give None.

    sizes: of the pieces, needed at `source` only. All ranks wait for its announcement of shape and dtype.
    """
    group.check_position(source, "source")
    serial = enter(group, "scatter", None, detail=f"from {source} along {dim}")
    here_is_source = group.position == source
    if here_is_source != (tensor is not None):
        raise UserError(
            f"scatter from {source} in group {group.label}",
            f"position {group.position} gave {'no tensor' if tensor is None else 'a tensor'}",
            "give the tensor at the source and None elsewhere",
        )
    pieces = [] if tensor is None else cut_pieces(tensor, dim, sizes_of_cut(tensor, dim, sizes, group))
    shape, dtype = _announced(pieces, source, group)
    if pieces:
        sent = [contiguous(piece) for piece in pieces]
        works = [
            post_send(as_bytes(piece), to, group)
            for to, piece in enumerate(sent)
            if to != group.position and piece.numel()
        ]
        return Pending(group, serial, works, lambda: sent[source].clone(), polled=False)
    landing = torch.empty(shape, dtype=dtype, device=group.device)
    works = [post_recv(as_bytes(landing), source, group)] if landing.numel() else []
    return Pending(group, serial, works, lambda: landing, polled=False)


@Operation
def gather(
    tensor: torch.Tensor, to: int, group: Group, *, dim: int = 0, sizes: Sequence[int] | None = None
) -> Pending[torch.Tensor | None]:
    """A new tensor at position `to`: the ranks' tensors joined along `dim`; None on the other ranks."""
    group.check_position(to, "receiver")
    serial = enter(group, "gather", tensor, free=(dim,), detail=detail_of(f"to {to} along {dim}", sizes))
    lengths = sizes_of_join(tensor, dim, sizes, group)
    own = contiguous(tensor)
    if group.position != to:
        works = [post_send(as_bytes(own), to, group)] if own.numel() else []
        return Pending(group, serial, works, lambda: None, polled=False)
    pieces = [own if p == to else own.new_empty(with_length(own.shape, dim, n)) for p, n in enumerate(lengths)]
    works = [post_recv(as_bytes(piece), p, group) for p, piece in enumerate(pieces) if p != to and piece.numel()]
    return Pending(group, serial, works, lambda: torch.cat(pieces, dim), polled=False)


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
    detail = detail_of(f"along {dim}, joined along {join}", None if same else sizes)
    serial = enter(group, "all_to_all", tensor, free=(dim, join) if same else (join,), detail=detail)
    lengths = sizes_of_cut(tensor, dim, sizes, group)
    if group.size == 1:
        return Pending(group, serial, (), tensor.detach().clone)
    if received is None:
        own = lengths if same else [tensor.shape[join]] * group.size
        received = exchange_numbers(own, group)
    if same and dim % max(tensor.ndim, 1) == 0:  # pieces lie one behind the other, there and here
        width = tensor.shape[1:].numel()
        counts, expected = [width * n for n in lengths], [width * n for n in received]
        landing, works, polled = exchange_packed(contiguous(tensor).view(-1), counts, expected, group)
        return Pending(group, serial, works, lambda: landing.view(sum(received), *tensor.shape[1:]), polled=polled)
    shape = tensor.shape if same else with_length(tensor.shape, dim, lengths[group.position])
    pieces = cut_pieces(tensor, dim, lengths)
    sent = torch.cat([contiguous(piece).view(-1) for piece in pieces])
    shapes = [torch.Size(with_length(shape, join, n)) for n in received]
    expected = [one.numel() for one in shapes]
    landing, works, polled = exchange_packed(sent, [piece.numel() for piece in pieces], expected, group)

    def joined() -> torch.Tensor:
        parts = landing.split(expected)
        return torch.cat([part.view(one) for part, one in zip(parts, shapes, strict=True)], join)

    return Pending(group, serial, works, joined, polled=polled)


def _announced(pieces: Sequence[torch.Tensor], source: int, group: Group) -> tuple[Sequence[int], torch.dtype]:
    """Shape of this rank's piece and dtype, from the rank at `source`, the only one with `pieces`."""
    forms: list[Any] = [(piece.shape, piece.dtype) for piece in pieces] or [None] * group.size
    if group.size > 1:
        dist.broadcast_object_list(forms, group=group.handle, group_src=source, device=group.device)
    return forms[group.position]
