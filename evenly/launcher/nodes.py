"""A run on several nodes: what their launchers tell each other in the store, and what node 0 decides there.

    launcher TOKEN       a `Member`, by itself
    round N              a `Round`, by node 0
    order N              "pause", then perhaps "end", by node 0
    report N TOKEN       a `Report`, by a member when its ranks have ended
    stop                 the signal by which the run was asked to stop, by any
    refused TOKEN        why a launcher cannot take part, by node 0
    outcome              the `Report` of the run, by node 0; then `read TOKEN` by those who have read it

Node 0 decides in a thread (`Coordinator`), by the functions of `launcher/rounds`; its launcher takes part as all others
do. The store lives as long as that launcher: where it is gone, the run has ended.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from evenly.errors import EvenlyError, RunError, UserError, describe
from evenly.launcher.agent import FailedRank
from evenly.launcher.interfaces import is_loopback
from evenly.launcher.rank import EXIT_STOPPED
from evenly.launcher.restarts import Failure
from evenly.launcher.rounds import (
    Limits,
    Member,
    NodeRange,
    Report,
    Round,
    View,
    as_failure,
    judge,
    missing_in_words,
    next_action,
    pause_after,
)
from evenly.launcher.signals import StopRequest
from evenly.launcher.watch import Orders

if TYPE_CHECKING:
    from evenly.launcher.rendezvous import NodeStore

BETWEEN_LOOKS_S = 0.2
READ_LIMIT_S = 5.0  # for launchers to read how the run has ended
SAID_AFTER_S = 3.0  # that nodes are waited for
SAME_NUMBER_S = 40.0  # for a launcher that has vanished to be missed, so that another takes its place


@dataclass(frozen=True)
class NodeRun:
    """A run on several nodes as one of their launchers has it.

    start: starts the ranks of this node and waits for them; returns whether they stopped early, raises `FailedRank` or
    `UserError`. On node 0, newest_step: that has a checkpoint; first: the first round, but for its members.
    """

    store: NodeStore
    me: Member
    nodes: NodeRange
    start: Callable[[Round, StopRequest, Orders], bool]
    newest_step: Callable[[], int | None] = lambda: None
    first: Round = field(default_factory=lambda: Round(0, ()))
    restarts: int = 0
    limits: Limits = field(default_factory=Limits)

    def leaves(self, signum: int) -> bool:
        """Whether this node, asked to stop as by a scheduler that takes it away, leaves a run that goes on."""
        return signum == signal.SIGTERM and self.nodes.elastic and self.me.node > 0

    def run(self) -> Report:
        """Takes part until the run has ended; how it has. Raises `UserError` and `RunError`."""
        self.store.open()
        coordinator = Coordinator(self) if self.me.node == 0 else None
        try:
            with _words_of_loss(self):
                return _take_part(self)
        finally:
            if coordinator is not None:
                coordinator.end()
            self.store.close()


def failure_of(outcome: Report) -> FailedRank:
    return FailedRank(
        outcome.asked,
        outcome.found,
        outcome.do,
        rank=outcome.rank,
        exit_code=outcome.exit_code,
        traceback=outcome.traceback,
    )


def read_rendezvous(text: str, secret: bytes) -> tuple[str, int]:
    """Host and port of `text`; raises `UserError` where it has none, or a secret is needed there."""
    host, _, port = text.rpartition(":")
    asked = "meet the other nodes"
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        found = f"the rendezvous {text!r} is not host:port"
        raise UserError(asked, found, "give node 0's host and a free port, the same on every node")
    if not secret and not is_loopback(host):
        raise UserError(
            asked,
            "the run has no secret, and whoever reaches the rendezvous could take part",
            "give all nodes a file with the same random words, by --secret-file or EVENLY_SECRET",
        )
    return host, int(port)


# ------------------------------------------------------------------------------------------------- every launcher
def _take_part(run: NodeRun) -> Report:
    from torch.distributed import DistError

    client, listening = run.store.client(), run.store.client()
    client.set(f"launcher {run.me.token}", run.me.to_text())
    number, taken_in = 0, False
    try:
        while isinstance(found := _next(run, client, number), Round):
            if run.me in found.members:
                taken_in = True
                if (left := _take_round(run, client, listening, found)).how == "left":
                    return left
            number += 1
    except SystemExit as stopped:  # by a signal, between rounds; one that waits to be taken in leaves alone
        signum = stopped.code - EXIT_STOPPED if isinstance(stopped.code, int) else 0
        if signum and (taken_in or not number) and not run.leaves(signum):
            client.set("stop", str(signum))
        raise
    with suppress(DistError):
        client.set(f"read {run.me.token}", "")
    return found


def _next(run: NodeRun, client: Any, number: int) -> Round | Report:
    while True:
        if client.check([f"round {number}"]):
            return Round.from_text(client.get(f"round {number}"))
        if client.check(["outcome"]):
            return Report.from_text(client.get("outcome"))
        if client.check([f"refused {run.me.token}"]):
            raise UserError(f"take part as node {run.me.node}", client.get(f"refused {run.me.token}").decode())
        time.sleep(BETWEEN_LOOKS_S)


def _take_round(run: NodeRun, client: Any, listening: Any, found: Round) -> Report:
    """Runs the ranks of this node, and reports how that has ended."""
    stop, orders, over, leaving = StopRequest(), Orders(), threading.Event(), None
    listener = threading.Thread(target=_listen, args=(run, listening, found.number, stop, orders, over), daemon=True)
    listener.start()
    try:
        stopped = run.start(found, stop, orders)
        report = Report(how="stopped", signum=stop.signum) if stopped else Report(how="done", exit_code=0)
    except EvenlyError as failed:
        report = _as_report(failed, orders)
    except (Exception, SystemExit) as problem:
        leaving = problem if isinstance(problem, SystemExit) else None  # by a signal, before ranks could have it
        code = leaving.code if leaving is not None and isinstance(leaving.code, int) else 1
        report = Report(
            how="failed",
            asked=f"run the ranks of {run.me}",
            found=describe(problem),
            exit_code=code,
            traceback=traceback.format_exc(),
        )
    finally:
        over.set()
        listener.join()
    signum = stop.signum or max(0, report.exit_code - EXIT_STOPPED)
    if run.leaves(signum) and report.how != "done":
        report = Report(how="left", signum=signum)
    _tell_stop(run, client, stop)
    client.set(f"report {found.number} {run.me.token}", report.to_text())
    if leaving is not None:
        raise leaving
    return report


def _tell_stop(run: NodeRun, client: Any, stop: StopRequest) -> None:
    """Asks all nodes to stop where this one was asked to, unless it alone is to leave."""
    if stop.signum and not run.leaves(stop.signum) and not client.check(["stop"]):
        client.set("stop", str(stop.signum))


def _as_report(failed: EvenlyError, orders: Orders) -> Report:
    words = Report(how="failed", asked=failed.asked, found=failed.found, do=failed.do, exit_code=failed.exit_code)
    if not isinstance(failed, FailedRank):
        return words
    if orders.end and failed.exit_code == FailedRank.exit_code and (failed.kind == "killed" or failed.rank is None):
        return Report(how="ended")
    return replace(words, rank=failed.rank, step=failed.step, kind=failed.kind, traceback=failed.traceback)


def _listen(run: NodeRun, client: Any, number: int, stop: StopRequest, orders: Orders, over: threading.Event) -> None:
    """Passes on what node 0 orders, and a stop that this launcher was asked for; for a thread."""
    from torch.distributed import DistError

    try:
        while not over.wait(BETWEEN_LOOKS_S):
            _tell_stop(run, client, stop)
            if client.check([f"order {number}"]):
                order = client.get(f"order {number}")
                orders.pause, orders.end = True, order == b"end"
    except DistError:  # node 0 is gone
        orders.end = True


@contextmanager
def _words_of_loss(run: NodeRun) -> Generator[None]:
    """Within, errors of the store are raised as what they are: the launcher that has it does not answer any more."""
    from torch.distributed import DistError

    try:
        yield
    except DistError as problem:
        raise RunError(
            f"go on with the run of node 0 at {run.store.host}:{run.store.port}",
            "node 0 is gone, and the run with it: its launcher was killed, or cannot be reached",
            "start all nodes again, with --resume",
        ) from problem


# --------------------------------------------------------------------------------------------------------- node 0
@dataclass
class Coordinator:
    """Decides what the launchers of `run` do, in a thread of node 0's."""

    run: NodeRun
    view: View = field(init=False)
    failures: list[Failure] = field(default_factory=list[Failure])
    launchers: dict[str, Member] = field(default_factory=dict[str, Member])
    refused: set[str] = field(default_factory=set[str])
    waiting: dict[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        now_s = time.monotonic()
        self.view = View(self.run.nodes, now_s, {}, since_s=now_s, limits=self.run.limits)
        self.number, self.resume, self.said = 0, self.run.first.resume, False
        self._thread = threading.Thread(target=self._decide, name="evenly nodes", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Waits until the other launchers have read how the run has ended."""
        self._thread.join(READ_LIMIT_S + 5)

    def _decide(self) -> None:
        client = self.run.store.client()
        try:
            outcome = self._until_outcome(client)
        except BaseException as problem:  # nobody else would end the run
            outcome = Report(how="failed", asked="decide who takes part", found=f"{type(problem).__name__}: {problem}")
        client.set("outcome", outcome.to_text())
        until_s = time.monotonic() + READ_LIMIT_S
        while time.monotonic() < until_s and (there := set(self.run.store.there()) & self.launchers.keys()):
            if all(client.check([f"read {token}"]) for token in there):
                return
            time.sleep(BETWEEN_LOOKS_S)

    def _until_outcome(self, client: Any) -> Report:
        while True:
            self._look(client)
            action = next_action(self.view)
            if isinstance(action, Report):
                return action
            if action == "begin":
                self._begin(client)
            elif action in ("pause", "end"):
                self._order(client, action)
            elif action == "over" and (outcome := self._over(client)) is not None:
                return outcome
            self._say_who_is_missing()
            time.sleep(BETWEEN_LOOKS_S)

    def _look(self, client: Any) -> None:
        """Brings the view up to date."""
        now_s, view = time.monotonic(), self.view
        there = [self.run.me.token, *self.run.store.there()]
        for token in there:
            if token not in self.launchers and client.check([f"launcher {token}"]):
                self.launchers[token] = Member.from_text(client.get(f"launcher {token}"))
        present: dict[int, Member] = {}
        for token in there:
            if token in self.launchers and token not in self.refused:
                self._place(client, self.launchers[token], present)
        reports = dict(view.reports)
        for member in view.unreported:
            if client.check([f"report {self.number} {member.token}"]):
                reports[member.node] = Report.from_text(client.get(f"report {self.number} {member.token}"))
        failed = any(report.how == "failed" for report in reports.values())
        self.view = replace(
            view,
            now_s=now_s,
            present=present,
            reports=reports,
            failed_s=min(view.failed_s, now_s) if failed else view.failed_s,
            enough_s=min(view.enough_s, now_s) if len(present) >= view.nodes.least else float("inf"),
            signum=int(client.get("stop")) if client.check(["stop"]) else view.signum,
        )

    def _place(self, client: Any, member: Member, present: dict[int, Member]) -> None:
        """Counts `member` as present, unless its number is another's, who has come before and may be about to go."""
        former = present.setdefault(member.node, member)
        if former is member and member.node < self.run.nodes.most:
            return
        found = f"nodes are numbered from 0 to {self.run.nodes.most - 1}"
        if former is member:
            del present[member.node]
        else:
            found = f"{former} takes part already: give each node a number of its own"
            if self.view.now_s - self.waiting.setdefault(member.token, self.view.now_s) < SAME_NUMBER_S:
                return
        self._refuse(client, member, found)

    def _refuse(self, client: Any, member: Member, found: str) -> None:
        self.refused.add(member.token)
        client.set(f"refused {member.token}", found)

    def _begin(self, client: Any) -> None:
        members = tuple(self.view.present[node] for node in sorted(self.view.present))
        found = replace(self.run.first, number=self.number, members=members, resume=self.resume)
        client.set(f"round {self.number}", found.to_text())
        self.view = replace(self.view, round=found, began=True)

    def _order(self, client: Any, order: str) -> None:
        client.set(f"order {self.number}", order)
        if order == "end":
            self.view = replace(self.view, ending_s=self.view.now_s)
            return
        self.view = replace(self.view, pausing=True)
        for member in self.view.newcomers:
            _say(f"{member} has come, and is taken in at the next checkpoint")

    def _over(self, client: Any) -> Report | None:
        """The round is over: how the run has ended, or None where there will be another."""
        view, last = self.view, judge(self.view)
        for member in view.unreported:
            self._refuse(client, member, "its ranks had to be ended, and were not: start it again")
        for member in view.round.members if view.round else ():
            if member.node in view.reports and view.reports[member.node].how == "left":
                self.refused.add(member.token)  # its launcher is about to end
                _say(f"{member} leaves")
        pause = 0.0
        if last.how != "paused":
            if last.how != "failed":
                return last
            step = self.run.newest_step()
            self.failures.append(as_failure(last, view.now_s, step, elastic=view.nodes.elastic))
            found = pause_after(self.failures, last, restarts=self.run.restarts, elastic=view.nodes.elastic)
            if isinstance(found, Report):
                return found
            pause = found
            _say(f"{last.asked}: {last.found}")
        step = self.run.newest_step()
        where = "the beginning" if step is None else f"step {step}"
        _say(f"restart {len(self.failures)} in {pause:.0f} s, from {where}" if pause else f"goes on from {where}")
        self.number, self.resume, self.said = self.number + 1, step is not None, False
        self.view = View(
            view.nodes, view.now_s, view.present, since_s=view.now_s, not_before_s=view.now_s + pause, began=True,
            signum=view.signum, limits=view.limits,
        )  # fmt: skip
        return None

    def _say_who_is_missing(self) -> None:
        view = self.view
        waited_s = view.now_s - max(view.since_s, view.not_before_s)
        if view.round is None and not self.said and waited_s > SAID_AFTER_S and len(view.present) < view.nodes.most:
            self.said = True
            wait_s = view.limits.join_s if len(view.present) < view.nodes.least else view.limits.last_call_s
            _say(f"waits up to {wait_s:.0f} s for {missing_in_words(view)}")


def _say(text: str) -> None:
    with suppress(OSError):
        print(f"evenly: {text}", file=sys.stderr, flush=True)
