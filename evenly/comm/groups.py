"""Groups: which ranks talk to each other, and under what name.

A *group* is an ordered set of ranks; a rank's *position* in it is what operations take as `to` and `source`. Groups are
opened inside one another and closed in the reverse order. Every rank of the world opens the same groups in the same
order, also those that it is not in (torch names groups by counting them): for these it holds an object that refuses to
talk.

A group of one rank needs no process group: every operation on it is the identity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist

from evenly.data.alone import all_ranks
from evenly.errors import UserError
from evenly.observe.diagnosis import number_ranges
from evenly.observe.recorder import Recorder

if TYPE_CHECKING:
    from evenly.comm.fake import FakeCollectives
    from evenly.comm.shared_memory import SharedMemory


class Group:
    """Some ranks that talk to each other; made by `Group.world`, `Group.alone` and `open`.

    name:    how messages call it. size: how many ranks.
    ranks:   world ranks, by position.
    rank:    own position, None for a rank outside.
    device:  what tensors must be on for this group's backend.
    checked: whether every operation first compares what all ranks ask for.
    fake:    what its collectives do in place of torch's, for a group of which there is one rank only.
    shared:  memory in which its sums are made (`shared_memory.share_memory`), where its ranks have that.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        *,
        own: int,
        handle: dist.ProcessGroup | None,
        device: torch.device,
        recorder: Recorder | None = None,
        checked: bool = False,
        fake: FakeCollectives | None = None,
    ) -> None:
        self.name, self.ranks, self.device = name, tuple(ranks), device
        self.size = len(self.ranks)
        self.rank = self.ranks.index(own) if own in self.ranks else None
        self.recorder, self.checked, self.fake = recorder, checked, fake
        self.shared: SharedMemory | None = None
        self.label = f"{name} [{number_ranges(ranks)}]"
        self.operations = 0  # begun so far; the same on all its ranks when they agree
        self._handle, self._own = handle, own
        self._children: list[Group] = []
        self.closed = False

    @classmethod
    def alone(cls, name: str = "data", device: str = "cpu") -> Group:
        """The group of a process alone."""
        return cls(name, [0], own=0, handle=None, device=torch.device(device))

    @classmethod
    def world(
        cls, name: str = "world", device: str = "cpu", recorder: Recorder | None = None, *, checked: bool = False
    ) -> Group:
        """All ranks of the process group that this process has joined; `close` leaves it."""
        if not dist.is_initialized():
            return cls.alone(name, device)
        return cls.of(dist.group.WORLD, name, device, recorder, checked=checked)

    @classmethod
    @all_ranks()
    def of(
        cls,
        handle: dist.ProcessGroup | None,
        name: str,
        device: str = "cpu",
        recorder: Recorder | None = None,
        *,
        checked: bool = False,
    ) -> Group:
        """A group around a process group of torch's that this rank is in, made elsewhere (a device mesh, say)."""
        ranks = dist.get_process_group_ranks(handle)
        where = torch.device(device)
        return cls(name, ranks, own=dist.get_rank(), handle=handle, device=where, recorder=recorder, checked=checked)

    @property
    def position(self) -> int:
        """Own position. Raises `UserError` on a rank outside."""
        if self.rank is None:
            raise self._refusal(f"rank {self._own} is not in it")
        return self.rank

    @property
    def handle(self) -> dist.ProcessGroup:
        """torch's process group. Raises `UserError` on a rank outside, after `close`, and for a group of one rank."""
        self.check_open()
        if self._handle is None:
            raise self._refusal(f"rank {self._own} is not in it" if self.rank is None else "it has one rank")
        return self._handle

    def check_open(self) -> None:
        """Raises `UserError` after `close`."""
        if self.closed:
            raise self._refusal("it is closed")

    def check_talks(self) -> None:
        """Raises `UserError` on a rank outside, and after `close` unless it is a rank alone."""
        if self.rank is None:
            raise self._refusal(f"rank {self._own} is not in it")
        if self.size > 1:
            self.check_open()

    def check_position(self, position: int, word: str) -> None:
        """Raises `UserError` unless `position` is one of this group."""
        if not 0 <= position < self.size:
            raise self._refusal(f"{word} {position} is not one of its positions 0 to {self.size - 1}")

    def rename(self, name: str) -> None:
        """How messages call it from now on. All its ranks call it, before any of them talks in it."""
        self.name, self.label = name, f"{name} [{number_ranges(self.ranks)}]"

    # --------------------------------------------------------------------------------- groups inside groups
    @all_ranks()
    def open(self, name: str, positions: Sequence[int], *, backend: str | None = None) -> Group:
        """The group of the ranks at `positions` of this one, in ascending order. Every rank of the world calls it.

        backend: of the new group, by default this one's. Raises `UserError` for positions outside or given twice.
        """
        asked = f"open group {name!r} of positions {list(positions)} in group {self.label}"
        for position in positions:
            if not 0 <= position < self.size:
                raise UserError(asked, f"{position} is not one of 0 to {self.size - 1}", "name positions inside")
        if len(set(positions)) < len(positions) or not positions:
            raise UserError(asked, "a position occurs twice, or none is given", "give each rank once")
        ranks = [self.ranks[position] for position in sorted(positions)]  # as torch orders them
        handle = dist.new_group(ranks, backend=backend) if len(ranks) > 1 else None
        child = Group(
            name,
            ranks,
            own=self._own,
            handle=handle if isinstance(handle, dist.ProcessGroup) else None,  # a rank outside gets a mark of torch's
            device=torch.device("cpu") if backend == "gloo" else self.device,
            recorder=self.recorder,
            checked=self.checked,
        )
        self._children.append(child)
        return child

    def mesh(self, sizes: Mapping[str, int]) -> dict[str, Group]:
        """This rank's group along each axis, the last axis running fastest. Every rank of the world calls it.

        sizes: axis name -> its size; their product is this group's size. With {"data": 2, "tensor": 2}, "data" of
        position 1 is [1, 3] and "tensor" is [0, 1].
        """
        if math.prod(sizes.values()) != self.size or min(sizes.values(), default=0) < 1:
            raise UserError(
                f"a mesh {dict(sizes)} over group {self.label}",
                f"its sizes multiply to {math.prod(sizes.values())}, the group has {self.size} ranks",
                "let the product of the sizes be the number of ranks",
            )
        groups: dict[str, Group] = {}
        for axis in sizes:
            lines = [self.open(axis, positions) for positions in mesh_lines(sizes, axis)]
            groups[axis] = next((line for line in lines if line.rank is not None), lines[0])
        return groups

    # ------------------------------------------------------------------------------------------------ closing
    @all_ranks()
    def close(self) -> None:
        """Closes what was opened in it, newest first, then itself; safe to call twice."""
        if self.closed:
            return
        while self._children:
            self._children.pop().close()
        if self.shared is not None:
            self.shared.leave()
        self.closed, self.shared = True, None
        if self._handle is not None and dist.is_initialized():
            dist.destroy_process_group(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None:  # after an error the others may be gone: the process leaves by ending
            self.close()

    def _refusal(self, found: str) -> UserError:
        return UserError(f"talk in group {self.label}", found, "use a group that this rank is in, while it is open")


def mesh_lines(sizes: Mapping[str, int], axis: str) -> list[list[int]]:
    """All lines of a mesh along `axis`, as positions; the last axis runs fastest."""
    strides: dict[str, int] = {}
    stride = 1
    for name in reversed([*sizes]):
        strides[name] = stride
        stride *= sizes[name]
    others = [[(i * strides[name]) for i in range(sizes[name])] for name in sizes if name != axis]
    return [[sum(start) + i * strides[axis] for i in range(sizes[axis])] for start in product(*others)]
