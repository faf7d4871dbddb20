"""The doctor on several nodes: what each says of itself, who reaches whom, and what would keep a run from working.

Launchers exchange this in the store of their run (`examine_node`), in keys of their own; `judge_nodes` is pure.

    facts K      what node K says of itself, among it where it listens, as its ranks would
    unreached K  the nodes that K has not reached there, and why
    ready K      K waits for `now`, which node 0 sets, to read its clock; then clock K
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenly.comm.collectives import gather_values
from evenly.comm.connect import connect, disconnect
from evenly.comm.doctor import Finding, Outcome, finding, try_in
from evenly.errors import RunError, UserError
from evenly.hardware.cluster_text import kind_here, local_devices
from evenly.launcher.environment import find_here, gloo_interface
from evenly.launcher.interfaces import addresses, is_loopback, resolved_address, socket_interface, words
from evenly.launcher.rendezvous import listen

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from evenly.comm.groups import Group

EXCHANGE_LIMIT_S = 60.0
REACH_LIMIT_S = 5.0
SEEN_LIMIT_S = 10.0  # for a file of one node to be seen on another
SKEW_S = 1.0  # by which clocks may differ
BETWEEN_LOOKS_S = 0.05
# Where these differ, ranks may compute or pickle otherwise; where the others do, perhaps.
NEEDED_ALIKE = ("python", "evenly", "torch")
BETTER_ALIKE = ("numpy", "safetensors", "transformers")


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """What a node says of itself.

    name_is: the address that its own name has here, '' for none. interface, address, port: where its ranks would
    listen; port 0 where they cannot, for the reason `cannot_listen`. sees_folder: whether it sees in `folder` what node
    0 has written there, and may write. findings: of this machine alone, other than those that are well.
    """

    node: int
    host: str
    versions: dict[str, str] = field(default_factory=dict[str, str])
    devices: str = ""
    name_is: str = ""
    interface: str = ""
    address: str = ""
    port: int = 0
    cannot_listen: str = ""
    folder: str = ""
    sees_folder: bool = True
    findings: list[Finding] = field(default_factory=list[Finding])

    def __str__(self) -> str:
        return f"node {self.node} ({self.host})"

    def to_text(self) -> str:
        """JSON; `from_text` is its inverse."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> NodeFacts:
        """Inverse of `to_text`."""
        values: dict[str, Any] = json.loads(text)
        values["findings"] = [Finding(**one) for one in values["findings"]]
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class NodesFound:
    """All that was found of the nodes of a run.

    nodes: that there should be. facts: of those that have come. unreached: (from, to) -> why. clocks: of a node, s.
    """

    nodes: int
    facts: Sequence[NodeFacts]
    unreached: Mapping[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])
    clocks: Mapping[int, float] = field(default_factory=dict[int, float])


# ------------------------------------------------------------------------------------------------------- judging
def judge_nodes(all_found: NodesFound) -> list[Finding]:
    facts = all_found.facts
    judged = [
        *_missing(all_found),
        *(one for name in (*NEEDED_ALIKE, *BETTER_ALIKE) for one in _versions(name, facts)),
        *_device_kinds(facts),
        *_names(facts),
        *_reached(all_found),
        *_clocks(all_found),
        *_folders(facts),
    ]
    theirs = [
        Finding(f"{one}, {own.name}", own.value, own.verdict, own.advice) for one in facts for own in one.findings
    ]
    return [*judged, *theirs]


def _missing(all_found: NodesFound) -> Iterator[Finding]:
    come = {one.node for one in all_found.facts}
    yield finding("nodes", f"{len(come)} of {all_found.nodes} have come: {', '.join(map(str, all_found.facts))}")
    for node in sorted({*range(all_found.nodes)} - come):
        problem = "start `evenly doctor` there too, with this rendezvous and secret; what it says there is why"
        yield finding(f"node {node}", "has not come", problem=problem)


