"""A process joins one world after the other."""

from __future__ import annotations

import time

import torch
from kept_ranks import KeptRanks

from evenly.cluster.environment import find_here
from evenly.cluster.launch import Launch, start_ranks
from evenly.comm.connect import connect, disconnect
from evenly.comm.operations import all_reduce


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
    results = start_ranks(several_worlds, (0,), Launch(devices=3, start="fork"))
    assert list(results.values()) == [[3.0, 6.0, 9.0]] * 3


def test_ranks_meet_again_where_rank_0_serves_the_store(ranks: KeptRanks) -> None:
    assert ranks.run(several_worlds, 2, size=3) == [[3.0, 6.0, 9.0]] * 3
