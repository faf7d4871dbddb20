from __future__ import annotations

import fcntl
import gc
import multiprocessing.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

import evenly
from evenly.errors import CheckpointError, RunError, SampleError, UserError, note_step
from evenly.launcher.agent import FailedRank, Launch, _first_failure, launch, start_ranks
from evenly.launcher.environment import process_environment
from evenly.launcher.folders import OWNED, clear_abandoned
from evenly.launcher.frozen import all_caches
from evenly.launcher.part import NodePart
from evenly.launcher.rank import LaunchFolder, RankExit, describe, describe_exit
from evenly.launcher.signals import StopRequest
from evenly.observe.recorder import CollectiveCall, Recorder, call_text

LIMIT_S = 600.0  # for a launcher to start, on a busy machine

# --- what the ranks run ---------------------------------------------------------------------------------


def who(offset: int) -> tuple[int, int, str, str]:
    environ = process_environment()
    print(f"output of rank {environ['RANK']}")
    rank = int(environ["RANK"])
    return rank + offset, int(environ["WORLD_SIZE"]), environ["MASTER_ADDR"], environ.get("EVENLY_TEST", "")


def control_folder() -> str:
    return process_environment()["EVENLY_CONTROL"]


def fail_without_logs(logs: Path) -> None:
    shutil.rmtree(logs)
    raise ValueError("nothing is left")


def collector() -> tuple[bool, bool, bool]:
    from torch.distributed import tensor  # its modules keep caches

    of_torch = [one for one in all_caches() if one.__module__.startswith("torch.")]
    return gc.isenabled(), gc.get_freeze_count() > 50_000, bool(tensor) and len(of_torch) > 50


def rank_threads() -> int:
    import torch

    return torch.get_num_threads()


def summed() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value.item()


def raise_in_rank_1(kind: str) -> None:
    if process_environment()["RANK"] == "0":
        time.sleep(60)
    if kind == "user":
        raise UserError("train on nothing", "0 samples", "give samples")
    error = ValueError("bad value")
    note_step(error, 12)
    raise error


def kill_rank_1() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def exit_with(code: int) -> None:
    sys.exit(code)


def unpicklable_result() -> Any:
    return lambda: None


# --- results --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["forkserver", "spawn"])
def test_results_come_in_rank_order(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = process_environment()
    monkeypatch.setenv("EVENLY_TEST", "set late")
    assert launch(who, 10, devices=2, start=start) == [(rank, 2, "127.0.0.1", "set late") for rank in (10, 11)]
    monkeypatch.undo()
    assert process_environment() == before
    assert not _children_that_are_ranks()


def test_ranks_talk_over_loopback() -> None:
    assert launch(summed, devices=2) == [1.0, 1.0]


def test_threads_of_a_rank() -> None:
    results = start_ranks(rank_threads, (), Launch(devices=1, environment={"OMP_NUM_THREADS": "2"}))
    assert results == {0: 2}


def test_a_rank_collects_garbage_of_its_own_alone() -> None:
    assert launch(collector, devices=2) == [(True, True, True)] * 2


class Made(NamedTuple):
    """What a notebook's cell may define."""

    value: int


def test_a_function_that_cannot_be_imported_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Made, "__module__", "__main__")  # no file that ranks could import
    monkeypatch.setattr(sys.modules["__main__"], "Made", Made, raising=False)
    offset = 5
    assert launch(lambda one: Made(one.value + offset), Made(2), devices=2) == [Made(7), Made(7)]


def test_what_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(UserError, match="it cannot be sent to another process"):
        launch(lambda: lock, devices=2)


def test_logs_of_the_other_ranks(tmp_path: Path) -> None:
    start_ranks(who, (0,), Launch(devices=2, log_dir=tmp_path))
    assert (tmp_path / "rank1.log").read_text() == "output of rank 1\n"
    assert [path.name for path in tmp_path.iterdir()] == ["rank1.log"]


