"""`evenly doctor`: prints what was found on this machine, or on all nodes of a run, in words or as JSON."""

from __future__ import annotations

import json
import socket
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from evenly.cli.on_nodes import NodePlace
from evenly.cli.tables import print_wrapped
from evenly.comm.doctor import Finding, examine, finding, operations_found
from evenly.comm.doctor_nodes import NodesFound, examine_node, facts_here, judge_nodes, try_everywhere
from evenly.errors import EvenlyError, UserError
from evenly.launcher.agent import Launch, start_ranks, warm_up
from evenly.launcher.environment import find_here, process_environment, run_secret
from evenly.launcher.interfaces import is_loopback, resolved_address, socket_interface
from evenly.launcher.nodes import NodeRun, read_rendezvous
from evenly.launcher.part import NodePart
from evenly.launcher.rounds import Limits, Member, NodeRange, Report, Round
from evenly.launcher.signals import StopRequest
from evenly.launcher.watch import Orders

INDENT = " " * 10
SIGNS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}
COME_LIMIT_S = 30.0  # for all nodes to come; those that have not are named


def doctor(
    *,
    world: int | None,
    json_only: bool,
    place: NodePlace = NodePlace(),  # noqa: B008  (frozen)
    out: Path | None = None,
) -> int:
    """Examines this machine, or all nodes; returns 1 if something would keep a run from working, else 0.

    out: a folder that all nodes are to share; the working folder where it is None.
    """
    place = _placed(place)
    alone = place.nodes == 1
    findings = examine(process_environment(), world=world) if alone else _on_nodes(place, out or Path.cwd())
    if json_only:
        print(json.dumps({"findings": [asdict(one) for one in findings]}))
    else:
        _print(findings)
    return 1 if any(one.verdict == "problem" for one in findings) else 0


def _placed(place: NodePlace) -> NodePlace:
    """Under a launcher that starts every rank, the node of the first of each; the others have nothing to do."""
    found = place.under_launcher()
    if found is not None:
        return found
    here = find_here()
    if here.local_rank:
        raise SystemExit(0)
    return NodePlace(here.nodes, here.node, f"{here.address}:{here.port}", place.secret_file)


def _print(findings: Sequence[Finding]) -> None:
    for one in findings:
        print_wrapped(f"{SIGNS[one.verdict]:8}  {one.name}: {one.value}", further=INDENT)
        if one.advice:
            print_wrapped(f"{INDENT}{one.advice}", further="")


# ---------------------------------------------------------------------------------------------------- several nodes
def _on_nodes(place: NodePlace, folder: Path) -> list[Finding]:
    """What all nodes have found together; on other nodes than the first, what keeps this one from the others."""
    from evenly.launcher.rendezvous import NodeStore

    warm_up(["evenly.comm.doctor_nodes"])
    findings = examine(process_environment(), probe=False)
    secret = run_secret(place.secret_file)
    host, port = read_rendezvous(place.rendezvous, secret)
    if (wrong := _wrong_way(place, host)) is not None:
        return [wrong]
    store = NodeStore(place.nodes, place.node, host, port, secret, limit_s=2 * COME_LIMIT_S)
    with _mark(folder, store.token) if place.node == 0 else _nothing() as mark:
        examined = _Examined(place, (host, port), folder, store, findings)
        run = NodeRun(
            store=store,
            me=Member(place.node, store.token, socket.gethostname(), 1),
            nodes=NodeRange(1, place.nodes),
            start=examined.start,
            first=Round(0, (), mark=mark),
            limits=Limits(join_s=COME_LIMIT_S, last_call_s=COME_LIMIT_S),
        )
        try:
            outcome = run.run()
        except EvenlyError as failed:
            return [*examined.judged, _as_finding(place, failed.asked, failed.found, failed.do)]
    return examined.all(outcome)


def _wrong_way(place: NodePlace, host: str) -> Finding | None:
    resolved = resolved_address(host)
    if place.node == 0 or is_loopback(host) or not resolved or not is_loopback(resolved):
        return None
    value = f"{host} is {resolved} here, which is this machine itself, and node 0 is another"
    do = f"correct {host} in /etc/hosts, or give node 0's address in --rendezvous"
    return finding(f"node {place.node} ({socket.gethostname()}), rendezvous", value, problem=do)


def _as_finding(place: NodePlace, asked: str, found: str, do: str) -> Finding:
    name = f"node {place.node} ({socket.gethostname()})"
    return finding(name, f"{asked}: {found}", problem=do or "no run can work before this does")


@contextmanager
def _mark(folder: Path, token: str) -> Generator[str]:
    mark = folder / f".doctor-{token}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as problem:
        raise UserError(f"write into {folder}", str(problem), "name a folder that can be written: --out") from None
    try:
        yield mark.name
    finally:
        mark.unlink(missing_ok=True)


@contextmanager
def _nothing() -> Generator[str]:
    yield ""


@dataclass
class _Examined:
    """The examination of this node with the others, as a round of their launchers.

    judged: what was found of all nodes, once it was.
    """

    place: NodePlace
    rendezvous: tuple[str, int]
    folder: Path
    store: Any
    findings: Sequence[Finding]
    judged: list[Finding] = field(default_factory=list[Finding])

    def start(self, found: Round, stop: StopRequest, orders: Orders) -> bool:
        """Takes part in the examination, and tries every operation where nothing is in the way."""
        facts, listener = facts_here(self.place.node, self.rendezvous, self.folder, found.mark, self.findings)
        try:
            client = self.store.client()
            members = [member.node for member in found.members]
            everything: NodesFound = examine_node(client, facts, members, self.place.nodes)
        finally:
            if listener is not None:
                listener.close()
        self.judged = judge_nodes(everything)
        if not any(one.verdict == "problem" for one in self.judged) and len(members) > 1:
            interface = socket_interface(*self.rendezvous)
            part = found.part(self.store.token, port=self.store.local_port, interface=interface)
            self._try(part, stop, orders)
        return False

    def _try(self, part: NodePart, stop: StopRequest, orders: Orders) -> None:
        launch = Launch(devices=1, node=self.place.node, part=part, stop=stop, orders=orders)
        [results] = start_ranks(try_everywhere, (), launch).values()
        self.judged += operations_found(results)

    def all(self, outcome: Report) -> list[Finding]:
        """On node 0 what was found of all nodes; on the others that they have taken part, or why not."""
        if outcome.how == "failed":
            return [*self.judged, _as_finding(self.place, outcome.asked, outcome.found, outcome.do)]
        if self.place.node == 0:
            return self.judged
        bad = sum(one.verdict == "problem" for one in self.judged)
        value = f"examined with the others: {bad} problems, which node 0 shows"
        return [finding(f"node {self.place.node}", value, problem="see what node 0 says" if bad else "")]
