"""Collectives that do nothing: what they give has its shape and takes its memory, and no other rank is asked for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from evenly.comm.groups import Group
from evenly.comm.transport import Pending, even_sizes


def fake_group(name: str, size: int, note: Callable[[str, int], object]) -> Group:
    """The group of the first of so many ranks, of which there is only this one.

    note: gets each collective: its name, and bytes of the tensor while it is whole.
    """
    fake = FakeCollectives(note)
    return Group(name, range(size), own=0, handle=None, device=torch.device("cpu"), fake=fake)


@dataclass(frozen=True)
class FakeCollectives:
    """The collectives that gradients flow through: they allocate what they would on the CPU, and do nothing."""

    note: Callable[[str, int], object]

    def all_reduce(self, tensor: torch.Tensor, group: Group) -> Pending[torch.Tensor]:
        self.note("all_reduce", tensor.nbytes)
        return Pending(group, 0, (), lambda: tensor)

    def all_gather(
        self, tensor: torch.Tensor, group: Group, dim: int, sizes: Sequence[int] | None
    ) -> Pending[torch.Tensor]:
        lengths = [tensor.shape[dim]] * group.size if sizes is None else sizes
        longest, own = max(lengths), tensor.detach().movedim(dim, 0)
        if own.shape[0] < longest:
            own = torch.cat([own, own.new_empty(longest - own.shape[0], *own.shape[1:])])
        whole = own.contiguous().new_empty(group.size * longest, *own.shape[1:])
        self.note("all_gather", whole.nbytes)
        starts = range(0, group.size * longest, longest)
        pieces = [whole[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        return Pending(group, 0, (), lambda: (whole if min(lengths) == longest else torch.cat(pieces)).movedim(0, dim))

    def reduce_scatter(
        self, tensor: torch.Tensor, group: Group, dim: int, sizes: Sequence[int] | None, into: torch.Tensor | None
    ) -> Pending[torch.Tensor]:
        lengths = even_sizes(tensor.shape[dim], group.size) if sizes is None else sizes
        sent = tensor.movedim(dim, 0).contiguous()
        self.note("reduce_scatter", sent.nbytes)
        received = [torch.empty_like(sent)]  # the ranks' pieces

        def finish() -> torch.Tensor:
            total = sent.new_empty(lengths[group.position], *sent.shape[1:]) if into is None else into
            received.clear()
            return total.movedim(0, dim).contiguous()

        return Pending(group, 0, (), finish)
