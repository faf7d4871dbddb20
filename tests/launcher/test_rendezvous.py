"""Launchers of several nodes find each other, strangers stay out, and nothing listens where nobody has to come from."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psutil
import pytest
from kept_ranks import free_port
from torch.distributed import DistError

from evenly.errors import UserError
from evenly.launcher import interfaces, rendezvous
from evenly.launcher.agent import launch
from evenly.launcher.environment import LOOPBACK_INTERFACE, run_secret
from evenly.launcher.interfaces import is_loopback, local_address, reachable_host, socket_interface
from evenly.launcher.nodes import NodeRun, read_rendezvous
from evenly.launcher.rendezvous import NAME, NONCE, NodeStore, Relay, listen
from evenly.launcher.rounds import Limits, Member, NodeRange

LOOPBACKS = {"127.0.0.1", "::1"}
NAMED = b"n" * NAME


def store(node: int, port: int, secret: bytes = b"of the run", limit_s: float = 60.0) -> NodeStore:
    return NodeStore(3, node, "127.0.0.1", port, secret, limit_s=limit_s)


# ---------------------------------------------------------------------------------------------------------- nodes
def test_three_nodes_share_one_store_and_node_0_sees_who_is_there() -> None:
    port = free_port()
    stores = [store(node, port) for node in range(3)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(NodeStore.open, stores))
    clients = [one.client() for one in stores]
    clients[2].set("said by", "node 2")
    assert [client.get("said by") for client in clients] == [b"node 2"] * 3
    clients[1].set("large", "x" * 1_000_000)
    assert len(clients[2].get("large")) == 1_000_000
    assert set(stores[0].there()) == {stores[1].token, stores[2].token}
    stores[1].close()
    until = time.monotonic() + 60
    while stores[0].there() != [stores[2].token]:
        assert time.monotonic() < until
        time.sleep(0.01)
    stores[0].close()
    with pytest.raises(DistError):
        while time.monotonic() < until:
            clients[2].check(["said by"])
    stores[2].close()


def test_a_node_that_does_not_come_is_named_on_those_that_did() -> None:
    port = free_port()
    limits = Limits(join_s=4.0)
    runs = [
        NodeRun(
            NodeStore(4, node, "127.0.0.1", port, b"of the run"), Member(node, "", "", 1), NodeRange(4, 4), never,
            limits=limits,
        )
        for node in (2, 0)
    ]  # fmt: skip
    runs = [replace(run, me=replace(run.me, token=run.store.token)) for run in runs]
    with ThreadPoolExecutor() as pool:
        for found in pool.map(NodeRun.run, runs):
            assert found.found == "nodes 1, 3 did not come within 4 s"


def never(*_: object) -> bool:
    raise AssertionError("no round begins")


def test_a_node_waits_for_node_0_no_longer_than_its_limit() -> None:
    port, began = free_port(), time.monotonic()
    with pytest.raises(UserError, match=r"node 0 did not answer node 1 within 1 s \(.*refused"):
        store(1, port, limit_s=1.0).open()
    assert time.monotonic() - began < 20


def test_another_secret_is_refused_at_once() -> None:
    port = free_port()
    first = store(0, port)
    first.open()
    with pytest.raises(UserError, match="has another secret than node 1"):
        store(1, port, b"of another run").open()
    assert first.there() == []
    first.close()


def test_a_port_that_is_taken_is_named() -> None:
    with listen("127.0.0.1") as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is taken on this machine"):
            store(0, port).open()


# ------------------------------------------------------------------------------------------------------ strangers
@pytest.fixture
def door() -> Iterator[tuple[int, list[bytes]]]:
    """The port of a door, and what comes through it."""
    inner, outer, heard = listen("127.0.0.1"), listen("127.0.0.1"), list[bytes]()

    def hear() -> None:
        while True:
            try:
                with inner.accept()[0] as connection:
                    heard.append(connection.recv(100))
            except OSError:
                return

    async def onward() -> Any:
        return await asyncio.open_connection(*inner.getsockname())

    threading.Thread(target=hear, daemon=True).start()
    port = outer.getsockname()[1]
    relay = Relay(outer, onward, lambda streams: rendezvous._let_in(streams, b"of the run"))
    yield port, heard
    relay.close()
    inner.close()


@pytest.mark.parametrize("said", [b"", b"x" * 10, b"x" * 80, b"\x00" * 1000, b"GET / HTTP/1.1\r\n\r\n" * 10])
def test_who_does_not_have_the_secret_reaches_nothing(said: bytes, door: tuple[int, list[bytes]]) -> None:
    port, heard = door
    with socket.create_connection(("127.0.0.1", port), timeout=60) as stranger:
        assert len(stranger.recv(1000)) == NONCE
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        try:
            assert stranger.recv(1000) == b""
        except ConnectionResetError:
            pass
    assert heard == []


def test_what_another_has_said_opens_no_second_time(door: tuple[int, list[bytes]]) -> None:
    port, heard = door

    async def enter() -> None:
        _, writer = await rendezvous._enter("127.0.0.1", port, b"of the run", NAMED)
        writer.write(b"hello")
        writer.close()
        await writer.wait_closed()

    said: list[bytes] = []
    token = rendezvous.secrets.token_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous.secrets, "token_bytes", lambda n: said.append(token(n)) or said[-1])
        asyncio.run(enter())
    of_door, of_tunnel = said
    until = time.monotonic() + 60
    while heard != [b"hello"]:
        assert time.monotonic() < until
        time.sleep(0.01)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as stranger:
        assert stranger.recv(NONCE) != of_door
        stranger.sendall(of_tunnel + NAMED + rendezvous._proof(b"of the run", "tunnel", of_door, of_tunnel + NAMED))
        assert stranger.recv(1000) == b""
    assert heard == [b"hello"]


def listening() -> list[tuple[str, int]]:
    """Where this rank and its launcher listen once ranks have talked."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    processes = [psutil.Process(), *psutil.Process().parents()[:2]]  # the fork server, and who started it
    found = [
        (address.laddr.ip, address.laddr.port)
        for process in processes
        for address in process.net_connections("tcp")
        if address.status == psutil.CONN_LISTEN
    ]
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_on_one_machine_everything_listens_on_loopback() -> None:
    for found in launch(listening, devices=2):
        assert len(found) >= 2  # the store's and gloo's
        assert {address for address, _ in found} <= LOOPBACKS, found


