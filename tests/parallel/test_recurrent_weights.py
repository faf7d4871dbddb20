"""Recurrent layers see the weights of the last update, also where they would move them as they do on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from jobs import Unlike, classifier_job
from kept_ranks import KeptRanks
from torch import nn
from torch.distributed.tensor import DTensor

import evenly
from evenly.parallel.core.recurrent_weights import RecurrentWeights
from evenly.verify.compare import RankComparison, judge
from evenly.verify.ranks import compare_job, keep_reference


def job() -> evenly.Job:
    return classifier_job(model=Unlike, precision="float64")  # it has an LSTM


@contextmanager
def moving() -> Iterator[None]:
    """Within, a layer moves its weights as cuDNN's do: the parameters stay, and have other memory."""

    def flatten_parameters(layer: nn.RNNBase) -> None:
        for weight in layer._flat_weights:
            if isinstance(weight, torch.Tensor) and not isinstance(weight, DTensor):
                weight.data = weight.data.clone()

    with patch.object(nn.RNNBase, "flatten_parameters", flatten_parameters):
        yield


def compare(plan: str, folder: Path) -> RankComparison:
    with moving():
        return compare_job(job(), plan, 3, folder)


@pytest.mark.full_but("single zero=3 offload*", "zero3-2", "ddp-2")
@pytest.mark.parametrize(
    ("plan", "size"),
    [
        ("single zero=3 offload=parameters", 1),
        ("zero3", 2),
        ("zero3 recompute=full", 2),
        ("zero2", 2),
        ("ddp", 2),
        ("single offload=optimizer", 1),
    ],
)
def test_they_see_the_last_update(plan: str, size: int, ranks: KeptRanks, tmp_path: Path) -> None:
    keep_reference(job(), 3, tmp_path / "reference")
    row = judge(plan, ranks.run(compare, plan, tmp_path, size=size))
    assert (row.status, row.reason) == ("equal", "")
    assert row.param_diff is not None and row.param_diff < 1e-11


def test_the_layers_move_their_weights_again_after_the_run() -> None:
    model, moved = nn.Sequential(nn.GRU(2, 3), nn.Linear(3, 1)), list[nn.RNNBase]()
    with patch.object(nn.RNNBase, "flatten_parameters", lambda layer: moved.append(layer)):
        weights = RecurrentWeights(model)
        model[0].flatten_parameters()
        assert not moved
        weights.close()
        model[0].flatten_parameters()
    assert moved == [model[0]]
