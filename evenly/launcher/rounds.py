"""Who takes part in a run on several nodes, round after round, decided from what is known of them. No processes here.

A round is one start of the ranks of some nodes, its members. It is over when all of them have reported. Where a rank
fails or a node is gone, the others end their ranks and report that; what is left goes on in another round. A node that
comes while a round is under way has it pause at the next checkpoint, and takes part in the next. One that leaves by
itself (SIGTERM, in an elastic run) has it pause after the step.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from evenly.errors import UserError
from evenly.launcher.part import NodePart
from evenly.launcher.rank import CAUSES, EXIT_STOPPED, Kind
from evenly.launcher.restarts import Failure, error_raised, pause_before_restart


@dataclass(frozen=True)
class Limits:
    """Seconds: for enough nodes to come; for more than enough; for a better reason than lost peers; to end ranks."""

    join_s: float = 300.0
    last_call_s: float = 30.0
    settle_s: float = 3.0
    end_s: float = 60.0


@dataclass(frozen=True)
class NodeRange:
    """How many nodes a run may have; it is elastic where that is no single number."""

    least: int = 1
    most: int = 1

    @classmethod
    def parse(cls, text: str, option: str = "--nodes") -> NodeRange:
        """Of `4` or `2:4`; `to_text` is its inverse. Raises `UserError`, which names the option."""
        numbers = text.split(":")
        if not re.fullmatch(r"[0-9]{1,6}(:[0-9]{1,6})?", text):
            raise UserError(f"{option} {text}", "it is neither a number nor two with ':' between", "write 4, or 2:4")
        found = cls(int(numbers[0]), int(numbers[-1]))
        if not 1 <= found.least <= found.most:
            raise UserError(f"{option} {text}", "there is no such number", "write 4, or 2:4: the least first")
        return found

    def to_text(self) -> str:
        """`4` or `2:4`; `parse` is its inverse."""
        return f"{self.least}:{self.most}" if self.elastic else str(self.most)

    @property
    def elastic(self) -> bool:
        return self.least < self.most

    def __str__(self) -> str:
        return f"{self.least} to {self.most}" if self.elastic else f"{self.most}"


@dataclass(frozen=True)
class Member:
    """A launcher: the number of its node, its own random name, its machine, and how many ranks it starts."""

    node: int
    token: str
    host: str
    devices: int

    def __str__(self) -> str:
        return f"node {self.node} ({self.host})"

    def to_text(self) -> str:
        """JSON; `from_text` is its inverse."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> Member:
        """Inverse of `to_text`."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Round:
    """One start of the ranks of `members`, in the order of nodes. resume: whether it goes on from a checkpoint.

    folder: of the run, where node 0 has chosen it; None without one. mark: a file in there that all nodes must see.
    """

    number: int
    members: tuple[Member, ...]
    resume: bool = False
    folder: str | None = None
    mark: str = ""

    def part(self, token: str, *, port: int, interface: str) -> NodePart:
        place = [member.token for member in self.members].index(token)
        ranks = [member.devices for member in self.members]
        return NodePart(place, len(ranks), sum(ranks[:place]), sum(ranks), self.number, port, interface)

    def to_text(self) -> str:
        """JSON; `from_text` is its inverse."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> Round:
        """Inverse of `to_text`."""
        values: dict[str, Any] = json.loads(text)
        values["members"] = tuple(Member(**member) for member in values["members"])
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Report:
    """How a round has ended for the ranks of one node; or for all of them, and the whole run.

    ended: its ranks were ended as they were asked to. stopped: before the last step, by `signum`, if that is known.
    left: likewise, and the run goes on without this node. paused: for a node that has come or left. lost: nodes that
    are gone. The others are those of `FailedRank`.
    """

    how: Literal["done", "stopped", "left", "paused", "ended", "failed"]
    signum: int = 0
    asked: str = ""
    found: str = ""
    do: str = ""
    rank: int | None = None
    step: int | None = None
    kind: Kind = "error"
    exit_code: int = 1
    traceback: str = ""
    lost: bool = False

    def to_text(self) -> str:
        """JSON; `from_text` is its inverse."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> Report:
        """Inverse of `to_text`."""
        return cls(**json.loads(text))

    @property
    def only_lost_a_peer(self) -> bool:
        """Whether it has failed for no other reason than that another rank was gone."""
        return self.how == "failed" and self.kind == "peer"

    @property
    def error(self) -> str:
        """What a rank has raised, with its step, whichever rank it was; '' where it was killed or stood still."""
        return error_raised(self.kind, self.step, self.traceback)


@dataclass(frozen=True)
class View:
    """What is known of the nodes, at `now_s`; all times by one clock.

    present: whose launcher is connected, by node. round: that is under way, None between rounds. reports: of its
    members. failed_s: when the first of them has failed. ending_s: when its end was asked for. pausing: whether its
    pause was. since_s: when the last round was over, or the run began. enough_s: since when there are enough nodes.
    not_before_s: of the next round. began: whether a round ever did. signum: of a stop that was asked for, on any node.
    """

    nodes: NodeRange
    now_s: float
    present: Mapping[int, Member]
    round: Round | None = None
    reports: Mapping[int, Report] = field(default_factory=dict[int, Report])
    failed_s: float = math.inf
    ending_s: float | None = None
    pausing: bool = False
    since_s: float = 0.0
    enough_s: float = math.inf
    not_before_s: float = 0.0
    began: bool = False
    signum: int = 0
    limits: Limits = field(default_factory=Limits)

    @property
    def unreported(self) -> list[Member]:
        """Members that have said nothing yet."""
        return [member for member in (self.round.members if self.round else ()) if member.node not in self.reports]

    @property
    def gone(self) -> list[Member]:
        return [member for member in self.unreported if self.present.get(member.node) != member]

    @property
    def newcomers(self) -> list[Member]:
        """Launchers that wait to be taken in."""
        return [member for member in self.present.values() if self.round and member not in self.round.members]


# begin: with the nodes that are present. pause, end: the round. over: the round is. finish: the run, with a `Report`.
Action = Literal["wait", "begin", "pause", "end", "over"] | Report


def next_action(view: View) -> Action:
    return _between_rounds(view) if view.round is None else _within(view)


def _within(view: View) -> Action:
    waited = [member for member in view.unreported if member not in view.gone]
    if not waited:
        return "over"
    if view.ending_s is not None:
        return "over" if view.now_s - view.ending_s > view.limits.end_s else "wait"
    failed = [report for report in view.reports.values() if report.how == "failed"]
    settling = all(report.only_lost_a_peer for report in failed) and view.now_s - view.failed_s < view.limits.settle_s
    if view.gone or (failed and not settling):
        return "end"
    return "pause" if view.newcomers and not (view.pausing or view.signum or failed) else "wait"


def _between_rounds(view: View) -> Action:
    if view.signum:
        return Report(how="stopped", signum=view.signum)
    if view.now_s < view.not_before_s:
        return "wait"
    there = len(view.present)
    called = view.began or view.now_s - view.enough_s >= view.limits.last_call_s
    if there >= view.nodes.most or (there >= view.nodes.least and called):
        return "begin"
    if there < view.nodes.least and view.now_s - max(view.since_s, view.not_before_s) >= view.limits.join_s:
        return Report(
            how="failed",
            asked=f"meet {view.nodes} nodes",
            found=f"{missing_in_words(view)} did not come within {view.limits.join_s:.0f} s",
            do="start every node with the same rendezvous and number of nodes",
            exit_code=1 if view.began else UserError.exit_code,
        )
    return "wait"


def missing_in_words(view: View) -> str:
    """`nodes 1, 3`: those that are not there."""
    missing = [str(node) for node in range(view.nodes.most) if node not in view.present]
    return f"node{'s' * (len(missing) > 1)} {', '.join(missing)}"


def judge(view: View) -> Report:
    """How a round that is over has ended: done, stopped, paused or failed, then for the first reason."""
    reports = [*view.reports.values()]
    silent = view.unreported
    if not silent and all(report.how == "done" for report in reports):
        return Report(how="done", exit_code=0)
    signum = view.signum or next((r.exit_code - EXIT_STOPPED for r in reports if r.exit_code > EXIT_STOPPED), 0)
    if signum:
        return Report(how="stopped", signum=signum)
    failed = [report for report in reports if report.how == "failed"]
    reasons = [report for report in failed if not report.only_lost_a_peer]
    if reasons:
        return min(reasons, key=lambda report: CAUSES.index(report.kind))
    if silent:
        who = view.gone or silent
        asked = f"{' and '.join(map(str, who))} {'is' if len(who) == 1 else 'are'} gone"
        found = "the launcher was killed, or cannot be reached"
        if not view.gone:
            found = f"the launcher has not ended its ranks within {view.limits.end_s:.0f} s"
        return Report(how="failed", asked=asked, found=found, lost=True)
    if any(report.how == "left" for report in reports):
        return Report(how="paused")
    if failed:
        return failed[0]
    return Report(how="paused" if view.pausing else "stopped")


def pause_after(failures: Sequence[Failure], last: Report, *, restarts: int, elastic: bool) -> float | Report:
    """Seconds until the run goes on in another round after `failures`, the newest of which is `last`; or its end.

    restarts: how many failures within an hour are borne. In an elastic run the loss of a node is none of them.
    """
    if last.exit_code != 1 or not (restarts or (elastic and last.lost)):  # a mistake, or none was asked for
        return last
    pause = pause_before_restart(failures, restarts)
    return replace(last, do="; ".join(filter(None, (pause, last.do)))) if isinstance(pause, str) else pause


def as_failure(report: Report, time_s: float, step: int | None, *, elastic: bool) -> Failure:
    """`report` as one of the failures of a run; step: of its newest checkpoint."""
    return Failure(time_s, step, report.error, counts=not (elastic and report.lost))