def _versions(name: str, facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    by_version: dict[str, list[str]] = {}
    for one in facts:
        by_version.setdefault(one.versions.get(name, "missing"), []).append(str(one))
    if by_version.keys() == {"missing"}:
        return
    value = "; ".join(f"{number} on {', '.join(nodes)}" for number, nodes in by_version.items())
    if len(by_version) == 1:
        yield finding(name, f"{next(iter(by_version))} on all nodes")
    elif name in NEEDED_ALIKE:
        yield finding(name, value, problem="ranks have to run the same: install one version on all nodes")
    else:
        yield finding(name, value, note="what differs here may compute otherwise: install one version on all nodes")


def _device_kinds(facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    kinds = {one.devices for one in facts}
    if len(kinds) == 1:
        yield finding("devices of a node", kinds.pop())
        return
    note = "a run waits for the slowest; give --devices where numbers differ"
    yield finding("devices of a node", "; ".join(f"{one.devices} on {one}" for one in facts), note=note)


def _names(facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    for one in facts:
        where = f"{one.interface} {one.address}"
        if one.cannot_listen:
            do = "set GLOO_SOCKET_IFNAME there to the interface that leads to the other nodes"
            yield finding(f"{one}, interface", one.cannot_listen, problem=do)
        elif is_loopback(one.address) and len(facts) > 1:
            do = "name an interface that leads to the other nodes in GLOO_SOCKET_IFNAME, or unset it"
            yield finding(
                f"{one}, interface", f"its ranks would listen at {where}: no other node gets there", problem=do
            )
        elif is_loopback(one.name_is):
            value = f"{one.host} is {one.name_is} there, which is loopback; its ranks listen at {where}"
            yield finding(f"{one}, name", value)
        else:
            yield finding(f"{one}, name", f"{one.host} is {one.name_is or 'not known'}; its ranks listen at {where}")


def _reached(all_found: NodesFound) -> Iterator[Finding]:
    names = {one.node: one for one in all_found.facts}
    for (source, to), why in sorted(all_found.unreached.items()):
        there = names[to]
        if there.cannot_listen or is_loopback(there.address):
            continue  # said already
        value = f"{names[source]} does not reach {there} at {there.address} ({there.interface}): {why}"
        yield finding("reach", value, problem=_what_to_do(why, there))
    pairs = len(names) * (len(names) - 1)
    if pairs and not all_found.unreached:
        yield finding("reach", f"each node reaches every other, at a port that it chose ({pairs} ways)")


def _what_to_do(why: str, there: NodeFacts) -> str:
    if "refused" in why:
        return f"a firewall refuses it, or {there.address} is another machine's too: open all TCP ports between nodes"
    interface = f"if {there.interface} does not lead to the other nodes, set GLOO_SOCKET_IFNAME on {there}"
    return f"open all TCP ports between nodes; {interface} to the one that does"


def _clocks(all_found: NodesFound) -> Iterator[Finding]:
    if not all_found.clocks:
        return
    names = {one.node: str(one) for one in all_found.facts}
    first = all_found.clocks.get(0, min(all_found.clocks.values()))
    ahead = {node: clock - first for node, clock in all_found.clocks.items()}
    off = [f"{names[node]} by {by:+.1f} s" for node, by in ahead.items() if abs(by) > SKEW_S]
    note = "times in logs and checkpoints do not compare: have all nodes follow one clock (chrony, ntpd)"
    value = f"differ from node 0's: {', '.join(off)}" if off else f"within {max(map(abs, ahead.values())):.2f} s"
    yield finding("clocks", value, note=note if off else "")


def _folders(facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    blind = [one for one in facts if not one.sees_folder]
    for one in blind:
        value = f"does not see in {one.folder} what node 0 has written there, or cannot write"
        yield finding(f"{one}, folder", value, problem="name a folder on storage that all nodes see (--out)")
    if facts and not blind:
        yield finding("folder", f"{facts[0].folder} is seen and written by all nodes")


# ------------------------------------------------------------------------------------------------------ gathering
def versions_here() -> dict[str, str]:
    """Of Python and of packages, by name; those that are installed."""
    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"}
    for name in (*NEEDED_ALIKE[1:], *BETTER_ALIKE):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def facts_here(
    node: int, rendezvous: tuple[str, int], folder: Path, mark: str, findings: Sequence[Finding]
) -> tuple[NodeFacts, socket.socket | None]:
    """What this node says of itself, and the socket at which it listens; mark: a file of node 0's in `folder`."""
    interface, address, listener, problem = "", "", None, ""
    try:
        interface = gloo_interface() or socket_interface(*rendezvous)
        if interface not in addresses():
            raise UserError(
                "listen", f"GLOO_SOCKET_IFNAME is {interface}, and no interface of that name has an address"
            )
        address = addresses()[interface]
        listener = listen(address)
    except (UserError, OSError) as found:
        problem = found.found if isinstance(found, UserError) else f"cannot listen at {address}: {words(found)}"
    facts = NodeFacts(
        node=node,
        host=socket.gethostname(),
        versions=versions_here(),
        devices=f"{local_devices()} x {kind_here()}",
        name_is=resolved_address(socket.gethostname()),
        interface=interface,
        address=address,
        port=0 if listener is None else listener.getsockname()[1],
        cannot_listen=problem,
        folder=str(folder.resolve()),
        sees_folder=_sees(folder, mark),
        findings=[one for one in findings if one.verdict != "ok"],
    )
    return facts, listener


def _sees(folder: Path, mark: str) -> bool:
    until_s = time.monotonic() + SEEN_LIMIT_S
    while time.monotonic() < until_s:
        with suppress(OSError):
            list(folder.iterdir())  # has a distant file system look again
            if (folder / mark).exists():
                (folder / f"{mark}-{socket.gethostname()}").touch()
                (folder / f"{mark}-{socket.gethostname()}").unlink()
                return True
        time.sleep(BETWEEN_LOOKS_S)
    return False


def why_unreached(address: str, port: int) -> str:
    """'' where something listens there and answers; else why not."""
    try:
        socket.create_connection((address, port), REACH_LIMIT_S).close()
    except TimeoutError:
        return f"no answer within {REACH_LIMIT_S:.0f} s"
    except OSError as problem:
        return words(problem)
    return ""


def examine_node(store: TCPStore, facts: NodeFacts, members: Sequence[int], nodes: int) -> NodesFound:
    """What all nodes have found; every one of `members` calls it, and gets the same."""
    others = [node for node in members if node != facts.node]
    store.set(f"facts {facts.node}", facts.to_text())
    every = [NodeFacts.from_text(_read(store, f"facts {node}")) for node in members]
    there = {one.node: one for one in every if one.port and one.node in others}
    reasons = {node: why_unreached(one.address, one.port) for node, one in there.items()}
    store.set(f"unreached {facts.node}", json.dumps({node: why for node, why in reasons.items() if why}))
    unreached = {
        (node, int(to)): why for node in members for to, why in json.loads(_read(store, f"unreached {node}")).items()
    }
    store.set(f"ready {facts.node}", "")
    if facts.node == min(members):
        for node in members:
            _read(store, f"ready {node}")
        store.set("now", "")
    _read(store, "now")
    store.set(f"clock {facts.node}", repr(time.time()))
    clocks = {node: float(_read(store, f"clock {node}")) for node in members}
    return NodesFound(nodes=nodes, facts=every, unreached=unreached, clocks=clocks)


def try_everywhere() -> dict[int, dict[str, Outcome]]:
    """Runs every operation once between the ranks of all nodes: what came of it, by rank; every rank calls it."""
    world = connect(find_here())
    try:
        group: Group = world.group("data")
        return dict(enumerate(gather_values(try_in(group), group)))
    finally:
        disconnect(world)


def _read(store: TCPStore, key: str) -> bytes:
    """The value of `key`, once another node has set it. Raises `RunError` where none does."""
    until_s = time.monotonic() + EXCHANGE_LIMIT_S
    while not store.check([key]):
        if time.monotonic() > until_s:
            found = f"the {key.split()[0]} of node {key.split()[-1]} did not come within {EXCHANGE_LIMIT_S:.0f} s"
            raise RunError("examine the nodes", found, "look at what `evenly doctor` says there")
        time.sleep(BETWEEN_LOOKS_S)
    return store.get(key)
