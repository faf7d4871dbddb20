"""This process as the first of several ranks that do not exist: torch's fake process group, for every library in it.

What ranks would gather are copies of this rank's tensors, what they would add up is this rank's own, and what they
would send is ones: a gradient of zeros would be none to `evenly`, and a vote of zero a no to torch's pipelining. What
describes tensors to a later stage is what this rank has last said so. So the numbers mean nothing, and every rank's
Python runs as it does among real ones.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from torch.distributed import distributed_c10d


def pretend(ranks: int) -> None:
    """From now on this process is rank 0 of `ranks` on one machine, as `evenly run` would have started it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    os.environ["EVENLY_CONTROL"] = control = tempfile.mkdtemp(prefix="evenly-host-")  # the flight recorder runs too
    atexit.register(shutil.rmtree, control, ignore_errors=True)
    join, open_group = dist.init_process_group, dist.new_group

    def joined(*_: Any, **given: Any) -> None:
        join("fake", rank=0, world_size=ranks, store=given.get("store") or dist.HashStore())

    def opened(*given: Any, **named: Any) -> Any:
        return open_group(*given, **{**named, "backend": "fake"})

    dist.init_process_group, dist.new_group = joined, opened
    dist.recv = dist.irecv = distributed_c10d.irecv = _received  # the last is what batches of messages are checked by
    dist.isend = distributed_c10d.isend = partial(_sent, dist.isend)
    dist.ProcessGroup.recv = lambda _, tensors, *__: [_received(one) for one in tensors][-1]
    dist.ProcessGroup.alltoall_base = lambda _, landing, *__: _received(landing)


def _received(tensor: torch.Tensor, *_: Any, tag: int = 0, **__: Any) -> _Done:
    """`evenly` receives bytes: here those of numbers of float32, or of what it has said of tensors."""
    said = _said.get((tag % MAX_TENSORS, tensor.numel()))
    with torch.no_grad():
        if said is not None:
            tensor.copy_(said)
        else:
            bytes_of_numbers = tensor.dtype is torch.uint8 and tensor.numel() % 4 == 0
            (tensor.view(torch.float32) if bytes_of_numbers else tensor).fill_(1)
    return _Done()


MAX_TENSORS = 1024  # of a message of `evenly`: the last two numbers of its tag are of what describes tensors
_said: dict[tuple[int, int], torch.Tensor] = {}  # by the number of the tensor in its message, and its bytes


def _sent(send: Callable[..., Any], tensor: torch.Tensor, *given: Any, tag: int = 0, **named: Any) -> Any:
    if tag % MAX_TENSORS >= MAX_TENSORS - 2:
        _said[tag % MAX_TENSORS, tensor.numel()] = tensor.clone()
    return send(tensor, *given, tag=tag, **named)


class _Done(dist.Work):
    def wait(self, *_: Any) -> bool:
        return True


def without_waiting() -> None:
    """torch's fake works are never completed, and its fake messages leave memory as it was.

    `evenly` would wait for each as long as it polls at most. What comes of an exchange is what this rank sends.
    """
    from evenly.comm import transport

    transport.POLL_S = 0
    post = getattr(transport, "post_exchange", None)  # not in older checkouts

    def exchanged(going: Any, coming: Any, group: Any) -> Any:
        works = post(going, coming, group)
        for one, landing in zip(going, coming, strict=True):
            landing.copy_(one) if one.numel() == landing.numel() else landing.zero_()
        return works

    if post is not None:
        transport.post_exchange = exchanged


def with_losses_elsewhere() -> None:
    """Of a pipeline's first stage, which computes no loss: another rank's is 1, and counts as one sample."""
    from evenly.engine.step_totals import StepTotalsBuilder

    read = StepTotalsBuilder.read

    def found(self: StepTotalsBuilder, values: list[float]) -> Any:
        totals = read(self, values)
        ones = [1.0] * len(totals.totals)
        return replace(totals, totals=ones, weights=ones)

    StepTotalsBuilder.read = found
