"""A layer with running statistics is not computed a second time by itself: its statistics would be added twice."""

from __future__ import annotations

import pytest
import torch
from jobs import classifier_job
from torch import nn

import evenly
from evenly.model.blocks import Block, recomputable


def trained(plan: str) -> dict[str, torch.Tensor]:
    with evenly.start(classifier_job(precision="float64"), plan=plan) as run:
        for batch in run.batches():
            run.step(batch)
        return {name: tensor.clone() for name, tensor in run.model.state_dict().items()}


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_statistics_of_a_layer_of_the_root_are_those_without_recomputation(recompute: str) -> None:
    found, wanted = trained(f"single recompute={recompute}"), trained("single")
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12, msg=name)


def test_layers_with_statistics_among_blocks_are_left_out() -> None:
    kinds = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.InstanceNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)]
    blocks = [Block(str(number), module) for number, module in enumerate([*kinds, nn.Sequential(nn.BatchNorm1d(4))])]
    assert [block.name for block in recomputable(blocks)] == ["0", "2", "4"]
