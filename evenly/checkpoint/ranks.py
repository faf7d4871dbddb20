"""The ranks that share a checkpoint: doing one thing together, and failing together."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from evenly.comm.collectives import gather_values
from evenly.comm.groups import Group
from evenly.data.alone import all_ranks
from evenly.errors import CheckpointError, EvenlyError, UserError, note_rank, rank_of

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
class _FinishedWork(Generic[T]):
    value: T


@dataclass(frozen=True)
class _Failed:
    rank: int
    found: str
    do: str
    error: EvenlyError | None = None


class Ranks:
    """The ranks of a gloo group that nothing else uses, or this process alone.

    Every method is a collective: all ranks call it, in the same order.
    """

    def __init__(self, group: Group) -> None:
        _check_group(group)
        self.group, self.rank, self.size = group, group.position, group.size

    @property
    def handle(self) -> dist.ProcessGroup | None:
        """What torch's distributed checkpoint takes: None for a process alone."""
        return self.group.handle if self.size > 1 else None

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
            error = failed.error or CheckpointError(asked, failed.found, failed.do)
            if rank_of(error) is None:
                note_rank(error, failed.rank)
            raise error
        return [cast("_FinishedWork[T]", outcome).value for outcome in outcomes]

    def first(self, asked: str, act: Callable[[], T]) -> T:
        """Run `act` on rank 0 alone; every rank returns its value or raises its error."""
        return cast("T", self.together(asked, lambda: act() if self.rank == 0 else None)[0])

    def _attempt(self, act: Callable[[], T]) -> _FinishedWork[T] | _Failed:
        try:
            return _FinishedWork(act())
        except EvenlyError as error:
            return _Failed(self.rank, "", "", error)
        except CheckpointException as failure:  # of torch, on all ranks alike; no subclass of Exception
            rank = min(failure.failures)
            return self._failed(rank, failure.failures[rank][0])
        except Exception as error:
            return self._failed(self.rank, error)

    def _failed(self, rank: int, error: BaseException) -> _Failed:
        text = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        remedy = REMEDIES.get(error.errno or 0, "") if isinstance(error, OSError) else ""
        return _Failed(rank, f"rank {rank}: {text}" if self.size > 1 else text, remedy)


@all_ranks()
def _check_group(group: Group) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        return
    asked, ranks = "keep checkpoints of this run", dist.get_world_size()
    if group.size < ranks:
        raise UserError(asked, f"{ranks} ranks but a group of {group.size}", "give a gloo group of all ranks")
    if group.size > 1 and group.handle is dist.group.WORLD:
        raise UserError(asked, "the default group", "give a gloo group that nothing else uses (Group.open)")
    if group.size > 1 and dist.get_backend(group.handle) != "gloo":
        raise UserError(asked, f"a group of backend {dist.get_backend(group.handle)}", "give a gloo group")
