"""Models that are built without memory for their parameters."""

from __future__ import annotations

import torch
from torch import nn

from evenly.model.fake import parameters_on_meta


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.ones(4, 3))
        self.first, self.second = nn.Embedding(4, 3), nn.Linear(3, 4)
        self.first.weight = weight
        self.second.weight = weight
        self.second.bias.requires_grad_(False)
        self.register_buffer("places", torch.arange(4))


def test_parameters_have_no_memory_and_keep_their_ties_and_buffers_their_numbers() -> None:
    with parameters_on_meta():
        model = Tied()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model.first.weight is model.second.weight and model.first.weight.shape == (4, 3)
    assert model.first.weight.requires_grad and not model.second.bias.requires_grad
    assert model.get_buffer("places").tolist() == [0, 1, 2, 3]
    assert Tied().first.weight.device.type == "cpu"
