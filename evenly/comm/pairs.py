"""Operations that gradients flow through: each forward with the backward that is its adjoint.

A tensor between ranks is *shared* (every rank holds the same values of one tensor), *split* (each rank holds a piece of
one tensor) or each rank's *own*. The gradient of a tensor is held as the tensor is. The pairs:

    function        forward                       backward                      from    to
    copy            identity                      all_reduce                    shared  own
    reduce          all_reduce                    identity                      own     shared
    split           own piece                     all_gather                    shared  split
    join            all_gather                    own piece                     split   shared
    gather          all_gather                    reduce_scatter                split   own
    reduce_scatter  reduce_scatter                all_gather                    own     split
    exchange        all_to_all                    all_to_all, the other way     split   split along another dim

`copy` and `reduce` are each other's adjoint, as are `split` and `join`, `gather` and `reduce_scatter`. Shapes and
`sizes` are as in `operations`; every rank of the group calls the same functions, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from evenly.comm import operations
from evenly.comm.groups import Group
from evenly.comm.operations import even_sizes


def copy(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """A shared tensor for use by each rank on its own: gradients of all ranks are added up."""
    return _apply(_Copy, tensor, group)


def reduce(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of the ranks' tensors, shared; each rank's gets the gradient of the sum."""
    return _apply(_Reduce, tensor, group)


def split(tensor: torch.Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """This rank's piece of a shared tensor along `dim`."""
    return _apply(_Split, tensor, group, dim, _sizes(tensor, group, dim, sizes))


def join(tensor: torch.Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """The pieces of all ranks joined along `dim`, shared. sizes: exchanged first where they are not given."""
    return _apply(_Join, tensor, group, dim, _sizes_of_pieces(tensor, group, dim, sizes))


def gather(tensor: torch.Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """The pieces of all ranks joined along `dim`, for use by each rank on its own: their gradients are added up."""
    return _apply(_Gather, tensor, group, dim, _sizes_of_pieces(tensor, group, dim, sizes))


def reduce_scatter(tensor: torch.Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """This rank's piece, along `dim`, of the sum of the ranks' tensors."""
    return _apply(_ReduceScatter, tensor, group, dim, _sizes(tensor, group, dim, sizes))


def exchange(
    tensor: torch.Tensor,
    group: Group,
    *,
    cut: int,
    join: int,
    sizes: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
) -> torch.Tensor:
    """From split along `join` to split along `cut`, another dim.

    sizes: of the pieces along `cut`. lengths: what each rank now holds along `join`; exchanged where not given.
    """
    return _apply(
        _Exchange,
        tensor,
        group,
        cut,
        join,
        _sizes(tensor, group, cut, sizes),
        _sizes_of_pieces(tensor, group, join, lengths),
    )


def _sizes(tensor: torch.Tensor, group: Group, dim: int, sizes: Sequence[int] | None) -> list[int]:
    return even_sizes(tensor.shape[dim], group.size) if sizes is None else list(sizes)


def _sizes_of_pieces(tensor: torch.Tensor, group: Group, dim: int, sizes: Sequence[int] | None) -> list[int]:
    if sizes is not None:
        return list(sizes)
    own = torch.tensor([tensor.shape[dim]], device=group.device)
    return [int(length) for length in operations.all_gather(own, group, sizes=[1] * group.size).tolist()]


def _apply(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*args)  # pyright: ignore[reportUnknownMemberType]
    return result


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return operations.all_reduce(gradients[0].clone(), ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        return operations.all_reduce(tensor.clone(), group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, dim: int, sizes: list[int]) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return _own_piece(tensor, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return operations.all_gather(gradients[0], ctx.group, dim=ctx.dim, sizes=ctx.sizes), None, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, dim: int, sizes: list[int]) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return operations.all_gather(tensor, group, dim=dim, sizes=sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _own_piece(gradients[0], ctx.group, ctx.dim, ctx.sizes), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, dim: int, sizes: list[int]) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return operations.all_gather(tensor, group, dim=dim, sizes=sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return operations.reduce_scatter(gradients[0], ctx.group, dim=ctx.dim, sizes=ctx.sizes), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, dim: int, sizes: list[int]) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return operations.reduce_scatter(tensor, group, dim=dim, sizes=sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return operations.all_gather(gradients[0], ctx.group, dim=ctx.dim, sizes=ctx.sizes), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, group: Group, cut: int, join: int, sizes: list[int], lengths: list[int]
    ) -> torch.Tensor:
        ctx.group, ctx.cut, ctx.join, ctx.sizes, ctx.lengths = group, cut, join, sizes, lengths
        return operations.all_to_all(tensor, group, dim=cut, sizes=sizes, join=join, received=lengths)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient = operations.all_to_all(
            gradients[0], ctx.group, dim=ctx.join, sizes=ctx.lengths, join=ctx.cut, received=ctx.sizes
        )
        return gradient, None, None, None, None, None


def _own_piece(tensor: torch.Tensor, group: Group, dim: int, sizes: list[int]) -> torch.Tensor:
    start = sum(sizes[: group.position])
    return tensor.narrow(dim, start, sizes[group.position]).clone()