# ------------------------------------------------------------------------------------------------------ addresses
def test_several_nodes_need_a_secret_beyond_loopback() -> None:
    with pytest.raises(UserError, match="no secret"):
        read_rendezvous("node0:29500", b"")
    assert read_rendezvous("node0:29500", b"of the run") == ("node0", 29500)
    assert read_rendezvous("localhost:29500", b"") == ("localhost", 29500)
    for text in ("", "host", "host:", ":1", "host:99999", "host:0", "host:x"):
        with pytest.raises(UserError, match="is not host:port"):
            read_rendezvous(text, b"")


def test_a_name_that_resolves_to_loopback_stands_for_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = {"node0": "127.0.1.1", interfaces.ELSEWHERE: "10.0.0.7", "node1": "10.1.0.7", "localhost": "127.0.0.1"}
    monkeypatch.setattr(interfaces, "_route_from", lambda host, port: routes[host])
    assert local_address("node0", 29500) == "10.0.0.7"
    assert local_address("node1", 29500) == "10.1.0.7"
    assert local_address("localhost", 29500) == "127.0.0.1"
    reached = [reachable_host(host, 29500) for host in ("node0", "node1", "localhost")]
    assert reached == ["10.0.0.7", "node1", "127.0.0.1"]


def test_without_a_way_out_the_only_interface_counts_or_the_one_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def route(host: str, port: int) -> str:
        if host == interfaces.ELSEWHERE:
            raise UserError("reach it", "no way")
        return "127.0.1.1"

    there = {"eth0": "10.77.0.1", "docker0": "172.17.0.1"}
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(interfaces, "_route_from", route)
    monkeypatch.setattr(interfaces, "outward_addresses", lambda: there)
    assert local_address("node0", 29500) == "10.77.0.1"
    there["ib0"] = "10.78.0.1"
    with pytest.raises(UserError, match=r"several interfaces: eth0 10\.77\.0\.1, ib0 10\.78\.0\.1"):
        local_address("node0", 29500)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert local_address("node0", 29500) == "10.78.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    with pytest.raises(UserError, match="ib7, which has no address here"):
        local_address("node0", 29500)
    with pytest.raises(UserError, match="no interface but loopback"):
        interfaces.only_address({"veth5": "10.0.0.1"}, "find it")


def test_interfaces_follow_from_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert socket_interface("127.0.0.1", 29500) == LOOPBACK_INTERFACE
    assert is_loopback("localhost") and is_loopback("127.0.0.2") and is_loopback("::1") and not is_loopback("node0")
    monkeypatch.setattr(interfaces, "_route_from", lambda host, port: "203.0.113.9")
    with pytest.raises(UserError, match=r"no interface has the address 203\.0\.113\.9"):
        socket_interface("node1", 29500)


def test_a_host_that_cannot_be_found_is_named() -> None:
    with pytest.raises(UserError, match=r"reach nowhere\.invalid"):
        local_address("nowhere.invalid", 29500)


def test_the_secret_comes_from_a_file_or_the_environment(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENLY_SECRET", "from the scheduler")
    assert run_secret(None) == b"from the scheduler"
    (tmp_path / "secret").write_text("words\n")
    assert run_secret(tmp_path / "secret") == b"words"
    (tmp_path / "empty").write_text("\n")
    for name, problem in (("empty", "is empty"), ("missing", "No such file")):
        with pytest.raises(UserError, match=problem):
            run_secret(tmp_path / name)
