"""The ranks that share a checkpoint: doing one thing together, and failing together."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from evenly.comm.collectives import gather_values
from evenly.errors import CheckpointError, EvenlyError, UserError

T = TypeVar("T")

REMEDIES = {
    errno.ENOSPC: "free space there and resume; the older checkpoints are kept",
    errno.EDQUOT: "free space in your quota and resume; the older checkpoints are kept",
    errno.EFBIG: "allow larger files there and resume; the older checkpoints are kept",
    errno.EACCES: "make the folder writable for this user",
    errno.EPERM: "make the folder writable for this user",
    errno.EROFS: "choose a folder that is writable (--out)",
}


@dataclass(frozen=True)
class _Done(Generic[T]):
    value: T


@dataclass(frozen=True)
class _Failed:
    found: str
    do: str
    error: EvenlyError | None = None


class Ranks:
    """The ranks of a gloo group that nothing else uses, or this process alone where it is None.

    Every method is a collective: all ranks call it, in the same order.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        _check_group(group)
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in rank order, on every rank."""
        return gather_values(value, self.group)

    def together(self, asked: str, act: Callable[[], T]) -> list[T]:
        """Run `act` on every rank and return what each returned.

        If it fails anywhere, every rank raises the first failing rank's error: as it is if it is one of
        evenly's, else as a `CheckpointError` of `asked`.
        """
        outcomes = self.gather(self._attempt(act))
        failed = next((outcome for outcome in outcomes if isinstance(outcome, _Failed)), None)
        if failed is not None:
            raise failed.error or CheckpointError(asked, failed.found, failed.do)
        return [cast("_Done[T]", outcome).value for outcome in outcomes]

    def first(self, asked: str, act: Callable[[], T]) -> T:
        """Run `act` on rank 0 alone; every rank returns its value or raises its error."""
        return cast("T", self.together(asked, lambda: act() if self.rank == 0 else None)[0])

    def _attempt(self, act: Callable[[], T]) -> _Done[T] | _Failed:
        try:
            return _Done(act())
        except EvenlyError as error:
            return _Failed("", "", error)
        except CheckpointException as failure:  # of torch, on all ranks alike; no subclass of Exception
            rank = min(failure.failures)
            return self._failed(rank, failure.failures[rank][0])
        except Exception as error:
            return self._failed(self.rank, error)

    def _failed(self, rank: int, error: BaseException) -> _Failed:
        text = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        remedy = REMEDIES.get(error.errno or 0, "") if isinstance(error, OSError) else ""
        return _Failed(f"rank {rank}: {text}" if self.size > 1 else text, remedy)


def _check_group(group: dist.ProcessGroup | None) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        return
    asked = "keep checkpoints of this run"
    if group is None and dist.get_world_size() > 1:
        raise UserError(asked, f"{dist.get_world_size()} ranks but no group", "give a gloo group of all ranks")
    if group is not None and group is dist.group.WORLD:
        raise UserError(asked, "the default group", "give a gloo group that nothing else uses (new_group)")
    if group is not None and dist.get_backend(group) != "gloo":
        raise UserError(asked, f"a group of backend {dist.get_backend(group)}", "give a gloo group")
