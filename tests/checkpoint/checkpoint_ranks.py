"""Ranks for the tests of this folder: forked from a server that has torch loaded, gloo, loopback only."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT_S = 400.0
# Building an optimizer imports torch._dynamo, which takes seconds: once in the server, not in every rank.
PRELOAD = ["torch", "torch._dynamo", "torch.distributed.tensor", "evenly.checkpoint.resume"]


def run_ranks(size: int, act: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """Results of `act(group, rank, *args)` on `size` ranks; `group` is a gloo group of its own.

    Raises if a rank raises, dies or takes longer than `TIMEOUT_S`; no process is left.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    folder.mkdir(parents=True, exist_ok=True)
    meeting = folder / f".meeting-{time.monotonic_ns()}"
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_rank, args=(pipe[1], act, rank, size, meeting, args)) for rank, pipe in enumerate(pipes)
    ]
    for process, pipe in zip(processes, pipes, strict=True):
        process.start()
        pipe[1].close()
    try:
        return [_receive(pipe[0], rank) for rank, pipe in enumerate(pipes)]
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            process.join(5)
            process.kill()
            process.join()
            process.close()
            pipe[0].close()
        meeting.unlink(missing_ok=True)


def _receive(pipe: Connection, rank: int) -> Any:
    if not pipe.poll(TIMEOUT_S):
        raise TimeoutError(f"rank {rank} did not answer in {TIMEOUT_S} s")
    try:
        result, trace = pipe.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} died") from None
    if trace is not None:
        raise RuntimeError(f"rank {rank} failed:\n{trace}")
    return result


def _rank(
    pipe: Connection, act: Callable[..., Any], rank: int, size: int, meeting: Path, args: tuple[Any, ...]
) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from evenly.comm.groups import Group

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    timeout = timedelta(seconds=300)
    try:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timeout)
        group = Group.of(dist.new_group(backend="gloo", timeout=timeout), "files")
        pipe.send((act(group, rank, *args), None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        pipe.send((None, traceback.format_exc()))
