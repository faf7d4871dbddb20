"""`evenly run` on several nodes: one launcher of a run that goes through rounds, see `launcher/rounds`."""

from __future__ import annotations

import signal
import socket
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenly.cli.run import RunRequest, exit_code, print_summary, train_on_ranks, with_way_on
from evenly.errors import UserError
from evenly.launcher.agent import Launch
from evenly.launcher.environment import OPTIONS_VARIABLE, run_secret
from evenly.launcher.interfaces import socket_interface
from evenly.launcher.nodes import NodeRun, failure_of, read_rendezvous
from evenly.launcher.rounds import Member, Report, Round
from evenly.launcher.shared_folder import put_mark, sees_mark
from evenly.observe.run_folder import RunFolder
from evenly.train.no_room import newest_step

if TYPE_CHECKING:
    from evenly.launcher.rendezvous import NodeStore
    from evenly.launcher.signals import StopRequest
    from evenly.launcher.watch import Orders
    from evenly.train.loop import Summary
    from evenly.train.options import RunOptions


def run_on_nodes(
    request: RunRequest, launch: Launch, settings: dict[str, Any], options: RunOptions, *, script: bool
) -> int:
    """Takes part in the run until it has ended; its exit code. Raises the first failure, on all nodes alike."""
    from evenly.launcher.rendezvous import NodeStore

    secret = run_secret(request.secret_file)
    host, port = read_rendezvous(request.rendezvous, secret)
    store = NodeStore(request.nodes.most, request.node_rank, host, port, secret)
    ranks = _Ranks(request, launch, settings, options, script, store, socket_interface(host, port))
    mark = put_mark(options.out, store.token) if request.node_rank == 0 and options.out is not None else None
    run = NodeRun(
        store=store,
        me=Member(request.node_rank, store.token, socket.gethostname(), launch.devices),
        nodes=request.nodes,
        start=ranks.start,
        newest_step=lambda: newest_step(options),
        first=Round(0, (), options.resume, options.out and str(options.out), "" if mark is None else mark.name),
        restarts=request.restarts,
    )
    try:
        return _end(run.run(), ranks)
    finally:
        if mark is not None:
            mark.unlink(missing_ok=True)


def _end(outcome: Report, ranks: _Ranks) -> int:
    """The exit code of a run that ended so; prints its summary on node 0. Raises `FailedRank`."""
    if outcome.how == "failed":
        failed = failure_of(outcome)
        failed.do = with_way_on(failed, ranks.request, ranks.options.out)
        raise failed
    if outcome.how == "left":
        print("evenly: this node has left the run, which goes on without it", file=sys.stderr)
        return exit_code(True, outcome.signum)
    if ranks.request.node_rank == 0 and ranks.summary is not None:
        print_summary(ranks.summary, ranks.request)
    elif outcome.how == "stopped" or not ranks.taken_in:
        how = f"was stopped by {signal.Signals(outcome.signum).name}" if outcome.signum else "has ended"
        print(f"evenly: the run {how}" + ("" if ranks.taken_in else ", without this node"), file=sys.stderr)
    return exit_code(outcome.how == "stopped", outcome.signum)


@dataclass
class _Ranks:
    """The ranks of this node, in one round after the other.

    summary: of the last, None for scripts. taken_in: whether there was one.
    """

    request: RunRequest
    launch: Launch
    settings: dict[str, Any]
    options: RunOptions
    script: bool
    store: NodeStore
    interface: str
    summary: Summary | None = field(default=None, init=False)
    taken_in: bool = field(default=False, init=False)

    def start(self, found: Round, stop: StopRequest, orders: Orders) -> bool:
        """Runs the ranks of a round; whether they have stopped early."""
        self.taken_in = True
        out = self.options.out or (Path(found.folder) if found.folder else None)
        if out is not None:
            self._check_folder(out, found)
        step = self.options.step if found.number == 0 else None
        self.options = options = replace(self.options, out=out, resume=found.resume, step=step)
        launch = replace(
            self.launch,
            part=found.part(self.store.token, port=self.store.local_port, interface=self.interface),
            log_dir=out and RunFolder(out).logs,
            stop=stop,
            orders=orders,
            environment={**self.launch.environment, **({OPTIONS_VARIABLE: options.to_text()} if self.script else {})},
        )
        self._announce(found)
        stopped, self.summary = train_on_ranks(self.request, launch, self.settings, options, script=self.script)
        if self.summary is not None and not stop.signum:
            return self.summary.stopped and self.summary.steps < self.summary.steps_asked
        return stopped

    def _check_folder(self, out: Path, found: Round) -> None:
        """Raises `UserError` where `out` is not the folder that node 0 has under this name."""
        if found.mark and not sees_mark(out / found.mark):
            raise UserError(
                f"take part in the run in {found.folder}",
                f"node {self.request.node_rank} does not see in {out.resolve()} what node 0 has written there",
                "name a folder on storage that all nodes see (--out)",
            )

    def _announce(self, found: Round) -> None:
        if not self.request.json_only and not self.request.quiet:
            nodes = ", ".join(str(member.node) for member in found.members)
            print(f"evenly: nodes {nodes} take part", file=sys.stderr, flush=True)
