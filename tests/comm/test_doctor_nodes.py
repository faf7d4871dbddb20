"""What the doctor says of several nodes: each fault with the node's name, and what nodes exchange to find it."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from evenly.cli import doctor as command
from evenly.cli.on_nodes import NodePlace
from evenly.comm import doctor_nodes
from evenly.comm.doctor import Finding
from evenly.comm.doctor_nodes import (
    NodeFacts,
    NodesFound,
    examine_node,
    facts_here,
    judge_nodes,
    versions_here,
    why_unreached,
)
from evenly.errors import RunError
from evenly.launcher.rendezvous import listen, serve_store

VERSIONS = {"python": "3.11.7", "evenly": "0.1.0", "torch": "2.13.0"}


def node(number: int, **facts: object) -> NodeFacts:
    usual = NodeFacts(
        node=number, host=f"h{number}", versions=VERSIONS, devices="1 x cpu", name_is=f"10.0.0.{number}",
        interface="eth0", address=f"10.0.0.{number}", port=1000 + number, folder="/runs",
    )  # fmt: skip
    return replace(usual, **facts)  # pyright: ignore[reportArgumentType]


def judged(*facts: NodeFacts, **others: object) -> list[Finding]:
    found = NodesFound(nodes=len(facts), facts=facts)
    return judge_nodes(replace(found, **others))  # pyright: ignore[reportArgumentType]


def wrong(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(one.verdict, one.name, one.value) for one in findings if one.verdict != "ok"]


def test_nodes_that_are_alike_are_well() -> None:
    findings = judged(node(0), node(1), clocks={0: 100.0, 1: 100.4})
    assert wrong(findings) == []
    said = {one.name: one.value for one in findings}
    assert said["nodes"] == "2 of 2 have come: node 0 (h0), node 1 (h1)" and said["torch"] == "2.13.0 on all nodes"
    assert said["clocks"] == "within 0.40 s" and said["folder"] == "/runs is seen and written by all nodes"
    assert said["reach"].startswith("each node reaches every other")


@pytest.mark.parametrize(
    ("facts", "others", "verdict", "words"),
    [
        ({"versions": {**VERSIONS, "torch": "2.12.0"}}, {}, "problem", "2.13.0 on node 0 (h0); 2.12.0 on node 1 (h1)"),
        ({"versions": {**VERSIONS, "numpy": "2.4"}}, {}, "note", "missing on node 0 (h0); 2.4 on node 1 (h1)"),
        ({"devices": "8 x H100-80"}, {}, "note", "1 x cpu on node 0 (h0); 8 x H100-80 on node 1 (h1)"),
        ({"cannot_listen": "no way", "address": "", "port": 0}, {}, "problem", "no way"),
        ({"interface": "lo", "address": "127.0.0.1"}, {}, "problem", "at lo 127.0.0.1: no other node gets there"),
        ({"sees_folder": False}, {}, "problem", "does not see in /runs what node 0 has written there"),
        ({}, {"nodes": 3}, "problem", "has not come"),
        ({}, {"clocks": {0: 5.0, 1: 2.5}}, "note", "node 1 (h1) by -2.5 s"),
        (
            {"interface": "docker0", "address": "172.17.0.1"},
            {"unreached": {(0, 1): "no answer within 5 s"}},
            "problem",
            "node 0 (h0) does not reach node 1 (h1) at 172.17.0.1 (docker0): no answer within 5 s",
        ),
        ({"findings": [Finding("disk", "full", "note", "make room")]}, {}, "note", "full"),
    ],
)
def test_each_fault_is_said_with_the_node(
    facts: dict[str, object], others: dict[str, object], verdict: str, words: str
) -> None:
    [(found, name, value)] = wrong(judged(node(0), node(1, **facts), **others))
    assert found == verdict and words in value and ("1" in name + value or "2" in name)


def test_a_name_that_is_loopback_s_is_no_fault() -> None:
    findings = judged(node(0, name_is="127.0.1.1"), node(1))
    assert wrong(findings) == []
    assert "h0 is 127.0.1.1 there, which is loopback; its ranks listen at eth0 10.0.0.0" in str(findings)


def test_what_is_not_reached_is_said_once() -> None:
    found = judged(node(0), node(1, address="127.0.0.1", interface="lo"), unreached={(0, 1): "Connection refused"})
    assert len(wrong(found)) == 1
    [refused] = [one for one in judged(node(0), node(1), unreached={(1, 0): "Connection refused"}) if one.advice]
    assert "firewall" in refused.advice and "node 1 (h1) does not reach node 0 (h0)" in refused.value


def test_nodes_exchange_what_they_find(tmp_path: Path) -> None:
    """Three nodes in threads, all on loopback; the port of one is closed before others try it."""
    store, port = serve_store()
    (tmp_path / "mark").touch()
    found: dict[int, NodesFound] = {}

    def one(number: int) -> None:
        facts, listener = facts_here(number, ("127.0.0.1", 1), tmp_path, "mark", [])
        assert listener is not None and facts.address == "127.0.0.1" and facts.sees_folder
        if number == 2:
            listener.close()
        found[number] = examine_node(TCPStore("127.0.0.1", port, is_master=False), facts, [0, 1, 2], 3)
        listener.close()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found[0].unreached == {(0, 2): "Connection refused", (1, 2): "Connection refused"}
    assert found[0].facts == found[1].facts == found[2].facts
    assert [one.versions for one in found[0].facts] == [versions_here()] * 3
    assert max(found[1].clocks.values()) - min(found[1].clocks.values()) < 1.0
    del store


def test_a_node_that_falls_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store, port = serve_store()
    monkeypatch.setattr(doctor_nodes, "EXCHANGE_LIMIT_S", 0.2)
    with pytest.raises(RunError, match="the facts of node 1 did not come"):
        examine_node(TCPStore("127.0.0.1", port, is_master=False), node(0), [0, 1], 2)
    del store


def test_a_folder_without_the_mark_is_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_nodes, "SEEN_LIMIT_S", 0.1)
    facts, listener = facts_here(1, ("127.0.0.1", 1), tmp_path, "mark", [Finding("a", "ok"), Finding("b", "x", "note")])
    assert listener is not None and not facts.sees_folder and [one.name for one in facts.findings] == ["b"]
    assert NodeFacts.from_text(facts.to_text()) == facts
    listener.close()


def test_an_interface_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mark").touch()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    facts, listener = facts_here(1, ("127.0.0.1", 1), tmp_path, "mark", [])
    assert listener is None and "ib7" in facts.cannot_listen and facts.port == 0


def test_reaching() -> None:
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    assert why_unreached("127.0.0.1", port) == ""
    listener.close()
    assert why_unreached("127.0.0.1", port) == "Connection refused"


def test_a_node_on_which_node_0_s_name_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "resolved_address", lambda host: "127.0.0.1")
    assert (
        command._wrong_way(NodePlace(2, 0), "node0") is None
        and command._wrong_way(NodePlace(2, 1), "localhost") is None
    )
    found = command._wrong_way(NodePlace(2, 1), "node0")
    assert found is not None and "node0 is 127.0.0.1 here, which is this machine itself" in found.value
