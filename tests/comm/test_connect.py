"""From a place to a device, to the others, and to them once more."""

from __future__ import annotations

import socket
import time

import pytest
import torch
from kept_ranks import KeptRanks

from evenly.comm.connect import connect, disconnect, find_device
from evenly.comm.operations import all_reduce, barrier, gather_values
from evenly.errors import RunError, UserError
from evenly.launcher.agent import Launch, start_ranks
from evenly.launcher.environment import ProcessInfo, find_here


def place(*, rank: int = 0, size: int = 1, port: int = 1) -> ProcessInfo:
    return ProcessInfo(
        rank=rank, local_rank=rank, size=size, local_size=size, node=0, nodes=1, address="127.0.0.1", port=port,
        launcher="plain",
    )  # fmt: skip


def test_a_rank_takes_its_own_gpu_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device(place(rank=1, size=2)) == "cuda:1"
    with pytest.raises(UserError) as caught:
        find_device(place(size=4))
    assert "4 devices" in caught.value.asked and "2 GPUs" in caught.value.found


def test_without_gpus_a_rank_is_a_cpu_process() -> None:
    assert find_device(place(size=4)) == "cpu"


def test_a_process_alone_joins_nothing() -> None:
    world = connect(place())
    assert (world.size, world.device, world.backend) == (1, "cpu", "gloo")
    tensor = torch.ones(2)
    assert all_reduce(tensor, world.group("data")).tolist() == [1.0, 1.0]
    assert gather_values("x", world.group("files")) == ["x"]
    barrier(world.group("data"))
    disconnect(world)
    disconnect(world)


def talk() -> tuple[list[float], list[int]]:
    world = connect(find_here())
    try:
        summed = all_reduce(torch.tensor([1.0, float(world.rank)]), world.group("data")).tolist()
        barrier(world.group("files"))
        return summed, gather_values(world.rank, world.group("files"))
    finally:
        disconnect(world)


def test_ranks_sum_and_gather(ranks: KeptRanks) -> None:
    assert ranks.run(talk, size=3) == [([3.0, 3.0], [0, 1, 2])] * 3


def join_at(port: int) -> str:
    with pytest.raises(RunError) as caught:
        connect(place(rank=0, size=2, port=port))
    return str(caught.value)


def test_a_port_that_is_taken_is_told() -> None:
    ranks = KeptRanks()  # of its own: a process whose joining failed cannot join again
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        try:
            [message] = ranks.run(join_at, port, size=1, limit_s=60)
        finally:
            ranks.close()
    assert f"rank 0 of 2 joining the others at 127.0.0.1:{port}" in message
    assert "in use" in message.lower() and "MASTER_PORT" in message


def several_worlds(early: int) -> list[float]:
    """Sums in three worlds; rank `early` comes first to each but the first."""
    sums: list[float] = []
    for number in range(3):
        place = find_here()
        if place.rank != early and number > 0:
            time.sleep(0.5)
        world = connect(place)
        sums.append(float(all_reduce(torch.tensor(float(place.rank + number)), world.group("data"))))
        disconnect(world)
    return sums


def test_ranks_meet_again_in_the_launchers_store() -> None:
    results = start_ranks(several_worlds, (0,), Launch(devices=3))
    assert list(results.values()) == [[3.0, 6.0, 9.0]] * 3


def test_ranks_meet_again_where_rank_0_serves_the_store(ranks: KeptRanks) -> None:
    assert ranks.run(several_worlds, 2, size=3) == [[3.0, 6.0, 9.0]] * 3


def test_a_process_that_is_in_a_process_group_is_refused() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RunError, match="in a process group already"):
            connect(place())
    finally:
        torch.distributed.destroy_process_group()
