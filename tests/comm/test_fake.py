"""What collectives that do nothing say of what they would send."""

from __future__ import annotations

import torch

from evenly.comm.collectives import all_gather, all_reduce, reduce_scatter
from evenly.comm.fake import fake_group


def test_what_would_be_sent_is_noted() -> None:
    noted: list[tuple[str, int]] = []
    group = fake_group("tensor", 2, lambda *one: noted.append(one))
    all_reduce(torch.zeros(4, 2), group)
    assert reduce_scatter(torch.zeros(4, 2), group).shape == (2, 2)
    assert all_gather(torch.zeros(2, 2), group).shape == (4, 2)
    assert noted == [("all_reduce", 32), ("reduce_scatter", 32), ("all_gather", 32)]
    all_gather(torch.zeros(3), group, sizes=[3, 2])
    assert noted[3:] == [("all_gather", 24)]
