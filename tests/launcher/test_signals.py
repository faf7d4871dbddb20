"""Stop signals end a launcher at any moment, with a word and the signal's exit code."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evenly.launcher.signals import StopRequest

LIMIT_S = 120

STUCK = """
import sys, threading
from multiprocessing import forkserver
from pathlib import Path
from evenly.launcher.rank import LaunchFolder
from evenly.launcher.signals import StopRequest, forwarded_signals

folder = Path(sys.argv[1])
(folder / "0.pid").write_text(sys.argv[2])
forkserver._forkserver._forkserver_pid = int(sys.argv[3])
with forwarded_signals(LaunchFolder(folder / "logs", folder, True), StopRequest()):
    print("ready", flush=True)
    threading.Event().wait()  # as for the rest of what a rank has sent
"""

DEAF = """
import os, signal, time

os.setpgid(0, 0)
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""

STARTING = """
import time
from evenly.launcher.signals import named_signals

with named_signals():
    try:
        print("ready", flush=True)
        time.sleep(600)
    finally:
        print("tidied", flush=True)
"""

ENDING = """
import atexit, sys
from evenly.launcher.signals import end_with_code

atexit.register(lambda: (print("ready", flush=True), sys.stdin.read()))
end_with_code(lambda: sys.exit(130))
"""


def started(code: str, *arguments: object) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_launcher_that_is_stuck(second: signal.Signals, tmp_path: Path) -> None:
    rank = started(DEAF)
    (tmp_path / "control").mkdir()
    server = started(DEAF)  # a fork server that would take its time
    launcher = started(STUCK, tmp_path / "control", rank.pid, server.pid)
    launcher.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.wait(1)
    launcher.send_signal(second)
    _, errors = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 130
    assert errors == "the run was stopped by SIGINT and its ranks were killed\n"
    rank.communicate(timeout=LIMIT_S)
    server.communicate(timeout=LIMIT_S)
    assert rank.returncode == server.returncode == -signal.SIGKILL
    assert not (tmp_path / "control").exists()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_before_ranks_stand_is_named(signum: signal.Signals, code: int) -> None:
    process = started(STARTING)
    process.send_signal(signum)
    output, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, output, errors) == (code, "tidied\n", f"evenly: stopped by {signum.name}\n")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_when_all_is_done_leaves_the_exit_code(signum: signal.Signals) -> None:
    process = started(ENDING)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, errors) == (130, "")


def test_a_launcher_waits_from_the_moment_its_ranks_are_to_end() -> None:
    stop = StopRequest(signum=signal.SIGQUIT, hard=True)
    assert stop.waited_hard_s == 0.0
    stop = StopRequest()
    stop.end()
    assert 0.0 <= stop.waited_hard_s < 60.0 and stop.hard
