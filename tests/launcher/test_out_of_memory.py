"""Want of memory is told apart from other failures: by exception, and by what the kernel counts."""

from __future__ import annotations

import errno
import resource
from pathlib import Path
from unittest import mock

import pytest
import torch

from evenly.errors import CheckpointError, RunError, SampleError, UserError
from evenly.launcher.agent import _first_failure
from evenly.launcher.out_of_memory import is_out_of_memory, kills_for_memory
from evenly.launcher.rank import LaunchFolder, describe, describe_exit
from evenly.launcher.signals import StopRequest

CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8"
)


def raised_from(error: Exception, cause: Exception) -> Exception:
    try:
        raise error from cause
    except Exception as problem:
        return problem


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError(),
        RuntimeError(CPU),
        RuntimeError("std::bad_alloc"),
        RuntimeError("could not create a memory object"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        raised_from(UserError("calling the job's model", "MemoryError"), MemoryError()),
        SampleError("reading sample 3", "MemoryError (data.py:3)"),
        CheckpointError("save", f"rank 1: RuntimeError: {CPU}"),
    ],
)
def test_want_of_memory(error: Exception) -> None:
    assert is_out_of_memory(error)
    found = describe(1, error)
    assert found.kind == "memory" and found.exit_code == 1 and found.text.startswith("it had no room: ")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a batch that is out of memory"),
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        RuntimeError("Connection closed by peer"),
        RuntimeError("can't start new thread"),
        OSError(errno.ENOSPC, "No space left on device"),
        RunError("step 3: the loss must be finite", "microbatch 0 has the loss nan", "look at these samples"),
        KeyError("memory"),
    ],
)
def test_other_failures(error: Exception) -> None:
    assert not is_out_of_memory(error)
    assert describe(1, error).kind != "memory"


def test_a_thread_that_finds_no_room_under_a_limit() -> None:
    with mock.patch.object(resource, "getrlimit", lambda which: (2**30, resource.RLIM_INFINITY)):
        assert is_out_of_memory(RuntimeError("can't start new thread"))


def test_a_failure_while_another_is_handled_is_its_own() -> None:
    try:
        try:
            raise MemoryError
        except MemoryError:
            raise ValueError("another")  # noqa: B904
    except ValueError as problem:
        assert not is_out_of_memory(problem)


# --- control groups -------------------------------------------------------------------------------------


def machine(folder: Path, group: str, **files: str) -> Path:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(group)
    for name, text in files.items():
        path = folder / "sys/fs/cgroup" / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


V1, V2 = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", "low 0\nhigh 0\nmax 7\noom 5\noom_kill 4\n"


@pytest.mark.parametrize(
    ("group", "files", "kills"),
    [
        ("0::/a/job\n", {"a__job__memory_DOT_events": V2, "memory_DOT_events": V2.replace("4", "9")}, 4),
        ("0::/of/the/host\n", {"memory_DOT_events": V2}, 4),
        ("5:cpu:/a\n4:memory:/a\n0::/\n", {"memory__a__memory_DOT_oom_control": V1}, 3),
        ("4:cpu,memory:/a\n", {"cpu,memory__a__memory_DOT_oom_control": V1}, 3),
        ("4:memory:/of/the/host\n0::/\n", {"memory__memory_DOT_oom_control": V1}, 3),
        ("0::/\n", {}, 0),
        ("0::/\n", {"memory_DOT_events": "low 0\n"}, 0),
        ("", {}, 0),
    ],
)
def test_kills_of_a_control_group(tmp_path: Path, group: str, files: dict[str, str], kills: int) -> None:
    assert kills_for_memory(machine(tmp_path, group, **files)) == kills


def test_a_machine_without_control_groups(tmp_path: Path) -> None:
    assert kills_for_memory(tmp_path) == 0


# --- who was killed -------------------------------------------------------------------------------------


def first_failure(folder: Path, exit_codes: dict[int, int], *, for_memory: bool) -> tuple[bool, str]:
    launch = LaunchFolder(folder, folder, temporary=True)
    found = _first_failure(launch, exit_codes, StopRequest(), for_memory=for_memory)
    return found.kind == "memory", found.found


def test_a_kill_counts_as_want_of_memory_where_the_kernel_has_counted_one(tmp_path: Path) -> None:
    assert first_failure(tmp_path, {1: -9}, for_memory=True) == (
        True,
        first_failure(tmp_path, {1: -9}, for_memory=True)[1],
    )
    assert "the kernel killed it" in first_failure(tmp_path, {1: -9}, for_memory=True)[1]
    assert first_failure(tmp_path, {1: -9}, for_memory=False)[0] is False
    assert first_failure(tmp_path, {1: 3}, for_memory=True)[0] is False  # it ended by itself


def test_a_data_worker_that_was_killed(tmp_path: Path) -> None:
    killed = RuntimeError("DataLoader worker (pid(s) 7) is killed by signal: Killed. ")
    LaunchFolder(tmp_path, tmp_path, temporary=True).put_exit(describe(0, killed))
    assert first_failure(tmp_path, {}, for_memory=True)[0]
    assert not first_failure(tmp_path, {}, for_memory=False)[0]


def test_want_of_memory_is_the_cause_and_a_lost_peer_is_not() -> None:
    memory, peer = describe(1, MemoryError()), describe(0, RuntimeError("Connection closed by peer"))
    assert memory.order < peer.order and describe_exit(2, -9).order < memory.order