def test_a_successful_run_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    remove = LaunchFolder.remove

    def remove_unread(folder: LaunchFolder) -> None:
        assert "evenly-signals" not in {thread.name for thread in threading.enumerate()}
        remove(folder)

    monkeypatch.setattr(LaunchFolder, "remove", remove_unread)
    launch(who, 0, devices=1)
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith("pymp-")]


def test_folders_of_killed_launchers_are_cleared(tmp_path: Path) -> None:
    names = ("evenly-killed", "evenly-alive", "evenly-starting", "evenly-failed", "others-killed")
    for name in names:
        control = tmp_path / name / (".node0" if name != "evenly-failed" else "logs")
        control.mkdir(parents=True)
        (control / "0.pid").write_text("1")
        if name != "evenly-starting":
            os.utime(control, (0, 0))
    alive = os.open(tmp_path / "evenly-alive" / ".node0", os.O_RDONLY)
    fcntl.flock(alive, fcntl.LOCK_EX)
    clear_abandoned(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*names} - {"evenly-killed"}
    os.close(alive)
    clear_abandoned(tmp_path)
    assert not (tmp_path / "evenly-alive").exists()


def test_folders_that_other_launches_remove_meanwhile_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("evenly-ended", "evenly-killed"):
        (tmp_path / name / ".node0").mkdir(parents=True)
        os.utime(tmp_path / name / ".node0", (0, 0))
    scandir = os.scandir

    def ending(path: Any = ".") -> Any:
        if str(path).endswith("evenly-ended"):
            shutil.rmtree(path, ignore_errors=True)
        return scandir(path)

    monkeypatch.setattr("os.scandir", ending)
    clear_abandoned(tmp_path)
    monkeypatch.undo()
    assert [*tmp_path.iterdir()] == []


