"""Runs on workers of Ray: on the two nodes of a lab, of which one is lost in the middle of the last."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from benchmarks.lab.lab import Lab, address
from benchmarks.schedulers.transcript import NOISE, Transcript, wait_until

JOB = Path(__file__).with_name("job.py")
NEEDS = "ray[train]>=2.60"
HEAD = f"{address(0)}:6379"
VARIABLES = {"RAY_ADDRESS": HEAD, "RAY_USAGE_STATS_ENABLED": "0", "RAY_COLOR_PREFIX": "0", "RAY_DEDUP_LOGS": "0"}
# Of Ray's own lines and of tracebacks only what workers print is kept.
LINES_OF_RAY = re.compile(
    rf"{NOISE.pattern}|^(?!\(RayTrainWorker .*\) step |evenly|\d+ steps|steps |metrics,|  |step )"
)


def missing() -> list[str]:
    """What has to be installed, after an attempt to do so."""
    if importlib.util.find_spec("ray") is None:
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", NEEDS], check=False)
    return [] if importlib.util.find_spec("ray") else [NEEDS]


class RayNodes:
    """Ray on the nodes of the lab, two CPUs each; what it keeps is in `sessions`, whose name is short."""

    def __init__(self, runs: Transcript, sessions: Path) -> None:
        self.runs, self.sessions = runs, sessions
        self.started: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int) -> None:
        """A node, which is there when this returns."""
        what = "--head --port 6379" if node == 0 else f"--address {HEAD}"
        command = f"ray start {what} --node-ip-address {address(node)} --num-cpus 2 --block"
        print(f"node{node}$ {command}", flush=True)
        more = f"--temp-dir {self.sessions / str(node)}"
        more += " --include-dashboard=false --disable-usage-stats" if node == 0 else ""
        with (self.runs.folder / f".ray{node}").open("w") as output:
            self.started[node] = self.runs.start(f"{command} {more}", node=node, output=output)
        said = self.runs.folder / f".ray{node}"
        wait_until(lambda: "Ray runtime started" in said.read_text() or self.started[node].poll() is not None)

    def lose(self, node: int) -> None:
        """As `end`, with a word."""
        print(f"(node{node} is lost)", flush=True)
        self.end(node)

    def end(self, node: int) -> None:
        """All of its processes are killed."""
        first = psutil.Process(self.started.pop(node).pid)
        processes = [first, *first.children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=20)


@contextmanager
def ray_nodes(runs: Transcript) -> Generator[RayNodes]:
    """Ray on both nodes; nothing of it is left."""
    sessions = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets are in it, whose paths have 107 letters
    nodes = RayNodes(runs, sessions)
    try:
        nodes.start(0)
        nodes.start(1)
        yield nodes
    finally:
        for node in sorted(nodes.started, reverse=True):
            nodes.end(node)
        shutil.rmtree(sessions, ignore_errors=True)


def ray(lab: Lab, folder: Path) -> None:
    """Prints the runs; raises where one is not as it should be."""
    runs = Transcript(lab, folder, VARIABLES, LINES_OF_RAY)
    (folder / "job.py").write_text(JOB.read_text())
    runs.run("evenly run job.py --devices 1 --out one-device")
    with ray_nodes(runs) as nodes:
        runs.say("each worker is a rank")
        runs.run("evenly run job.py --ray 4 --plan zero3 --out ray-ranks")
        runs.check_same("ray-ranks", "one-device")
        runs.say("a rank that fails, in the same step each time")
        runs.run("evenly run job.py --ray 4 --set fails=3 --restarts 2 --out ray-fails", code=(1,))
        runs.say("a node that is lost: the run goes on with the workers that there is room for")
        command = "evenly run job.py --ray 2:4 --set steps=60 --set pause=0.1 --restarts 2 --out ray-lost"
        runs.run(command, meanwhile=lambda: nodes.lose(1), when=lambda _: _steps(folder / "ray-lost") >= 6)
        runs.run("evenly run job.py --devices 1 --set steps=60 --out one-device-60")
        runs.check_same("ray-lost", "one-device-60")
    runs.check_nothing_left()


def _steps(out: Path) -> int:
    """Of the newest checkpoint."""
    return max((int(path.name.removeprefix("step-")) for path in (out / "checkpoints").glob("step-*")), default=0)
