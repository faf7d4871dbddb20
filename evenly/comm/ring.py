"""Ring all-reduce, written out: the sum over ranks with each rank talking to its two neighbours only.

The tensor is cut into as many *chunks* as there are ranks, p. In p - 1 *reduce-scatter* steps every rank sends one
chunk to the rank after it and adds what comes from the rank before it; then each rank has one chunk that is complete.
In p - 1 *all-gather* steps the complete chunks go round. Each rank sends 2 (p - 1) / p of the tensor, whatever p: no
all-reduce sends less (Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations").

The steps are data (`steps_of`), made without processes. A chunk is sent in *slices*, so that one slice is added while
the next is on its way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from evenly.comm.groups import Group
from evenly.comm.operations import irecv, isend
from evenly.comm.transport import Pending, even_sizes

SLICE_BYTES = 1 << 20


@dataclass(frozen=True)
class Step:
    """What one rank does in one step: it sends chunk `sent` on, and adds or stores chunk `received`."""

    phase: Literal["reduce-scatter", "all-gather"]
    sent: int
    received: int


@dataclass(frozen=True)
class Ran:
    """One step as it ran on this rank; times as of `time.time()`."""

    step: Step
    sent_bytes: int
    began_s: float
    ended_s: float


def steps_of(position: int, ranks: int) -> list[Step]:
    """The 2 (ranks - 1) steps of the rank at `position`."""
    adding = [
        Step("reduce-scatter", sent=(position - step) % ranks, received=(position - step - 1) % ranks)
        for step in range(ranks - 1)
    ]
    handing = [
        Step("all-gather", sent=(position + 1 - step) % ranks, received=(position - step) % ranks)
        for step in range(ranks - 1)
    ]
    return adding + handing


def ring_all_reduce(tensor: torch.Tensor, group: Group, *, watch: Callable[[Ran], None] | None = None) -> torch.Tensor:
    """Replaces `tensor` (contiguous) by its sum over the ranks of `group`, in place; the same bits on all ranks.

    watch: called after each step.
    """
    position, ranks = group.position, group.size
    chunks = list(tensor.detach().view(-1).split(even_sizes(tensor.numel(), ranks)))
    for step in steps_of(position, ranks):
        began_s = time.time()
        sent_bytes = _pass_on(chunks[step.sent], chunks[step.received], group, adds=step.phase == "reduce-scatter")
        if watch is not None:
            watch(Ran(step, sent_bytes, began_s, time.time()))
    return tensor


def _pass_on(sent: torch.Tensor, received: torch.Tensor, group: Group, *, adds: bool) -> int:
    """Sends one chunk to the next rank while another comes from the rank before; returns the bytes sent."""
    after, before = (group.position + 1) % group.size, (group.position - 1) % group.size
    length = max(SLICE_BYTES // sent.element_size(), 1)
    landing = torch.empty_like(received) if adds else received
    coming = [irecv(part, before, group) for part in _slices(landing, length)]
    going: list[Pending[None]] = [isend(part, after, group) for part in _slices(sent, length)]
    for pending, slice_of_chunk in zip(coming, _slices(received, length), strict=True):
        came = pending.wait()
        if adds:
            # What came first: the sum is made in the order in which the chunk goes round.
            torch.add(came, slice_of_chunk, out=slice_of_chunk)
    for pending in going:
        pending.wait()
    return sent.numel() * sent.element_size()


def _slices(chunk: torch.Tensor, length: int) -> list[torch.Tensor]:
    return list(chunk.split(length)) if chunk.numel() else []
