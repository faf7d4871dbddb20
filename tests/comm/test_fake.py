"""What collectives that do nothing say of what they would send."""

from __future__ import annotations

import torch

from evenly.comm.collectives import all_gather, all_reduce, reduce_scatter
from evenly.comm.fake import fake_group


def test_gathering_and_scattering_count_as_half_of_adding_up() -> None:
    summed: list[int] = []
    group = fake_group("tensor", 2, summed.append)
    all_reduce(torch.zeros(4, 2), group)
    assert reduce_scatter(torch.zeros(4, 2), group).shape == (2, 2)
    assert all_gather(torch.zeros(2, 2), group).shape == (4, 2)
    assert summed == [32, 16, 16]
    all_gather(torch.zeros(3), group, sizes=[3, 2])
    assert summed[3:] == [12]
