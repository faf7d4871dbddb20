"""A function on the ranks of one node or several, for commands that measure: `evenly bench`, `evenly doctor`.

Ranks are started here; or, under srun, mpirun and torchrun, this process is one of them, or starts those of its node.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evenly.errors import RunError, UserError
from evenly.launcher.agent import Launch, start_ranks
from evenly.launcher.environment import find_here, import_quiet_torch, run_secret
from evenly.launcher.interfaces import socket_interface
from evenly.launcher.nodes import NodeRun, failure_of, read_rendezvous
from evenly.launcher.rounds import Member, NodeRange, Report, Round
from evenly.launcher.signals import StopRequest
from evenly.launcher.watch import Orders


@dataclass(frozen=True)
class NodePlace:
    """Which node of how many this is, and where they meet; as the command line has it."""

    nodes: int = 1
    node: int = 0
    rendezvous: str = ""
    secret_file: Path | None = None

    def under_launcher(self) -> NodePlace | None:
        """The same where a launcher has started one task on each node; None where this process is a rank of its.

        Raises `UserError` where the launcher has started another number of nodes.
        """
        place = find_here()
        if place.size == 1 or self.rendezvous:
            return self
        if self.nodes not in (1, place.nodes):
            raise UserError(f"--nodes {self.nodes}", f"{place.launcher} has started {place.nodes}", "ask for as many")
        if place.local_size > 1:
            return None
        return replace(self, nodes=place.nodes, node=place.node, rendezvous=f"{place.address}:{place.port}")


def run_everywhere(fn: Callable[..., Any], args: Sequence[Any], launch: Launch, place: NodePlace) -> Any:
    """What `fn(*args)` returns on the first rank of all; None on other nodes and ranks.

    Raises `UserError`, `RunError` and `FailedRank`, on all nodes alike.
    """
    found = place.under_launcher()
    if found is None:
        result = fn(*args)
        return result if find_here().rank == 0 else None
    results = start_ranks(fn, args, launch) if found.nodes == 1 else _on_nodes(fn, args, launch, found)
    return results.get(0)


def _on_nodes(fn: Callable[..., Any], args: Sequence[Any], launch: Launch, place: NodePlace) -> dict[int, Any]:
    """Results of the ranks of this node, by global rank, once all nodes have met."""
    import_quiet_torch()
    from evenly.launcher.rendezvous import NodeStore

    secret = run_secret(place.secret_file)
    host, port = read_rendezvous(place.rendezvous, secret)
    store = NodeStore(place.nodes, place.node, host, port, secret)
    interface = socket_interface(host, port)
    results: dict[int, Any] = {}

    def start(found: Round, stop: StopRequest, orders: Orders) -> bool:
        part = found.part(store.token, port=store.local_port, interface=interface)
        results.update(start_ranks(fn, args, replace(launch, node=place.node, part=part, stop=stop, orders=orders)))
        return False

    me = Member(place.node, store.token, socket.gethostname(), launch.devices)
    _check(NodeRun(store=store, me=me, nodes=NodeRange(place.nodes, place.nodes), start=start).run())
    return results


def _check(outcome: Report) -> None:
    if outcome.how == "failed":
        raise failure_of(outcome)
    if outcome.how != "done":
        raise RunError("measure on all nodes", "another node was stopped", "start it again on every node")