def test_sockets_of_killed_launchers_are_cleared(tmp_path: Path) -> None:
    """Multiprocessing's folder, where a launcher has marked it; another program's stays."""
    for name in ("pymp-killed", "pymp-alive", "pymp-other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "listener-x").touch()
    for name in ("pymp-killed", "pymp-alive"):
        (tmp_path / name / OWNED).touch()
        os.utime(tmp_path / name / OWNED, (0, 0))
    alive = os.open(tmp_path / "pymp-alive" / OWNED, os.O_RDONLY)
    fcntl.flock(alive, fcntl.LOCK_EX)
    clear_abandoned(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"pymp-alive", "pymp-other"}
    os.close(alive)


def test_a_launcher_marks_its_sockets_folder() -> None:
    launch(who, 0, devices=1)
    mark = Path(multiprocessing.util.get_temp_dir()) / OWNED
    other = os.open(mark, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


def test_what_ranks_record_is_not_where_the_logs_are(tmp_path: Path) -> None:
    """The disk of the logs may be full: a mapped file there ends a process by SIGBUS."""
    [control] = start_ranks(control_folder, (), Launch(devices=1, log_dir=tmp_path)).values()
    assert not Path(control).is_relative_to(tmp_path) and not Path(control).parent.exists()


# --- failures -------------------------------------------------------------------------------------------


def test_an_error_is_reported_also_where_no_log_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(FailedRank, match="ValueError: nothing is left"):
        start_ranks(fail_without_logs, (tmp_path / "logs",), Launch(devices=1, log_dir=tmp_path / "logs"))


def test_a_folder_that_another_launch_writes_to_is_refused(tmp_path: Path) -> None:
    control = tmp_path / ".node0"
    control.mkdir()
    (control / "0.pid").write_text("1")
    other = os.open(control, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(UserError, match=r"another run writes there[^$]*--out"):
        start_ranks(rank_threads, (), Launch(devices=1, log_dir=tmp_path))
    assert [*control.iterdir()] == [control / "0.pid"]
    os.close(other)
    start_ranks(rank_threads, (), Launch(devices=1, log_dir=tmp_path))
    assert not control.exists()


def test_the_raising_rank_is_reported_with_its_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FailedRank) as caught:
        start_ranks(raise_in_rank_1, ("value",), Launch(devices=2, log_dir=tmp_path))
    error = caught.value
    assert (error.rank, error.exit_code) == (1, 1)
    assert error.asked == "rank 1 failed at step 12"
    assert error.found.startswith("ValueError: bad value (test_launch.py:")
    assert str(tmp_path / "rank1.log") in error.do
    assert "ValueError: bad value" in (tmp_path / "rank1.log").read_text()
    assert "raise_in_rank_1" in error.traceback
    assert capfd.readouterr().err == ""
    assert not _children_that_are_ranks()


def test_a_users_mistake_keeps_its_exit_code_and_advice_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(FailedRank) as caught:
        launch(raise_in_rank_1, "user", devices=2)
    assert [*tmp_path.glob("evenly-*")] == []
    assert caught.value.exit_code == 2
    assert (caught.value.asked, caught.value.found) == ("train on nothing", "0 samples")
    assert caught.value.do == "give samples"


def test_a_killed_rank_is_reported_and_not_the_one_that_waited_for_it(tmp_path: Path) -> None:
    with pytest.raises(FailedRank) as caught:
        start_ranks(kill_rank_1, (), Launch(devices=2, log_dir=tmp_path))
    assert caught.value.rank == 1
    assert "killed by SIGKILL" in caught.value.found
    assert "out-of-memory" in caught.value.found
    assert not _children_that_are_ranks()


def test_exits_of_ranks() -> None:
    assert launch(exit_with, 0, devices=1) == [None]
    with pytest.raises(FailedRank, match=r"it called sys\.exit\(3\) \(test_launch\.py:"):
        launch(exit_with, 3, devices=1)
    with pytest.raises(FailedRank, match="cannot be sent to the launcher"):
        launch(unpicklable_result, devices=1)


_kept: list[psutil.Process] = []


@pytest.fixture(autouse=True)
def _others_keep_ranks() -> None:
    _kept.clear()
    _kept.extend(_children_that_are_ranks())


def _children_that_are_ranks() -> list[psutil.Process]:
    """Children that still run, but for the servers that end with this process, and for kept ranks of other tests."""
    children = psutil.Process().children(recursive=True)
    return [c for c in children if c.is_running() and not _is_server(c) and c not in _kept]


def _is_server(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
        return process.status() == psutil.STATUS_ZOMBIE or (
            process.ppid() == os.getpid() and ("resource_tracker" in command or "forkserver" in command)
        )
    except psutil.NoSuchProcess:
        return True


# --- which failure is the cause: no processes -----------------------------------------------------------


def _ending(rank: int, error: BaseException, time_s: float) -> RankExit:
    found = describe(rank, error)
    return RankExit(**{**vars(found), "time_s": time_s})


LOST = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4")


@pytest.mark.parametrize(
    ("exits", "exit_codes", "first"),
    [
        ([(0, ValueError("a"), 2.0), (1, ValueError("b"), 1.0)], {}, 1),
        ([(0, LOST, 1.0), (1, ValueError("b"), 2.0)], {}, 1),
        ([(0, LOST, 1.0)], {0: 1, 2: -9}, 2),
        ([(0, RuntimeError("not known to be a loss"), 1.0)], {2: -9}, 2),
        ([(0, LOST, 1.0)], {2: -6}, 2),
        ([(0, ValueError("a"), 9e9)], {2: -6}, 0),
        ([(0, LOST, 2.0), (1, ConnectionResetError("Connection reset by peer"), 1.0)], {}, 1),
        ([(0, KeyboardInterrupt(), 1.0), (1, LOST, 2.0)], {}, 1),
        ([], {3: 1}, 3),
    ],
)
def test_the_cause_comes_first(tmp_path: Path, exits: Any, exit_codes: dict[int, int], first: int) -> None:
    folder = LaunchFolder(tmp_path, tmp_path, False)
    for rank, error, time_s in exits:
        folder.put_exit(_ending(rank, error, time_s))
    assert _first_failure(folder, exit_codes, StopRequest()).rank == first


@pytest.mark.parametrize("waits", [False, True])
def test_a_rank_that_aborts_is_the_cause_unless_it_waited(waits: bool, tmp_path: Path) -> None:
    """Rank 0 waits for rank 2, which has nothing to do with it, unless rank 1 does too."""
    folder = LaunchFolder(tmp_path, tmp_path, False)
    records = [Recorder(tmp_path / f"{rank}.record", rank) for rank in range(3)]
    call = call_text(*CollectiveCall("all_reduce", "data [0, 2]", "float32", (3,)))
    for rank in (0, 2):
        records[rank].leave(records[rank].enter(1, call))
    records[0].enter(2, call)
    if waits:
        records[1].enter(1, call_text(*CollectiveCall("recv", "pipeline [0, 1]", "float32", (3,), detail="from 0")))
    for record in records:
        record.close()
    folder.put_exit(_ending(0, LOST, 1.0))
    assert _first_failure(folder, {1: -signal.SIGABRT}, StopRequest()).rank == (2 if waits else 1)


def test_a_mistake_within_a_step_is_told_with_the_step(tmp_path: Path) -> None:
    folder, error = LaunchFolder(tmp_path, tmp_path, False), UserError("sum the loss", "no weight", "give one")
    note_step(error, 7)
    folder.put_exit(_ending(1, error, 1.0))
    told = _first_failure(folder, {}, StopRequest())
    assert (told.asked, told.found) == ("rank 1 failed at step 7", "sum the loss: no weight")


def test_a_real_error_while_stopping_is_shown_and_a_loss_is_not(tmp_path: Path) -> None:
    folder = LaunchFolder(tmp_path, tmp_path, False)
    stop = StopRequest()
    stop.ask(signal.SIGINT)
    folder.put_exit(_ending(0, LOST, 1.0))
    assert _first_failure(folder, {}, stop).exit_code == 130
    folder.put_exit(_ending(1, OSError("disk full"), 2.0))
    assert _first_failure(folder, {}, stop).rank == 1


def test_words_of_errors() -> None:
    assert describe(0, SampleError("read sample 3", "truncated", "remove it")).text == "read sample 3: truncated"
    assert describe(0, SampleError("read sample 3")).exit_code == 1
    assert describe(0, ValueError()).found == "ValueError"
    assert describe(0, LOST).kind == "peer"
    forward = RunError("the first forward under plan zero3", str(LOST), "look")
    forward.__cause__ = LOST
    assert describe(0, forward).kind == describe(0, CheckpointError("save", f"RuntimeError: {LOST}")).kind == "peer"
    assert (
        describe(0, SampleError("read sample 3", "Connection reset by peer")).kind == "error"
    )  # of the user's storage
    assert describe(0, ValueError("Broken pipe")).kind == "error"
    assert describe_exit(0, -11).found == "it was killed by SIGSEGV"
    assert describe_exit(0, -6).kind == "aborted"


@pytest.mark.parametrize(
    ("wrong", "words"), [({"devices": 0}, "at least 1"), ({"devices": 1, "start": "thread"}, "forkserver or spawn")]
)
def test_what_cannot_be_started(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        start_ranks(who, (0,), Launch(**wrong))


def test_a_log_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="keep the ranks' logs"):
        start_ranks(who, (0,), Launch(devices=1, log_dir=tmp_path / "file"))


# --- launchers as processes of their own ----------------------------------------------------------------

LAUNCHER = """
import os, signal, sys, time
from pathlib import Path
from evenly.launcher.agent import Launch, start_ranks, warm_up
from evenly.errors import EvenlyError

def work(folder, mode):
    stopped = []
    if mode != "deaf":
        signal.signal(signal.SIGINT, lambda *_: stopped.append(1))
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank = os.environ["RANK"]
    Path(folder, f"started{rank}").write_text(str(os.getpid()))
    while not stopped:
        time.sleep(0.02)
    time.sleep(0.5)
    Path(folder, f"saved{rank}").write_text(str(len(stopped)))
    return "stopped"

if __name__ == "__main__":
    mode, folder, *rest = sys.argv[1:]
    Path(folder, "launcher").write_text(str(os.getpid()))
    warm_up()
    try:
        launch = Launch(devices=2, start=rest[0], log_dir=Path(folder, "logs"))
        print(start_ranks(work, (folder, mode), launch))
    except EvenlyError as error:
        print(error)
        sys.exit(error.exit_code)
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Any:
    """Starts launchers; fails the test if a process of theirs outlives them."""
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    started: list[subprocess.Popen[str]] = []
    package, folder = str(Path(evenly.__file__).parents[1]), str(tmp_path)
    mine = {"PYTHONPATH": package, "EVENLY_TEST_FOLDER": folder, "TMPDIR": folder}
    environment = {**process_environment(), **mine}

    def start(*args: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(script), *args]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True
        )
        started.append(process)
        return process

    yield start
    left = _wait_for(lambda: not _processes_of(tmp_path), 30)
    remaining = _processes_of(tmp_path)
    for process in remaining:
        process.kill()
    for process in started:
        process.kill()
        process.communicate()
    assert left, f"outlived their launcher: {remaining}"


def _processes_of(folder: Path) -> list[psutil.Process]:
    """Every process that inherited the mark of this test's launchers."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get("EVENLY_TEST_FOLDER")
            if mark == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_for(condition: Any, timeout_s: float) -> bool:
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


def _started(folder: Path) -> bool:
    return all((folder / f"started{rank}").exists() for rank in (0, 1))


@pytest.mark.full_but("forkserver")
@pytest.mark.parametrize("start", ["forkserver", "spawn"])
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path, launcher: Any, start: str) -> None:
    process = launcher("work", str(tmp_path), start)
    assert _wait_for(lambda: _started(tmp_path) or process.poll() is not None, LIMIT_S)
    assert process.poll() is None, process.communicate()
    process.kill()
    process.wait()
    ranks = [int((tmp_path / f"started{rank}").read_text()) for rank in (0, 1)]
    # The servers end after them, when they see that nobody is left; the fixture waits for those.
    assert _wait_for(lambda: not any(_runs(pid) for pid in ranks), 5)


@pytest.mark.full_but("15-spawn")
@pytest.mark.parametrize(("signum", "start"), [(signal.SIGINT, "forkserver"), (signal.SIGTERM, "spawn")])
def test_a_first_signal_lets_ranks_finish(tmp_path: Path, launcher: Any, signum: int, start: str) -> None:
    process = launcher("work", str(tmp_path), start)
    assert _wait_for(lambda: _started(tmp_path) or process.poll() is not None, LIMIT_S)
    assert process.poll() is None, process.communicate()
    # As a terminal does: to the whole group of the foreground process.
    os.killpg(process.pid, signum)
    output, errors = process.communicate(timeout=400)
    assert (process.returncode, output, errors) == (0, "{0: 'stopped', 1: 'stopped'}\n", "")
    # One signal each, though the launcher's whole group had it.
    assert [(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)] == ["1", "1"]


def test_a_second_signal_ends_ranks_that_do_not_stop(tmp_path: Path, launcher: Any) -> None:
    process = launcher("deaf", str(tmp_path), "forkserver")
    assert _wait_for(lambda: _started(tmp_path) or process.poll() is not None, LIMIT_S)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=400)
    assert process.returncode == 130
    assert "stopped by SIGINT" in output
    assert errors == ""


def test_ranks_of_a_node_are_those_of_their_part_of_the_world() -> None:
    part = NodePart(node=1, nodes=2, first_rank=4, size=6, round=3, port=9, interface="lo")
    results = start_ranks(who, (10,), Launch(devices=2, part=part))
    assert results == {4: (14, 6, "127.0.0.1", ""), 5: (15, 6, "127.0.0.1", "")}
