"""Ten ways in which ranks fail to come together, each as a function of a rank; `marked` lines are named in messages."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import torch

from evenly.comm.connect import connect, disconnect
from evenly.comm.groups import Group
from evenly.comm.operations import all_reduce, barrier, broadcast
from evenly.launcher.environment import find_here

ODD = 1  # the rank that differs


def disagree(kind: str) -> None:
    """A few steps in agreement, then `kind`."""
    world = connect(find_here())
    group: Group = world.group("data")
    for _ in range(3):
        all_reduce(torch.ones(4), group)
    KINDS[kind](group, group.position == ODD)
    disconnect(world)


def missing(group: Group, odd: bool) -> None:
    if odd:
        time.sleep(600)  # missing, odd
    all_reduce(torch.ones(4), group)  # missing, others


def shape(group: Group, odd: bool) -> None:
    tensor = torch.ones(5 if odd else 4000)
    all_reduce(tensor, group)  # shape


def dtype(group: Group, odd: bool) -> None:
    tensor = torch.ones(4000, dtype=torch.float64 if odd else torch.float32)
    all_reduce(tensor, group)  # dtype


def operation(group: Group, odd: bool) -> None:
    if odd:
        barrier(group)  # operation, odd
    else:
        all_reduce(torch.ones(4), group)  # operation, others
    all_reduce(torch.ones(4), group)


def order(group: Group, odd: bool) -> None:
    def summed() -> None:
        all_reduce(torch.ones(4000), group)  # order, sum

    def sent() -> None:
        broadcast(torch.ones(70000), 0, group)  # order, broadcast

    for act in (sent, summed) if odd else (summed, sent):
        act()


def dead(group: Group, odd: bool) -> None:
    if odd:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce(torch.ones(4), group)  # dead


def stuck_loader(group: Group, odd: bool) -> None:
    loader = torch.utils.data.DataLoader(Lines(odd), num_workers=1)
    for batch in loader:
        all_reduce(batch, group)  # stuck loader


class Lines(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, odd: bool) -> None:
        self.odd = odd

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.odd and index == 2:
            time.sleep(600)  # stuck worker
        return torch.ones(3)


def raised(group: Group, odd: bool) -> None:
    if odd:
        raise ValueError("no such label")  # raised, odd
    all_reduce(torch.ones(4), group)  # raised, others


def slow(group: Group, odd: bool) -> None:
    for _ in range(100000):
        if odd:
            slow_work()
        all_reduce(torch.ones(4), group)  # slow, others


def slow_work() -> None:
    total, until = 0, time.monotonic() + 30
    while time.monotonic() < until:
        total += 1  # slow, odd


def microbatches(group: Group, odd: bool) -> None:
    for _ in range(2 if odd else 3):
        all_reduce(torch.ones(4), group)  # microbatches


KINDS: dict[str, Callable[[Group, bool], None]] = {
    "missing": missing,
    "shape": shape,
    "dtype": dtype,
    "operation": operation,
    "order": order,
    "dead": dead,
    "stuck loader": stuck_loader,
    "raised": raised,
    "slow": slow,
    "microbatches": microbatches,
}
