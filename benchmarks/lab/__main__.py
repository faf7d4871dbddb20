"""A cluster in one machine, to try runs on several nodes over networks that are slow; see `lab.py`. Needs root.

python -m benchmarks.lab up 4x1 --bandwidth 200mbit          four nodes of one device, each with such a link
python -m benchmarks.lab up 2x2 --slow-link 1=50mbit --slow-node 0=0.5
python -m benchmarks.lab run -- evenly run job.py --nodes {nodes} --node-rank {node} --devices {devices} \\
                                --rendezvous node0:29500
python -m benchmarks.lab on 1 -- ip address                  a command on one node
python -m benchmarks.lab list
python -m benchmarks.lab down                                ends what runs there, and leaves nothing

--name tells labs from each other, where there are several.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from types import FrameType
from typing import TypeVar

from benchmarks.lab.commands import filled_in, run_on_all
from benchmarks.lab.lab import Lab, LabError, down, found, guarded, names

T = TypeVar("T", str, float)


def main() -> int:
    asked, words = _arguments()
    signal.signal(signal.SIGTERM, _leave)  # a lab half made is taken away
    try:
        return _command(asked, words)
    except LabError as problem:
        print(f"lab: {problem}", file=sys.stderr)
        return 2


def _leave(signum: int, _: FrameType | None) -> None:
    sys.exit(128 + signum)


def _command(asked: argparse.Namespace, words: list[str]) -> int:
    if asked.command == "up":
        with guarded(_asked_lab(asked), keep=True) as lab:
            print(f"lab {lab.name}: {lab.nodes} nodes, node0 to node{lab.nodes - 1}")
    elif asked.command == "down":
        down(asked.name)
    elif asked.command == "list":
        print("\n".join(names()))
    elif asked.command == "on":
        lab = found(asked.name)
        command = [*lab.within(asked.node), *filled_in(lab, asked.node, words)]
        os.execvp(command[0], command)
    else:
        try:
            return max(run_on_all(found(asked.name), words), key=abs)
        except KeyboardInterrupt:  # all have ended of it
            return 130
    return 0


def _asked_lab(asked: argparse.Namespace) -> Lab:
    nodes, _, devices = asked.shape.partition("x")
    if not nodes.isdecimal() or not (devices or "1").isdecimal():
        raise LabError(f"{asked.shape!r} is no shape: write 4x1, nodes x devices of each")
    return Lab(
        name=asked.name,
        nodes=int(nodes),
        devices=int(devices or 1),
        bandwidth=asked.bandwidth,
        delay=asked.delay,
        cores=asked.cores,
        slow_links=_by_node(asked.slow_link, str),
        slow_nodes=_by_node(asked.slow_node, float),
    )


def _by_node(words: list[str], kind: type[T]) -> dict[int, T]:
    """['1=50mbit'] -> {1: '50mbit'}."""
    try:
        return {int(node): kind(value) for node, _, value in (word.partition("=") for word in words)}
    except ValueError:
        raise LabError(f"{' '.join(words)!r} is not NODE=VALUE") from None


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    place = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    mine, words = sys.argv[1:place], sys.argv[place + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    every = {name: commands.add_parser(name) for name in ("up", "down", "run", "on", "list")}
    for one in every.values():
        one.add_argument("--name", default="lab")
    every["up"].add_argument("shape", help="nodes x devices: 4x1")
    every["up"].add_argument("--bandwidth", default="", help="of every node's link, both ways: 200mbit")
    every["up"].add_argument("--delay", default="", help="of every packet: 1ms; needs a kernel with netem")
    every["up"].add_argument("--cores", type=float, default=0.0, metavar="CORES", help="that every node may use")
    every["up"].add_argument("--slow-link", action="append", default=[], metavar="NODE=RATE")
    every["up"].add_argument("--slow-node", action="append", default=[], metavar="NODE=CORES")
    every["on"].add_argument("node", type=int)
    asked = parser.parse_args(mine)
    if asked.command in ("run", "on") and not words:
        parser.error("name the command after --")
    return asked, words


if __name__ == "__main__":
    sys.exit(main())
