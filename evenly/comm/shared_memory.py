"""Sums over CPU ranks of one machine, through memory that they share.

Over gloo a tensor crosses sockets, both ways: 1 MiB over two ranks takes 1.1 ms, where copying and adding it take 0.3.
Here every rank has a *place* in shared memory: it copies its tensor there, meets the others, and adds up all places in
the order of their positions, so that all ranks get the same bits.

There are two sets of places, used in turn. A rank that writes into a set has met the others in the sum before, and they
came to that meeting when they had read this set to its end. So one meeting a sum is enough. It also finds ranks whose
tensors differ in length.

Ranks meet by *marks* in the same memory, at which they look until all have come: 2 us, where a sum of one number over
gloo takes 160. Marks need a processor that shows others what it writes in the order of writing, which x86 does, and
processes that ranks can watch: a rank that has ended comes no more. Elsewhere, and where a rank has ended, they meet
over gloo, which orders writing before reading everywhere and knows how to tell of ranks that are gone.

The memory has no name: nobody finds it but the group's ranks, and it ends with them, however they end.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import select
from collections.abc import Callable, Sequence
from time import perf_counter, sleep
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from evenly.comm.collectives import gather_values
from evenly.comm.transport import POLL_S, yield_core
from evenly.errors import RunError
from evenly.torch_private import without_torch_function

if TYPE_CHECKING:
    from evenly.comm.groups import Group

PLACE_BYTES = 4 << 20  # longer tensors go in pieces
WORTH_BYTES = 1 << 16  # fewer cross a socket as soon as two ranks meet over gloo
MOST_RANKS = 8  # each reads what all have written
TOKEN_BYTES = 16
SETS = 2
TYPES = (torch.float32, torch.float64)
WRITES_IN_ORDER = ("x86_64", "AMD64")  # processors, as `platform.machine` calls them
MARK_BYTES = 64  # of a rank: a line of the cache, so that no rank's writing slows down looks at another's mark
LONGEST_SLEEP_S = 0.001  # between two looks
LIMIT_S = 1800.0  # to wait for another rank, as over gloo


class _Offer(NamedTuple):
    """How to find the memory of the first rank, and what stands in it."""

    process: int
    descriptor: int
    token: bytes


class Marks:
    """How far each rank has come, written by itself and looked at by all: for ranks that meet again and again.

    memory:    of 64-bit numbers, `MARK_BYTES` of each rank: the meetings that it has come to, whether it has left, and
               what it has brought to its last two meetings.
    processes: file descriptors that become readable when the process of a rank ends, by position; closed by `leave`.
    """

    def __init__(self, memory: memoryview, position: int, processes: Sequence[int]) -> None:
        self._numbers, self._position, self._processes = memory.cast("q"), position, [*processes]
        self._each = MARK_BYTES // 8
        self._meetings = 0
        self._ends = [select.poll() for _ in processes]
        for end, process in zip(self._ends, processes, strict=True):
            end.register(process, select.POLLIN)

    def meet(self, brought: int) -> list[int] | None:
        """What all ranks have brought, by position, once all have come; None where one comes no more.

        Raises `RunError` where one does not come for `LIMIT_S`.
        """
        numbers, began_s = self._numbers, perf_counter()
        self._meetings += 1
        own = self._position * self._each
        numbers[own + 2 + self._meetings % 2] = brought
        numbers[own] = self._meetings  # last: who sees that this rank has come sees all that it has written
        for position, end in enumerate(self._ends):
            other = position * self._each
            while numbers[other] < self._meetings:
                waited_s = perf_counter() - began_s
                if waited_s < POLL_S:
                    yield_core()
                elif (numbers[other + 1] or end.poll(0)) and numbers[other] < self._meetings:
                    return None
                elif waited_s < LIMIT_S:
                    sleep(min(waited_s / 16, LONGEST_SLEEP_S))
                else:
                    raise RunError(
                        "a sum over ranks in memory that they share",
                        f"the rank at position {position} has not come to it for {LIMIT_S / 60:.0f} minutes",
                        "see its log for what it does; `evenly run` names ranks that stand still",
                    )
        return [numbers[at + 2 + self._meetings % 2] for at in range(0, len(numbers), self._each)]

    def leave(self) -> None:
        """Has the others wait for this rank no more; safe to call twice."""
        self._numbers[self._position * self._each + 1] = 1
        while self._processes:
            os.close(self._processes.pop())


class SharedMemory:
    """The places of all ranks of a group, and their marks; None where they have to meet over gloo."""

    def __init__(self, memory: mmap.mmap, ranks: int, position: int, processes: Sequence[int] | None) -> None:
        of_places = SETS * ranks * PLACE_BYTES
        self._places = np.frombuffer(memory, np.uint8, of_places).reshape(SETS, ranks, PLACE_BYTES)
        marks = memoryview(memory)[of_places : of_places + ranks * MARK_BYTES]
        self.marks = None if processes is None else Marks(marks, position, processes)
        self._position, self._set = position, 0
        self._length = torch.zeros(1, dtype=torch.int64)
        self._length_here = self._length.numpy()

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether `add_up` is for such a tensor, made contiguous and without gradient: the same on all ranks."""
        return tensor.dtype in TYPES and tensor.nbytes >= (WORTH_BYTES if self.marks is None else 1)

    def add_up(self, tensor: torch.Tensor, meet: Callable[[torch.Tensor], object]) -> float:
        """Replaces `tensor` by its sum over the ranks, in place; how long it has looked at marks, s.

        meet: replaces a tensor of one number by its sum over the ranks, once all have called it.
        Raises `RunError` where another rank's tensor has another length.
        """
        with without_torch_function():
            numbers = tensor.detach().view(-1).numpy()
        length, looked_s = PLACE_BYTES // numbers.itemsize, 0.0
        for start in range(0, len(numbers), length):
            looked_s += self._add_up(numbers[start : start + length], meet)
        return looked_s

    def _add_up(self, numbers: np.ndarray, meet: Callable[[torch.Tensor], object]) -> float:
        places = self._places[self._set, :, : numbers.nbytes].view(numbers.dtype)
        self._set = (self._set + 1) % SETS
        np.copyto(places[self._position], numbers)
        began_s = perf_counter()
        lengths = None if self.marks is None else self.marks.meet(numbers.nbytes)
        looked_s = perf_counter() - began_s
        if lengths is None:
            self._length_here[0] = numbers.nbytes
            meet(self._length)
        if self._length_here[0] != numbers.nbytes * len(places) if lengths is None else {*lengths} != {numbers.nbytes}:
            raise RunError(
                f"a sum of {numbers.nbytes} bytes over ranks",
                "another rank has a tensor of another length",
                "let all ranks compute the same on the same batch; `evenly run --check` names those that do not",
            )
        with np.errstate(all="ignore"):  # a number that is not finite is found in the step
            np.add(places[0], places[1], out=numbers)
            for place in places[2:]:
                np.add(numbers, place, out=numbers)
        return looked_s

    def leave(self) -> None:
        """Has the others wait for this rank no more; safe to call twice."""
        if self.marks is not None:
            self.marks.leave()


