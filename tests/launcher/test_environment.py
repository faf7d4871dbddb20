from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from evenly.comm.world import World
from evenly.errors import UserError
from evenly.launcher.environment import (
    LOOPBACK_INTERFACE,
    PORTS,
    ProcessInfo,
    become_environment,
    changed_environment,
    find_process,
    process_environment,
    rank_environment,
)
from evenly.launcher.gpus import may_have_gpus
from evenly.launcher.slurm import first_host, tasks_per_node

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "a",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "11",
    "SLURM_NNODES": "3",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_STEP_NODELIST": "gpu[003-004,09]",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
PMI = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4", "MASTER_ADDR": "h"}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def shown(place: ProcessInfo) -> tuple[Any, ...]:
    return (
        place.launcher,
        (place.rank, place.size),
        (place.local_rank, place.local_size),
        (place.node, place.nodes),
        place.address,
    )


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("plain", (0, 1), (0, 1), (0, 1), "127.0.0.1")),
        (TORCHRUN, ("torchrun", (3, 4), (1, 2), (1, 2), "node0")),
        (without(TORCHRUN, "TORCHELASTIC_RUN_ID"), ("torchrun", (3, 4), (1, 2), (1, 2), "node0")),
        (without(TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE"), ("torchrun", (3, 4), (1, 2), (1, 2), "node0")),
        (SRUN, ("srun", (9, 11), (1, 3), (2, 3), "gpu003")),
        # sbatch alone: inside an allocation, but not started by srun
        (without(SRUN, "SLURM_STEP_ID"), ("plain", (0, 1), (0, 1), (0, 1), "127.0.0.1")),
        (SRUN | {"MASTER_ADDR": "head"}, ("srun", (9, 11), (1, 3), (2, 3), "head")),
        (
            {
                "SLURM_STEP_ID": "4",
                "SLURM_PROCID": "1",
                "SLURM_LOCALID": "1",
                "SLURM_NODEID": "0",
                "SLURM_NTASKS": "2",
                "SLURM_NNODES": "1",
            },
            ("srun", (1, 2), (1, 2), (0, 1), "127.0.0.1"),
        ),
        # torchrun started by srun: the nearest wins, though srun's numbers differ
        (SRUN | TORCHRUN, ("torchrun", (3, 4), (1, 2), (1, 2), "node0")),
        # what many batch scripts set by hand, agreeing with srun
        (SRUN | {"RANK": "9", "WORLD_SIZE": "11"}, ("srun", (9, 11), (1, 3), (2, 3), "gpu003")),
        (MPIRUN, ("mpirun", (1, 2), (1, 2), (0, 1), "127.0.0.1")),
        # mpirun's daemons are started by srun, which counts those and not the ranks
        (SRUN | MPIRUN, ("mpirun", (1, 2), (1, 2), (0, 1), "127.0.0.1")),
        (
            MPIRUN | {"OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_RANK": "5", "MASTER_ADDR": "h0"},
            ("mpirun", (5, 6), (1, 2), (2, 3), "h0"),
        ),
        (PMI, ("pmi", (5, 8), (1, 4), (1, 2), "h")),
        # srun --mpi=pmi2 sets both; srun says more
        (SRUN | {"PMI_RANK": "9", "PMI_SIZE": "11"}, ("srun", (9, 11), (1, 3), (2, 3), "gpu003")),
    ],
)
def test_find_place(environ: dict[str, str], expected: tuple[Any, ...]) -> None:
    assert shown(find_process(environ)) == expected


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "0"}, ["RANK=0", "WORLD_SIZE not set"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "RANK not set"]),
        ({"LOCAL_RANK": "0"}, ["RANK and WORLD_SIZE not set"]),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ["LOCAL_RANK and LOCAL_WORLD_SIZE and MASTER_ADDR and MASTER_PORT not set"]),
        (without(TORCHRUN, "MASTER_PORT"), ["MASTER_PORT not set"]),
        (TORCHRUN | {"RANK": "4"}, ["RANK=4", "WORLD_SIZE=4", "not below the number of ranks"]),
        (TORCHRUN | {"RANK": "one"}, ["RANK=one", "not a whole number"]),
        (TORCHRUN | {"RANK": "-1"}, ["RANK=-1", "not a whole number"]),
        (TORCHRUN | {"RANK": ""}, ["RANK=", "not a whole number"]),
        (TORCHRUN | {"WORLD_SIZE": "0"}, ["WORLD_SIZE=0", "below 1"]),
        (TORCHRUN | {"LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2", "local rank"]),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, ["more ranks than there are"]),
        (TORCHRUN | {"GROUP_RANK": "2"}, ["GROUP_RANK=2", "number of nodes"]),
        (TORCHRUN | {"MASTER_PORT": "70000"}, ["MASTER_PORT=70000", "65535"]),
        (SRUN | {"RANK": "0", "WORLD_SIZE": "11"}, ["RANK=0 but srun says 9"]),
        (SRUN | {"RANK": "9", "WORLD_SIZE": "4"}, ["WORLD_SIZE=4 but srun says 11"]),
        (MPIRUN | {"RANK": "0", "WORLD_SIZE": "2"}, ["RANK=0 but mpirun says 1"]),
        (SRUN | {"WORLD_SIZE": "11"}, ["WORLD_SIZE=11", "RANK not set"]),
        (without(SRUN, "SLURM_PROCID"), ["SLURM_PROCID not set"]),
        (SRUN | {"SLURM_PROCID": "11"}, ["SLURM_PROCID=11", "SLURM_STEP_NUM_TASKS=11"]),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, ["SLURM_STEP_TASKS_PER_NODE=4(x2)", "11 tasks"]),
        (without(SRUN, "SLURM_STEP_NODELIST"), ["SLURM_STEP_NODELIST not set"]),
        (without(MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE"), ["OMPI_COMM_WORLD_LOCAL_SIZE not set"]),
        (MPIRUN | {"OMPI_COMM_WORLD_SIZE": "4"}, ["OMPI_COMM_WORLD_SIZE=4", "MASTER_ADDR"]),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, ["MPI_LOCALRANKID and MPI_LOCALNRANKS not set"]),
    ],
)
def test_unusable_environment_is_named(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        find_process(environ)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.do


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu[003-007,09],login1", "gpu003"),
        ("login1,gpu[003-007]", "login1"),
        ("n[5]", "n5"),
        ("rack1-node[10,12]", "rack1-node10"),
        ("a.b.example", "a.b.example"),
        ("r[1-2]n[3-4]", "r1n3"),
        ("gpu[1-2]-ib", "gpu1-ib"),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", "gpu[", "gpu[a-b]", "a b"])
def test_unreadable_node_list(nodelist: str) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        first_host(nodelist)


def test_tasks_per_node() -> None:
    assert tasks_per_node("4(x2),3") == [4, 4, 3]
    assert tasks_per_node("1") == [1]
    with pytest.raises(UserError, match="cannot be read"):
        tasks_per_node("4(2)")


def test_port_is_one_for_a_job_step_and_differs_between_steps() -> None:
    first = find_process(SRUN).port
    assert first in PORTS
    assert find_process(SRUN | {"SLURM_PROCID": "8", "SLURM_LOCALID": "0"}).port == first
    assert find_process(SRUN | {"SLURM_STEP_ID": "1"}).port != first
    assert find_process(SRUN | {"MASTER_PORT": "1234"}).port == 1234


def test_rank_environment_keeps_what_the_user_set() -> None:
    assert rank_environment({})["OMP_NUM_THREADS"] == "1"
    assert rank_environment({})["GLOO_SOCKET_IFNAME"] == LOOPBACK_INTERFACE
    assert rank_environment({}, "eth1")["NCCL_SOCKET_IFNAME"] == "eth1"
    assert (
        rank_environment({"OMP_NUM_THREADS": "4", "GLOO_SOCKET_IFNAME": "eth0"})
        .keys()
        .isdisjoint({"OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"})
    )


def test_environment_is_changed_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENLY_TEST_KEPT", "old")
    with changed_environment({"EVENLY_TEST_KEPT": "new", "EVENLY_TEST_ADDED": "1"}):
        os.environ["EVENLY_TEST_INSIDE"] = "1"
        assert process_environment()["EVENLY_TEST_KEPT"] == "new"
    after = process_environment()
    assert after["EVENLY_TEST_KEPT"] == "old"
    assert not after.keys() & {"EVENLY_TEST_ADDED", "EVENLY_TEST_INSIDE"}


def test_a_rank_takes_its_launchers_environment_and_keeps_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENLY_TEST_STALE", "1")
    monkeypatch.setenv("RANK", "3")
    with changed_environment({}):
        become_environment({"EVENLY_TEST_FRESH": "1", "RANK": "0"}, {"WORLD_SIZE": "7"})
        assert process_environment() == {"EVENLY_TEST_FRESH": "1", "RANK": "3", "WORLD_SIZE": "7"} | {
            name: value for name, value in process_environment().items() if name.startswith("TORCHELASTIC_")
        }


def test_world_cannot_be_changed_and_names_its_axes() -> None:
    groups = {"data": object(), "tensor": None}
    world = World(
        rank=1, local_rank=1, size=2, local_size=2, node=0, nodes=1, device="cpu", backend="gloo", groups=groups
    )
    groups["pipeline"] = None
    assert not world.is_main
    assert world.group("data") is groups["data"]
    assert world.group("tensor") is None
    with pytest.raises(UserError, match="'pipeline'") as caught:
        world.group("pipeline")
    assert "data, tensor" in str(caught.value)
    with pytest.raises(AttributeError):
        world.rank = 0  # type: ignore[misc]
    with pytest.raises(TypeError):
        world.groups["data"] = None  # type: ignore[index]


def test_world_alone() -> None:
    assert World.alone().is_main
    assert World.alone().backend == "gloo"
    assert World.alone("cuda:1").backend == "nccl"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these files")
def test_files_of_gpu_drivers_are_known(tmp_path: Path) -> None:
    (tmp_path / "null").touch()
    assert not may_have_gpus(tmp_path)
    for name in ("nvidiactl", "kfd", "dxg", "nvmap"):
        (tmp_path / name).touch()
        assert may_have_gpus(tmp_path), name
        (tmp_path / name).unlink()
