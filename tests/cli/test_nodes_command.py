"""`evenly run` on several nodes, each a launcher of its own on loopback."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from command import COMMAND, environment
from kept_ranks import free_port
from safetensors.torch import load_file

import evenly
from evenly.checkpoint.folder import CheckpointFolder
from evenly.jobfile import load_job

LIMIT_S = 300.0
JOB = """
import os, time
import torch
import evenly

calls = 0

def held():
    "Waits in the 12th loss of each process, the last of step 4 on two ranks, until the test lets it go on."
    global calls
    calls += 1
    while calls == 12 and os.environ.get("HOLD") and os.path.exists(os.environ["HOLD"]):
        time.sleep(0.02)

def job(steps: int = 20) -> evenly.Job:
    def loss(model, x):
        if model.training:
            held()
        return evenly.Loss((model(x).sum(1) - x.sum(1)).square().sum(), len(x))

    return evenly.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Dropout(0.2), torch.nn.Linear(7, 3)),
        loss=loss,
        data=[torch.linspace(-1, 1, 5) * (i + 1) / 53 for i in range(53)],
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        global_batch=12,
        microbatch=2,
        steps=steps,
        save_every=2,
        precision="float64",
    )
"""


class Nodes:
    """Launchers with one rank each, in `folder`; what they print is in files there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.hold = folder / "hold"
        self.started: list[subprocess.Popen[bytes]] = []
        self.seen: set[psutil.Process] = set()
        (folder / "job.py").write_text(JOB)
        self.temporary = Path(tempfile.mkdtemp(prefix="nodes"))  # a socket's path has 107 bytes at most

    def start(self, node: int, *arguments: object, nodes: str = "2:3") -> subprocess.Popen[bytes]:
        where = ("--nodes", nodes, "--node-rank", node, "--rendezvous", f"127.0.0.1:{self.port}", "--out", "out")
        mine = {"TMPDIR": str(self.temporary), "HOLD": str(self.hold)}
        with (self.folder / f"said{len(self.started)}").open("w") as said:
            process = subprocess.Popen(
                [*COMMAND, "run", "job.py", "--devices", "1", *map(str, (*where, *arguments))],
                cwd=self.folder, env={**environment(), **mine}, stdout=said, stderr=said,
            )  # fmt: skip
        self.started.append(process)
        return process

    def said(self, number: int) -> str:
        return (self.folder / f"said{number}").read_text()

    def tree(self, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
        found = psutil.Process(process.pid)
        family = [found, *found.children(recursive=True)]
        self.seen.update(family)
        return family

    def until(self, condition: Callable[[], object]) -> None:
        limit = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < limit, [self.said(number) for number in range(len(self.started))]
            time.sleep(0.05)

    @property
    def steps(self) -> list[int]:
        return CheckpointFolder(self.folder / "out").steps()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Fails the test if a process outlives the launchers."""
    found = Nodes(tmp_path)
    yield found
    for process in found.started:
        if process.poll() is None:
            for one in found.tree(process):
                one.kill()
        process.wait(LIMIT_S)
    _, alive = psutil.wait_procs(found.seen, timeout=20)
    shutil.rmtree(found.temporary, ignore_errors=True)
    for one in alive:
        one.kill()
    assert not alive


@pytest.mark.full
def test_a_node_of_three_is_taken_away_and_given_back(nodes: Nodes) -> None:
    nodes.hold.touch()
    first = [nodes.start(node) for node in range(3)]
    nodes.until(lambda: 4 in nodes.steps)
    for one in nodes.tree(first[2]):
        one.kill()
    nodes.until(lambda: "nodes 0, 1 take part" in nodes.said(0) and max(nodes.steps) > 4)
    back = nodes.start(2)
    nodes.until(lambda: len([*nodes.temporary.glob("evenly-*/.node*/pause")]) == 2)
    for process in (*first[:2], back):
        nodes.tree(process)
    nodes.hold.unlink()
    assert [process.wait(LIMIT_S) for process in (*first[:2], back)] == [0, 0, 0], nodes.said(0)
    said = nodes.said(0)
    for words in ("node 2 (", "is gone", "restart 1 in 1 s", "has come, and is taken in", "20 on 3 ranks (data=3 "):
        assert words in said, said
    assert said.count("nodes 0, 1, 2 take part") == 2 and "nodes 0, 1, 2 take part" in nodes.said(3)
    with evenly.start(load_job(nodes.folder / "job.py", {}), plan="single", out=nodes.folder / "alone") as run:
        for batch in run.batches():
            run.step(batch)
    ours, theirs = (weights(nodes.folder / out, 20) for out in ("out", "alone"))
    assert ours.keys() == theirs.keys() and len(ours) > 8
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-9, atol=1e-12, msg=name)


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    files = CheckpointFolder(out).path(step).glob("*.safetensors")
    return {name: tensor for file in sorted(files) for name, tensor in load_file(file).items()}


@pytest.mark.full
def test_a_signal_on_one_node_ends_the_run_on_all_and_leads_to_no_restart(nodes: Nodes) -> None:
    started = [nodes.start(node, "--restarts", 9, nodes="2") for node in range(2)]
    nodes.hold.touch()
    nodes.until(lambda: 2 in nodes.steps)
    started[1].send_signal(signal.SIGTERM)
    for process in started:
        nodes.tree(process)
    nodes.until(lambda: not nodes.hold.unlink(missing_ok=True))
    assert [process.wait(LIMIT_S) for process in started] == [143, 143], nodes.said(0)
    assert "restart" not in nodes.said(0) and "--resume --out out" in nodes.said(0)
    assert nodes.steps and "the run was stopped by SIGTERM" in nodes.said(1)


def test_a_node_that_a_scheduler_takes_away_leaves_and_the_run_goes_on(nodes: Nodes) -> None:
    nodes.hold.touch()
    stays, leaves = (nodes.start(node, nodes="1:2") for node in range(2))
    nodes.until(lambda: 2 in nodes.steps)
    leaves.send_signal(signal.SIGTERM)
    nodes.tree(leaves)
    nodes.hold.unlink()
    assert leaves.wait(LIMIT_S) == 143
    nodes.tree(stays)
    assert stays.wait(LIMIT_S) == 0, nodes.said(0)
    assert "this node has left the run, which goes on without it" in nodes.said(1)
    said = nodes.said(0)
    assert "node 1 (" in said and "leaves" in said and "evenly: nodes 0 take part" in said and "restart" not in said
    assert "goes on from step 4" in said  # the one under way, of which nothing is lost