def share_memory(group: Group) -> SharedMemory | None:
    """Memory that the ranks of `group` share, all of which call it; None where they cannot, on all.

    The group is one of a single node.
    """
    if not 1 < group.size <= MOST_RANKS or group.device.type != "cpu" or group.fake is not None:
        return None
    if dist.get_backend(group.handle) != "gloo":  # torch's fake one has no other ranks
        return None
    bytes_of_all = group.size * (SETS * PLACE_BYTES + MARK_BYTES) + TOKEN_BYTES
    made = _make(bytes_of_all) if group.position == 0 else None
    try:
        offer: _Offer | None = gather_values(None if made is None else made[1], group)[0]
        memory = made[0] if made is not None else _open(offer, bytes_of_all)
        everyone = all(gather_values(memory is not None, group))
    finally:
        if made is not None:
            os.close(made[1].descriptor)
    if not everyone or memory is None:
        return None
    return SharedMemory(memory, group.size, group.position, _watched(group))


def _watched(group: Group) -> list[int] | None:
    """File descriptors of all ranks' processes, by position; None, on all, where marks are not enough to meet."""
    found: list[int] = []
    if platform.machine() in WRITES_IN_ORDER:
        for process in gather_values(os.getpid(), group):
            try:
                found.append(os.pidfd_open(process))
            except (AttributeError, OSError):  # not on this system
                break
    if all(gather_values(len(found) == group.size, group)):
        return found
    for descriptor in found:
        os.close(descriptor)
    return None


def _make(size: int) -> tuple[mmap.mmap, _Offer] | None:
    try:
        descriptor = os.memfd_create("evenly")
    except (AttributeError, OSError):  # not on this system
        return None
    try:
        os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
    except OSError:
        os.close(descriptor)
        return None
    token = secrets.token_bytes(TOKEN_BYTES)
    memory[-TOKEN_BYTES:] = token
    return memory, _Offer(os.getpid(), descriptor, token)


def _open(offer: _Offer | None, size: int) -> mmap.mmap | None:
    """The memory that is offered; None where this rank does not see it, or finds another's under its name."""
    if offer is None:
        return None
    try:
        descriptor = os.open(f"/proc/{offer.process}/fd/{offer.descriptor}", os.O_RDWR)
    except OSError:
        return None
    try:
        memory = mmap.mmap(descriptor, size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    return memory if memory[-TOKEN_BYTES:] == offer.token else None
