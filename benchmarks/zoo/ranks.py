"""Processes for one row: forked from a server that has imported torch, the libraries and evenly, with a hard limit.

Every row has fresh ones, which costs a tenth of a second: what crashes, hangs or leaves state behind ends with its row.
They end with the server, and the server with the campaign, however that ends.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch._dynamo",  # every optimizer imports it
    "zoo_jobs",
    "evenly.train.run",
    "evenly.verify.ranks",
    "evenly.parallel.data.shards",
    "evenly.parallel.data.replicas",
    "evenly.parallel.tensor.model",
    "evenly.parallel.tensor.trace",
    "evenly.parallel.pipeline.model",
)
OF_LIBRARIES = {
    "transformers": ("transformers.modeling_utils", "transformers.models.auto.modeling_auto"),
    "timm": ("subjects_timm", "timm"),
    "diffusers": ("subjects_diffusers", "diffusers"),
    "peft": ("subjects_peft", "peft"),
}
PR_SET_PDEATHSIG = 1
GRACE_S = 4.0  # for the other ranks, after the first has raised


@dataclass
class Outcome:
    """What a row's processes returned or raised, by rank; `log` is the end of what they wrote.

    ended: how a process that said nothing ended, by rank.
    """

    results: dict[int, Any] = field(default_factory=dict[int, Any])
    errors: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    ended: dict[int, str] = field(default_factory=dict[int, str])
    timed_out: bool = False
    log: str = ""


class Ranks:
    """Runs functions on ranks that are forked for each call."""

    def __init__(self, folder: Path, libraries: Iterable[str] = ()) -> None:
        self._folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOAD, *(name for of in libraries for name in OF_LIBRARIES[of])])

    def run(self, function: Callable[..., Any], *args: Any, size: int, limit_s: float) -> Outcome:
        """Calls `function(*args)` on ranks 0..size-1, and ends them after `limit_s`."""
        log = self._folder / "log.txt"
        log.write_text("")
        port = _free_port()
        started: dict[Connection, tuple[int, Any]] = {}
        try:
            for rank in range(size):
                here, there = self._context.Pipe(duplex=False)
                environment = _environment(rank, size, port)
                process = self._context.Process(
                    target=_serve, args=(there, function, args, environment, str(log), [*sys.path]), daemon=False
                )
                process.start()
                there.close()
                started[here] = (rank, process)
            outcome = _collect(started, limit_s)
        finally:
            _end(started)
        outcome.log = log.read_text(errors="replace")[-1500:]
        return outcome


def _collect(started: dict[Connection, tuple[int, Any]], limit_s: float) -> Outcome:
    outcome = Outcome()
    waiting, end = dict(started), time.monotonic() + limit_s
    while waiting and (left := end - time.monotonic()) > 0:
        for ready in wait([*waiting], timeout=left):
            rank, process = waiting.pop(ready)  # type: ignore[arg-type]
            try:
                error, result = ready.recv()  # type: ignore[union-attr]
            except EOFError:
                process.join(GRACE_S)
                outcome.ended[rank] = f"exit code {process.exitcode}"
                error, result = None, None
            else:
                if error is None:
                    outcome.results[rank] = result
                else:
                    outcome.errors[rank] = error
            if rank not in outcome.results:
                end = min(end, time.monotonic() + GRACE_S)
    outcome.timed_out = bool(waiting) and not outcome.errors and not outcome.ended
    return outcome


def _end(started: dict[Connection, tuple[int, Any]]) -> None:
    for connection, (_, process) in started.items():
        connection.close()
        if process.is_alive():
            process.join(0.5)
        if process.is_alive():
            process.kill()
        process.join()
        process.close()


def _serve(
    connection: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    environment: dict[str, str],
    log: str,
    path: list[str],
) -> None:
    _end_with_parent()
    sys.path[:] = path
    os.environ.update(environment)
    written = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(written, 1)
    os.dup2(written, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the campaign ends its ranks itself
    try:
        reply: tuple[Any, Any] = (None, function(*args))
    except BaseException as problem:
        reply = (describe(problem), None)
    connection.send(reply)
    connection.close()
    sys.stdout.flush()
    os._exit(0)  # without the farewells of a process group in any state


def _end_with_parent() -> None:
    """Asks Linux to kill this process when the server that forked it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def describe(problem: BaseException) -> dict[str, Any]:
    """What is recorded of an exception."""
    from evenly.errors import EvenlyError, UserError, describe, step_of

    return {
        "kind": "user" if isinstance(problem, UserError) else "evenly" if isinstance(problem, EvenlyError) else "raw",
        "class": type(problem).__name__,
        "text": describe(problem) if isinstance(problem, Exception) else repr(problem),
        "step": step_of(problem),
        "trace": traceback.format_exc()[-4000:],
    }


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    values = {name: str(number) for name, number in numbers.items()}
    return {**values, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def commit_of(folder: Path) -> str:
    """The commit that is checked out, with -dirty where a tracked file differs from it."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=7"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
