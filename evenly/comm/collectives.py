"""Collectives over a group; with group None (an axis of one rank) each is the identity.

Every rank of a group must call the same collectives in the same order.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist


class Pending(Protocol):
    """A collective under way; its tensor may be read after `wait`."""

    def wait(self) -> object: ...


class _Done:
    def wait(self) -> None:
        return None


def sum_later(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> Pending:
    """Begins to replace `tensor` (any shape, contiguous) by its sum over the ranks of `group`, in place."""
    if group is None:
        return _Done()
    # The group's own method: what dist.all_reduce does around it takes 0.07 ms, 2 % of a small step.
    return group.allreduce([tensor])


def sum_now(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Replaces `tensor` by its sum over the ranks of `group` and returns it."""
    sum_later(tensor, group).wait()
    return tensor


def gather_values(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """`value` (small, picklable) of every rank, in rank order, on every rank."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def barrier(group: dist.ProcessGroup | None) -> None:
    """Returns when every rank of `group` has come here."""
    if group is not None:
        dist.barrier(group=group)
