"""How many primitives oneDNN keeps where shapes vary: none where making them is cheap."""

from __future__ import annotations

import platform

import pytest
import torch
from torch import nn

from evenly.plan import parse_plan
from evenly.train.look import FEW_PRIMITIVES, worthwhile_primitives

CHEAP = 0 if platform.machine() in ("x86_64", "AMD64") and torch.backends.mkl.is_available() else FEW_PRIMITIVES


@pytest.mark.parametrize(
    ("model", "precision", "count"),
    [
        (nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.GELU()), "float32", CHEAP),
        (nn.Linear(4, 4), "bfloat16", FEW_PRIMITIVES),
        (nn.Linear(4, 4, dtype=torch.bfloat16), "float32", FEW_PRIMITIVES),
        (nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 3)), "float32", FEW_PRIMITIVES),
        (nn.LSTM(4, 4), "float32", FEW_PRIMITIVES),
    ],
)
def test_none_are_kept_where_making_them_is_cheap(model: nn.Module, precision: str, count: int) -> None:
    assert worthwhile_primitives(model, parse_plan("ddp").fit(2).complete(precision)) == count
