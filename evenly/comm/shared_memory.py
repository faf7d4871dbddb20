"""Sums over CPU ranks of one machine, through memory that they share.

Over gloo a tensor crosses sockets, both ways: 1 MiB over two ranks takes 1.1 ms, where copying and adding it take 0.3.
Here every rank has a *place* in shared memory: it copies its tensor there, meets the others in a sum of one number
over gloo, and adds up all places in the order of their positions, so that all ranks get the same bits.

There are two sets of places, used in turn. A rank that writes into a set has met the others in the sum before, and they
came to that meeting when they had read this set to its end. So one meeting a sum is enough. It also orders writing
before reading on any processor, and finds ranks that are gone, as every collective does, and ranks whose tensors differ
in length, which is the number that is summed.

The memory has no name: nobody finds it but the group's ranks, and it ends with them, however they end.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from evenly.comm.collectives import gather_values
from evenly.errors import RunError
from evenly.torch_private import without_torch_function

if TYPE_CHECKING:
    from evenly.comm.groups import Group

PLACE_BYTES = 4 << 20  # longer tensors go in pieces
WORTH_BYTES = 1 << 16  # fewer cross a socket as soon as two ranks meet
MOST_RANKS = 8  # each reads what all have written
TOKEN_BYTES = 16
SETS = 2
TYPES = (torch.float32, torch.float64)


class _Offer(NamedTuple):
    """How to find the memory of the first rank, and what stands in it."""

    process: int
    descriptor: int
    token: bytes


class SharedMemory:
    """The places of all ranks of a group."""

    def __init__(self, memory: mmap.mmap, ranks: int, position: int) -> None:
        self._places = np.frombuffer(memory, np.uint8, SETS * ranks * PLACE_BYTES).reshape(SETS, ranks, PLACE_BYTES)
        self._position, self._set = position, 0
        self._length = torch.zeros(1, dtype=torch.int64)
        self._length_here = self._length.numpy()

    @staticmethod
    def takes(tensor: torch.Tensor) -> bool:
        """Whether `add_up` is for such a tensor, made contiguous and without gradient: the same on all ranks."""
        return tensor.dtype in TYPES and tensor.nbytes >= WORTH_BYTES

    def add_up(self, tensor: torch.Tensor, meet: Callable[[torch.Tensor], object]) -> None:
        """Replaces `tensor` by its sum over the ranks, in place.

        meet: replaces a tensor of one number by its sum over the ranks, once all have called it.
        Raises `RunError` where another rank's tensor has another length.
        """
        with without_torch_function():
            numbers = tensor.detach().view(-1).numpy()
        length = PLACE_BYTES // numbers.itemsize
        for start in range(0, len(numbers), length):
            self._add_up(numbers[start : start + length], meet)

    def _add_up(self, numbers: np.ndarray, meet: Callable[[torch.Tensor], object]) -> None:
        places = self._places[self._set, :, : numbers.nbytes].view(numbers.dtype)
        self._set = (self._set + 1) % SETS
        np.copyto(places[self._position], numbers)
        self._length_here[0] = numbers.nbytes
        meet(self._length)
        if self._length_here[0] != numbers.nbytes * len(places):
            raise RunError(
                f"a sum of {numbers.nbytes} bytes over ranks",
                "another rank has a tensor of another length",
                "let all ranks compute the same on the same batch; `evenly run --check` names those that do not",
            )
        with np.errstate(all="ignore"):  # a number that is not finite is found in the step
            np.add(places[0], places[1], out=numbers)
            for place in places[2:]:
                np.add(numbers, place, out=numbers)


def share_memory(group: Group) -> SharedMemory | None:
    """Memory that the ranks of `group` share, all of which call it; None where they cannot, on all.

    The group is one of a single node.
    """
    if not 1 < group.size <= MOST_RANKS or group.device.type != "cpu" or group.fake is not None:
        return None
    if dist.get_backend(group.handle) != "gloo":  # torch's fake one has no other ranks
        return None
    bytes_of_all = SETS * group.size * PLACE_BYTES + TOKEN_BYTES
    made = _make(bytes_of_all) if group.position == 0 else None
    try:
        offer: _Offer | None = gather_values(None if made is None else made[1], group)[0]
        memory = made[0] if made is not None else _open(offer, bytes_of_all)
        everyone = all(gather_values(memory is not None, group))
    finally:
        if made is not None:
            os.close(made[1].descriptor)
    return SharedMemory(memory, group.size, group.position) if everyone and memory is not None else None


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
