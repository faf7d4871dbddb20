"""Parameters that share memory, and those that only lie next to each other in one."""

from __future__ import annotations

import torch
from torch import nn

from evenly.model.overlap import find_overlapping


def model_of(**tensors: torch.Tensor) -> nn.Module:
    model = nn.Module()
    for name, tensor in tensors.items():
        setattr(model, name, nn.Parameter(tensor))
    return model


def test_shared_elements_are_found_whatever_the_views() -> None:
    memory = torch.arange(12.0)
    square = memory[:9].view(3, 3)
    assert find_overlapping(model_of(a=square, b=square.t())) == ("a", "b")
    assert find_overlapping(model_of(z=memory[9:], a=memory[:4], b=memory[3:6])) == ("a", "b")
    assert find_overlapping(model_of(a=square[:, 1], b=square[1])) == ("a", "b")


def test_neighbours_and_ties_are_left_alone() -> None:
    memory = torch.arange(12.0)
    square = memory.view(3, 4)
    assert find_overlapping(model_of(a=memory[:4], b=memory[4:])) is None
    assert find_overlapping(model_of(a=square[:, :2], b=square[:, 2:])) is None
    tied = model_of(a=memory)
    tied.b = tied.a
    assert find_overlapping(tied) is None
