"""Ranks that are kept between tests: forked once from a server that has imported torch, then given jobs.

A job is a function of a test module with its arguments; it runs on `size` ranks with the environment that torchrun
would set, and its results come back in rank order. A job that outlives its limit, or a rank that dies, ends all
ranks and fails the test; the next job starts fresh ones.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

from evenly.comm.connect import connect, disconnect
from evenly.comm.groups import Group
from evenly.launcher.environment import find_here

PRELOAD = [
    "evenly.launcher.no_collection",
    "torch",
    "torch.distributed",
    "torch._dynamo",  # every optimizer imports it
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "pytest",  # of which the module of a job has its marks
    "evenly.train.run",
    "evenly.verify.ranks",
    "evenly.train.resume",
    "evenly.engine.find_stages",
    "evenly.engine.find_splits",
    "evenly.engine.pipeline_executor",
    "evenly.parallel.data.shards",
    "evenly.launcher.preload",
]


class RankFailure(AssertionError):
    """A rank raised; the text is its traceback."""


# Gloo's threads look for messages a hundred times a second, also those of groups that no job needs any more.
MOST_THREADS = 60
# Objects until garbage is collected: at Python's own 700 that takes a twentieth of a test's time.
ALLOCATIONS = 100_000
GRACE_S = 2.0  # in which others may report their failures


class KeptRanks:
    """Up to a handful of ranks, started when first needed, and again when they have gathered many threads."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._ranks: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], *args: Any, size: int = 2, limit_s: float = 1400.0) -> list[Any]:
        """Results of `function(*args)` on ranks 0..size-1."""
        if any(psutil.Process(process.pid).num_threads() > MOST_THREADS for process, _ in self._ranks):
            self.close()
        while len(self._ranks) < size:
            self._start_one()
        port = free_port()
        for rank in range(size):
            self._ranks[rank][1].send((function, args, _environment(rank, size, port), list(sys.path)))
        return self._collect(size, limit_s)

    def close(self) -> None:
        """Ends all ranks."""
        for process, connection in self._ranks:
            connection.close()
            process.kill()
            process.join()
        self._ranks = []

    def _start_one(self) -> None:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there,))
        process.start()
        there.close()
        self._ranks.append((process, here))

    def _collect(self, size: int, limit_s: float) -> list[Any]:
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks[:size])}
        results: list[Any] = [None] * size
        failures: list[str] = []
        while waiting and not failures:
            ready = wait([*waiting], timeout=limit_s)
            if not ready:
                failures.append(f"ranks {sorted(waiting.values())} did not end within {limit_s} s")
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    error, results[rank] = connection.recv()
                except EOFError:
                    error = "the process ended"
                if error:
                    failures.append(f"rank {rank}: {error}")
        if failures:  # of the others, which may have the cause
            for connection in wait([*waiting], timeout=GRACE_S):
                with suppress(EOFError):
                    failures.append(f"rank {waiting[connection]}: {connection.recv()[0]}")
        if failures:
            self.close()
            raise RankFailure("\n".join(failures))
        return results


def free_port() -> int:
    """A port of the loopback interface that nobody listens on, below those that connections get by themselves."""
    draw = random.SystemRandom()  # not what tests seed
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port := draw.randrange(12_000, 32_000)))
            return port


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    values = {name: str(number) for name, number in numbers.items()}
    return {**values, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def _serve(connection: Connection) -> None:
    import torch

    from evenly.parallel.data import grouping

    gc.enable()
    gc.set_threshold(ALLOCATIONS, 50, 100)
    multiprocessing.set_start_method(None, force=True)  # of data workers, as in ranks that are launched
    torch.set_num_threads(1)
    grouping.SMALL_BYTES = grouping.WHOLE_BYTES = (
        0  # the blocks of small models are units, cut as those of large ones are
    )
    while True:
        try:
            function, args, environment, path = connection.recv()
        except (EOFError, OSError):
            return
        sys.path[:] = path
        os.environ.update(environment)
        try:
            connection.send(("", function(*args)))
            gc.collect()  # models and groups that refer to each other are freed only then
        except BaseException:
            connection.send((traceback.format_exc(), None))
            return  # its process group may be in any state


@contextmanager
def group_of_all() -> Iterator[Group]:
    """Within a job, the group of its ranks."""
    world = connect(find_here())
    try:
        yield world.group("data")
    finally:
        disconnect(world)
