"""Operations that gradients flow through: each forward with the backward that is its adjoint.

A tensor between ranks is *shared* (every rank has the same values of one tensor), *split* (each rank has a piece of
one tensor) or each rank's *own*. The gradient of a tensor is distributed as the tensor is. The pairs:

    function        forward                       backward                      from    to
    copy            identity                      all_reduce                    shared  own
    reduce          all_reduce                    identity                      own     shared
    split           own piece                     all_gather                    shared  split
    join            all_gather                    own piece                     split   shared
    gather          all_gather                    reduce_scatter                split   own
    reduce_scatter  reduce_scatter                all_gather                    own     split
    exchange        all_to_all                    all_to_all, the other way     split   split along another dim

`copy` and `reduce` are each other's adjoint, as are `split` and `join`, `gather` and `reduce_scatter`. Shapes and
`sizes` are as in `collectives`; every rank of the group calls the same functions, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from evenly.comm import collectives
from evenly.comm.groups import Group
from evenly.comm.operations import all_to_all
from evenly.comm.transport import even_sizes
from evenly.torch_private import apply_outside_transforms, in_transform


def copy(tensor: torch.Tensor, group: Group, *, in_place: bool = False) -> torch.Tensor:
    """A shared tensor for use by each rank on its own: gradients of all ranks are added up.

    in_place: in the memory of the gradient. Only where each use is a product, whose gradient is a tensor of its own;
    that of a sum, say, is handed to all of its terms.
    """
    return _pair(tensor, _same, lambda own: _summed(own, group, in_place))


def reduce(tensor: torch.Tensor, group: Group, *, in_place: bool = False) -> torch.Tensor:
    """The sum of the ranks' tensors, shared; each rank's gets the gradient of the sum.

    in_place: in the memory of `tensor`. Only where nobody needs its values any more: autograd, or recomputation.
    """
    return _pair(tensor, lambda own: _summed(own, group, in_place), _same)


def split(tensor: torch.Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """This rank's piece of a shared tensor along `dim`."""
    of = group, dim, _sizes(tensor, group, dim, sizes)
    return _pair(tensor, _own_piece(*of), _gathered(*of))


def join(tensor: torch.Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """The pieces of all ranks joined along `dim`, shared. sizes: exchanged first where they are not given."""
    of = group, dim, _sizes_of_pieces(tensor, group, dim, sizes)
    return _pair(tensor, _gathered(*of), _own_piece(*of))


def gather(tensor: torch.Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """The pieces of all ranks joined along `dim`, for use by each rank on its own: their gradients are added up."""
    of = group, dim, _sizes_of_pieces(tensor, group, dim, sizes)
    return _pair(tensor, _gathered(*of), _scattered(*of))


def reduce_scatter(tensor: torch.Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """This rank's piece, along `dim`, of the sum of the ranks' tensors."""
    of = group, dim, _sizes(tensor, group, dim, sizes)
    return _pair(tensor, _scattered(*of), _gathered(*of))


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
    sizes, lengths = _sizes(tensor, group, cut, sizes), _sizes_of_pieces(tensor, group, join, lengths)
    return _pair(
        tensor,
        lambda piece: all_to_all(piece, group, dim=cut, sizes=sizes, join=join, received=lengths),
        lambda piece: all_to_all(piece, group, dim=join, sizes=lengths, join=cut, received=sizes),
    )


def _sizes(tensor: torch.Tensor, group: Group, dim: int, sizes: Sequence[int] | None) -> list[int]:
    return even_sizes(tensor.shape[dim], group.size) if sizes is None else list(sizes)


def _sizes_of_pieces(tensor: torch.Tensor, group: Group, dim: int, sizes: Sequence[int] | None) -> list[int]:
    if sizes is not None:
        return list(sizes)
    own = torch.tensor([tensor.shape[dim]], device=group.device)
    return [int(length) for length in collectives.all_gather(own, group, sizes=[1] * group.size).tolist()]


def _summed(tensor: torch.Tensor, group: Group, in_place: bool) -> torch.Tensor:
    return collectives.sum_at_once(_same(tensor) if in_place else tensor.clone(), group)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a new tensor, as autograd wants it; no view, which holds its base and resists writing."""
    return tensor.detach()


_Linear = Callable[[torch.Tensor], torch.Tensor]


def _own_piece(group: Group, dim: int, sizes: Sequence[int]) -> _Linear:
    start, length = sum(sizes[: group.position]), sizes[group.position]
    return lambda whole: whole.narrow(dim, start, length).clone()


def _gathered(group: Group, dim: int, sizes: Sequence[int]) -> _Linear:
    return lambda piece: collectives.all_gather(piece, group, dim=dim, sizes=sizes)


def _scattered(group: Group, dim: int, sizes: Sequence[int]) -> _Linear:
    return lambda own: collectives.reduce_scatter(own, group, dim=dim, sizes=sizes)


def _pair(tensor: torch.Tensor, forward: _Linear, backward: _Linear) -> torch.Tensor:
    apply: Any = _Pair.apply if in_transform() else _apply_pair
    return apply(tensor, forward, backward)


class _Pair(torch.autograd.Function):
    """A linear map and its adjoint. The backward is a pair again, so that gradients have gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forward: _Linear, backward: _Linear) -> torch.Tensor:
        ctx.pair = forward, backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        forward, backward = ctx.pair
        if not torch.is_grad_enabled():  # nobody asks for gradients of gradients
            return gradients[0] if backward is _same else backward(gradients[0]), None, None
        return _pair(gradients[0], backward, forward), None, None


_apply_pair = apply_outside_transforms(_Pair)
