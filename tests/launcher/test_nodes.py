"""Launchers of several nodes go through rounds together: here their ranks are functions, and threads run them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from kept_ranks import free_port

from evenly.errors import RunError, UserError
from evenly.launcher import nodes
from evenly.launcher.agent import FailedRank
from evenly.launcher.nodes import NodeRun
from evenly.launcher.rendezvous import NodeStore
from evenly.launcher.rounds import Limits, Member, NodeRange, Report, Round
from evenly.launcher.signals import StopRequest
from evenly.launcher.watch import Orders

LIMIT_S = 60.0
Ranks = Callable[["Launchers", int, Round, StopRequest, Orders], bool]


@dataclass
class Launchers:
    """Launchers of one run, each in a thread; rounds: the nodes of each round that has begun."""

    ranks: Ranks
    range: NodeRange
    restarts: int = 0
    join_s: float = LIMIT_S
    port: int = field(default_factory=free_port)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8))
    stores: dict[int, NodeStore] = field(default_factory=dict[int, NodeStore])
    rounds: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    resumed: list[bool] = field(default_factory=list[bool])

    def start(self, node: int, secret: bytes = b"words") -> Future[Report]:
        store = self.stores[node] = NodeStore(self.range.most, node, "127.0.0.1", self.port, secret)

        def start(found: Round, stop: StopRequest, orders: Orders) -> bool:
            self.rounds[found.number] = [member.node for member in found.members]
            if node == 0:
                self.resumed.append(found.resume)
            return self.ranks(self, node, found, stop, orders)

        run = NodeRun(
            store, Member(node, store.token, f"host{node}", 1), self.range, start, restarts=self.restarts,
            newest_step=lambda: 4, limits=Limits(join_s=self.join_s, last_call_s=0.3, settle_s=0.3, end_s=2.0),
        )  # fmt: skip
        return self.pool.submit(run.run)


def until(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def ended(orders: Orders) -> bool:
    """Ranks that run until they are ended."""
    until(lambda: orders.end)
    raise FailedRank("rank 0 failed", "it was killed by SIGKILL", "", rank=0, kind="killed")


def test_all_ranks_that_return_end_the_run() -> None:
    launchers = Launchers(lambda *_: False, NodeRange(3, 3))
    assert [one.result(LIMIT_S).how for one in [launchers.start(node) for node in (2, 1, 0)]] == ["done"] * 3
    assert launchers.rounds == {0: [0, 1, 2]} and launchers.resumed == [False]


def test_a_failure_ends_the_ranks_of_all_nodes_in_its_own_words() -> None:
    def ranks(_: Launchers, node: int, __: Round, ___: StopRequest, orders: Orders) -> bool:
        if node == 1:
            raise FailedRank("rank 1 failed at step 3", "ValueError: no", "", rank=1, step=3, traceback="Traceback ...")
        return ended(orders)

    launchers = Launchers(ranks, NodeRange(3, 3))
    for one in [launchers.start(node) for node in range(3)]:
        found = one.result(LIMIT_S)
        assert (found.how, found.found, found.rank, found.exit_code) == ("failed", "ValueError: no", 1, 1)
        assert found.traceback == "Traceback ..."


def test_an_error_that_comes_again_ends_restarts() -> None:
    def ranks(_: Launchers, node: int, __: Round, ___: StopRequest, orders: Orders) -> bool:
        if node == 1:
            raise FailedRank("rank 1 failed at step 3", "ValueError: no", "", rank=1, step=3, traceback="Traceback ...")
        return ended(orders)

    launchers = Launchers(ranks, NodeRange(2, 2), restarts=9)
    for one in [launchers.start(node) for node in range(2)]:
        assert "the same error in the same step came before" in one.result(LIMIT_S).do
    assert launchers.rounds == {0: [0, 1], 1: [0, 1]} and launchers.resumed == [False, True]


def test_a_node_that_is_lost_is_left_out_and_taken_in_when_it_comes_back() -> None:
    def ranks(launchers: Launchers, node: int, found: Round, _: StopRequest, orders: Orders) -> bool:
        if found.number == 0 and node == 2:
            launchers.stores[2].close()  # as if its launcher were killed
            time.sleep(0.5)
            return False
        if found.number == 0:
            return ended(orders)
        until(lambda: orders.pause or orders.end or found.number == 2)
        return found.number == 1

    launchers = Launchers(ranks, NodeRange(2, 3))
    first = [launchers.start(node) for node in range(3)]
    with pytest.raises(RunError, match="node 0 is gone"):
        first[2].result(LIMIT_S)
    until(lambda: 1 in launchers.rounds)
    back = launchers.start(2)
    assert [one.result(LIMIT_S).how for one in (*first[:2], back)] == ["done"] * 3
    assert launchers.rounds == {0: [0, 1, 2], 1: [0, 1], 2: [0, 1, 2]} and launchers.resumed == [False, True, True]


def test_too_few_nodes_wait_for_others_no_longer_than_their_limit() -> None:
    def ranks(launchers: Launchers, node: int, _: Round, __: StopRequest, orders: Orders) -> bool:
        if node == 2:
            launchers.stores[2].close()
            return False
        return ended(orders)

    launchers = Launchers(ranks, NodeRange(3, 3), restarts=1, join_s=4.0)
    runs = [launchers.start(node) for node in (2, 1, 0)]
    for one in runs[1:]:
        assert one.result(LIMIT_S).found == "node 2 did not come within 4 s"


@pytest.mark.parametrize(("node", "signum"), [(0, 15), (1, 2)])
def test_a_stop_on_one_node_ends_the_run_on_all(node: int, signum: int) -> None:
    def ranks(_: Launchers, mine: int, __: Round, stop: StopRequest, orders: Orders) -> bool:
        if mine == node:
            stop.ask(signum)
        time.sleep(0.5)
        return not orders.end

    launchers = Launchers(ranks, NodeRange(2, 3), restarts=9)
    for one in [launchers.start(number) for number in range(3)]:
        found = one.result(LIMIT_S)
        assert (found.how, found.signum) == ("stopped", signum)
    assert [*launchers.rounds] == [0]


@pytest.mark.parametrize("fails", [False, True])
def test_a_node_that_is_taken_away_leaves_a_run_that_may_have_fewer(fails: bool) -> None:
    def ranks(_: Launchers, mine: int, found: Round, stop: StopRequest, __: Orders) -> bool:
        if mine == 1 and not found.number:
            stop.ask(15)
            if fails:
                raise FailedRank("rank 1 failed", "it was killed", "", rank=1, kind="killed")
        return not found.number  # all ranks stop with one of them

    launchers = Launchers(ranks, NodeRange(2, 3))
    outcomes = [one.result(LIMIT_S) for one in [launchers.start(number) for number in range(3)]]
    assert [(one.how, one.signum) for one in outcomes] == [("done", 0), ("left", 15), ("done", 0)]


def test_where_node_0_is_gone_the_others_end_their_ranks_and_say_so() -> None:
    def ranks(launchers: Launchers, node: int, _: Round, __: StopRequest, orders: Orders) -> bool:
        if node == 0 and (door := launchers.stores[0]._relay) is not None:
            door.close()
        return ended(orders)

    launchers = Launchers(ranks, NodeRange(2, 2))
    second, first = (launchers.start(node) for node in (1, 0))
    with pytest.raises(RunError, match="node 0 is gone, and the run with it"):
        second.result(LIMIT_S)
    assert first.result(LIMIT_S).asked == "node 1 (host1) is gone"


def test_two_nodes_of_one_number_and_numbers_beyond_all_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "SAME_NUMBER_S", 0.5)
    refused: list[Future[Report]] = []

    def ranks(*_: object) -> bool:
        until(lambda: all(one.done() for one in refused) and len(refused) == 2)
        return False

    launchers = Launchers(ranks, NodeRange(2, 2))
    runs = [launchers.start(node) for node in range(2)]
    until(lambda: launchers.rounds)
    refused += [launchers.start(1), launchers.start(7)]
    with pytest.raises(UserError, match=r"node 1 \(host1\) takes part already"):
        refused[0].result(LIMIT_S)
    with pytest.raises(UserError, match="numbered from 0 to 1"):
        refused[1].result(LIMIT_S)
    assert [one.result(LIMIT_S).how for one in runs] == ["done", "done"]
