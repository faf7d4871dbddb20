"""Commands on the nodes of a lab: the same on each, with its number filled in, all at the same time."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import IO

from benchmarks.lab.lab import Lab, address

ENDED_AFTER_S = 20.0  # of a polite request


def filled_in(lab: Lab, node: int, words: Sequence[str]) -> list[str]:
    """`words` with what stands in braces: {node}, {nodes}, {devices}, {address} (of the node), {first} (of node 0)."""
    values = {
        "{nodes}": str(lab.nodes),
        "{node}": str(node),
        "{devices}": str(lab.devices),
        "{address}": address(node),
        "{first}": address(0),
    }
    done = [*words]
    for name, value in values.items():
        done = [word.replace(name, value) for word in done]
    return done


def start(lab: Lab, node: int, words: Sequence[str], *, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """A command on one node, its output in a pipe; it ends in a group of its own."""
    command = [*lab.within(node), *filled_in(lab, node, words)]
    return subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def run_on_all(lab: Lab, words: Sequence[str], out: IO[str] = sys.stdout) -> list[int]:
    """Runs a command on every node; each line of theirs goes to `out` with its node before it. Their exit codes.

    Ctrl-C and SIGTERM are passed on, and come to this process once all have ended.
    """
    running = [start(lab, node, words) for node in range(lab.nodes)]
    came: list[int] = []

    def pass_on(signum: int, _: FrameType | None) -> None:
        came.append(signum)
        for one in running:
            if one.poll() is None:
                one.send_signal(signum)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        readers = [threading.Thread(target=_copy, args=(node, one, out)) for node, one in enumerate(running)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        codes = [one.wait() for one in running]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])
    return codes


def _copy(node: int, process: subprocess.Popen[str], out: IO[str]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            out.write(f"node{node}: {line}")
            out.flush()
