"""The cluster in one machine: nodes that know each other by name, links as slow as asked, and nothing left over."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks is no installed package

from benchmarks.lab import lab as lab_module
from benchmarks.lab.commands import filled_in, run_on_all
from benchmarks.lab.lab import GROUPS, SPACES, STATES, Lab, LabError, bits_per_s, down, found, guarded, lab_command
from evenly.hardware.cluster_file import read_cluster

ROOT = Path(__file__).parents[2]
needs_root = pytest.mark.skipif(bool(lab_module.why_not()), reason=lab_module.why_not() or "it may")
NAME = f"t{os.getpid() % 10**8}"
EVENLY = [sys.executable, "-m", "evenly"]

SEND = """
import socket, sys, time
if sys.argv[1] == "0":
    server = socket.create_server(("0.0.0.0", 5000))
    other, _ = server.accept()
    began, left = time.perf_counter(), 2_000_000
    while left:
        left -= len(other.recv(1 << 16))
    print(2_000_000 * 8 / (time.perf_counter() - began) / 1e6)
else:
    while True:
        try:
            to = socket.create_connection(("node0", 5000), 1)
            break
        except OSError:
            time.sleep(0.02)
    to.sendall(bytes(2_000_000))
"""


def left_over(name: str) -> list[Path]:
    places = (*SPACES.glob(f"evenly-lab-{name}-*"), *STATES.glob(name))
    return [*places, *(group for folder in GROUPS for group in folder.glob(f"evenly-lab-{name}-*"))]


def until_gone(name: str) -> None:
    until_s = time.monotonic() + 20
    while left_over(name) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert left_over(name) == []


@pytest.fixture(scope="module")
def two() -> Iterator[Lab]:
    with guarded(Lab(name=NAME, nodes=2, bandwidth="80mbit")) as lab:
        yield lab
    assert left_over(NAME) == []


def said(lab: Lab, words: list[str]) -> list[str]:
    """What a command says on each node."""
    out = io.StringIO()
    codes = run_on_all(lab, words, out)
    lines = out.getvalue().splitlines()
    assert codes == [0] * lab.nodes, lines
    return ["\n".join(x[7:] for x in lines if x.startswith(f"node{node}: ")) for node in range(lab.nodes)]


def test_what_a_lab_is_asked_for() -> None:
    lab = Lab(nodes=3, devices=2, slow_nodes={1: 0.5})
    words = filled_in(lab, 2, ["--nodes={nodes}", "{node}", "{devices}", "{first}:5", "{address}"])
    assert words == ["--nodes=3", "2", "2", "10.77.0.1:5", "10.77.0.3"]
    assert lab.hosts(1).splitlines() == ["127.0.0.1 localhost", "127.0.1.1 node1", "10.77.0.1 node0", "10.77.0.3 node2"]
    assert bits_per_s("200mbit") == 2e8 and lab.within(1)[-1].endswith("/cgroup.procs") and lab.within(0)[-1] == ""
    with pytest.raises(LabError, match="'Lab 1' is no name of up to 12 letters; 0 nodes; '10 parsecs' is no rate"):
        Lab(name="Lab 1", nodes=0, bandwidth="10 parsecs")
    with pytest.raises(LabError, match="no lab 'nowhere' is up"):
        found("nowhere")


@pytest.mark.full
@needs_root
def test_nodes_know_each_other_by_name_and_themselves_as_loopback(two: Lab) -> None:
    assert found(NAME) == two
    assert said(two, ["hostname"]) == ["node0", "node1"]
    names = said(two, ["getent", "hosts", "node0", "node1"])
    assert [text.split() for text in names[0].splitlines()] == [["127.0.1.1", "node0"], ["10.77.0.2", "node1"]]
    assert [text.split() for text in names[1].splitlines()] == [["10.77.0.1", "node0"], ["127.0.1.1", "node1"]]


@pytest.mark.full
@needs_root
def test_a_link_is_as_slow_as_asked(two: Lab) -> None:
    assert 0.4 * 80 < float(said(two, [sys.executable, "-c", SEND, "{node}"])[0]) < 1.1 * 80  # less where it is busy


@pytest.mark.full
@needs_root
def test_nodes_whose_names_are_loopback_run_a_job_without_settings(two: Lab, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("some random words")
    place = ["--nodes", "2", "--node-rank", "{node}", "--rendezvous", "node0:29511", "--secret-file", "secret"]
    job = [str(ROOT / "examples/stdlib_lm.py"), "--set", "width=32", "--set", "layers=1"]
    words = [*EVENLY, "run", *job, "--steps", "2", "--devices", "1", *place, "--out", str(tmp_path / "run")]
    there = ["sh", "-c", f'cd {tmp_path} && PYTHONPATH={ROOT} exec "$@"', "sh"]
    assert "2 steps on 2 ranks (data=2" in said(two, [*there, *words])[0]


@pytest.mark.full
@needs_root
def test_links_between_nodes_are_measured_into_a_cluster_file(two: Lab, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("some random words")
    place = ["--nodes", "2", "--node-rank", "{node}", "--rendezvous", "node0:29512", "--secret-file", "secret"]
    words = [*EVENLY, "bench", "comm", "--operations", "send", "--most", "1M", "--devices", "1", *place]
    there = ["sh", "-c", f'cd {tmp_path} && PYTHONPATH={ROOT} exec "$@"', "sh"]
    assert "send 2x1" in said(two, [*there, *words, "--save", "c.toml"])[0]
    cluster = read_cluster(tmp_path / "c.toml")
    assert (cluster.nodes, cluster.devices, cluster.links) == (2, 1, {})
    largest, took_s = cluster.between["send", 2, 1].points[-1]
    assert largest == 2**20 and 0.4 * 80e6 < largest * 8 / took_s < 1.1 * 80e6


@pytest.mark.full
@needs_root
def test_the_doctor_names_the_node_that_others_do_not_reach_and_the_folder_that_it_has_alone(
    two: Lab, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("some random words")
    (tmp_path / "shared").mkdir()
    subprocess.run(["ip", "-n", two.space(1), "link", "add", "ib0", "type", "veth"], check=True)
    subprocess.run(["ip", "-n", two.space(1), "addr", "add", "10.99.0.1/24", "dev", "ib0"], check=True)
    subprocess.run(["ip", "-n", two.space(1), "link", "set", "ib0", "up"], check=True)
    place = ["--nodes", "2", "--node-rank", "{node}", "--rendezvous", "node0:29513", "--secret-file", "secret"]
    faults = f"mount -t tmpfs none {tmp_path}/shared; export GLOO_SOCKET_IFNAME=ib0"
    there = f'cd {tmp_path} && export PYTHONPATH={ROOT}; [ {{node}} = 0 ] || {{ {faults}; }}; exec "$@"'
    out = io.StringIO()
    codes = run_on_all(two, ["sh", "-c", there, "sh", *EVENLY, "doctor", *place, "--out", "shared"], out)
    text = out.getvalue()
    assert codes == [1, 1], text
    assert "node 0 (node0) does not reach node 1 (node1) at 10.99.0.1 (ib0): Network is unreachable" in text
    assert "node 1 (node1), folder: does not see in" in text and "node 0 (node0), folder" not in text
    assert "node0 is 127.0.1.1 there, which is loopback; its ranks listen at eth0 10.77.0.1" in text
    problems = [line for line in text.splitlines() if "PROBLEM" in line]
    assert len(problems) == 3 and "2 problems, which node 0 shows" in text, problems


@pytest.mark.full
@needs_root
def test_a_slow_node_may_use_so_much_of_a_core_and_no_more() -> None:
    with guarded(Lab(name=f"{NAME}s", nodes=1, slow_nodes={0: 0.25})) as lab:
        loop = "import time; until = time.time() + 1\nwhile time.time() < until: pass\nprint(time.process_time())"
        assert float(said(lab, [sys.executable, "-c", loop])[0]) < 0.45
    assert left_over(f"{NAME}s") == []


@pytest.mark.full
@needs_root
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_where_the_maker_is_ended_half_way(signum: int) -> None:
    name = f"{NAME}e"
    making = subprocess.Popen(
        [*lab_command("up", "150x1", "--name", name)],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # which jobs in a shell's background ignore
    )
    while len(left_over(name)) < 3 and making.poll() is None:
        time.sleep(0.01)
    making.send_signal(signum)
    assert making.wait(30) not in (0, 2)
    until_gone(name)


@needs_root
def test_down_ends_what_runs_there() -> None:
    name = f"{NAME}d"
    subprocess.run(lab_command("up", "2x1", "--name", name), cwd=ROOT, check=True)
    running = subprocess.Popen([*lab_command("run", "--name", name), "--", "sleep", "60"], cwd=ROOT)
    while len(subprocess.run(["ip", "netns", "pids", found(name).space(1)], capture_output=True).stdout.split()) < 1:
        time.sleep(0.02)
    with pytest.raises(LabError, match="take it down"), guarded(Lab(name=name, nodes=1)):
        pass
    down(name)
    assert running.wait(10) != 0 and left_over(name) == []
