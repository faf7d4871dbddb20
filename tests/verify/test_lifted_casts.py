"""Casts to float32 inside a job are computed in float64 where that is what is compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from verified import verified

import evenly
import evenly.verify.ranks as ranks_module
from evenly.launcher.environment import find_here
from evenly.plan import parse_plan
from evenly.verify.disturb import LiftedCasts
from evenly.verify.ranks import write_references
from evenly.verify.tasks import KEPT_CASTS
from evenly.verify.trajectory import measure_rounding, read_rounding

FILE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_lifted_casts import make
def job(name="norm"):
    return make(name)
"""


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.weight = nn.Linear(8, 16), nn.Linear(16, 8), nn.Parameter(torch.ones(8))
        self.register_buffer("rates", torch.arange(0, 8, 2, dtype=torch.int64).float() / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        angles = torch.outer(torch.arange(len(x)).float(), self.rates.float()).cos().repeat_interleave(2, 1)
        x = x + self.down(F.gelu(self.up(self.weight * (wide * angles).to(x.dtype))))
        scores = (x @ x.T).masked_fill(torch.eye(len(x), dtype=torch.bool), torch.finfo(torch.float32).min)
        return x + F.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype) @ x


class Bits(Norm):
    """Reads the bits of numbers of 32 bits, which those of 64 have not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = super().forward(x)
        return kept + 0 * (x.float().view(torch.int32) & 1).view(kept.shape)


def make(name: str) -> evenly.Job:
    kind = {"norm": Norm, "bits": Bits}[name]
    x = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
    return evenly.Job(
        model=lambda: nn.Sequential(kind(), kind(), nn.Linear(8, 3)),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        data=TensorDataset(x, (x.sum(1) > 0).long()),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
        global_batch=8,
        microbatch=4,
        steps=3,
        name=name,
    )


def test_what_asks_for_float32_gets_float64() -> None:
    wide, whole, bits = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int32), torch.ones(2).int()
    with LiftedCasts() as lifted:
        found = [
            wide.float(), wide.to(torch.float32), wide.to("cpu", torch.float32), wide.type(torch.float32),
            wide.softmax(0, dtype=torch.float32), wide.sum(dtype=torch.float32), whole.float(),
            F.one_hot(whole.long()).float(), torch.arange(3, dtype=torch.float32),
            torch.full((2,), torch.finfo(torch.float32).min, dtype=torch.float32),
        ]  # fmt: skip
        kept = [
            wide.to(torch.bfloat16), wide.half(), wide.int(), bits.view(torch.float32), wide.to(torch.float8_e4m3fn),
            wide.new_zeros(2, dtype=torch.bool),
        ]  # fmt: skip
    assert {one.dtype for one in found} == {torch.float64} and lifted.count == 6
    assert [one.dtype for one in kept] == [
        torch.bfloat16, torch.float16, torch.int32, torch.float32, torch.float8_e4m3fn, torch.bool,
    ]  # fmt: skip
    assert wide.float().dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "keep", "said", "least", "most"),
    [
        ("norm", False, "float32 casts of the job are computed in float64", 0.0, 1e-12),
        ("norm", True, "", 1e-9, 1.0),
        ("bits", False, "float32 casts are kept: the job fails without", 1e-9, 1.0),
    ],
)
def test_rounding_is_that_of_float64_where_casts_are_lifted(
    name: str, keep: bool, said: str, least: float, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "casts.py"
    path.write_text(FILE)
    if keep:
        (tmp_path / KEPT_CASTS).touch()
    runs: list[Any] = [("none", 1), ("forward", 1)]
    for rank in range(2):
        place = replace(find_here(), rank=rank)
        monkeypatch.setattr(ranks_module, "find_here", lambda place=place: place)
        found = write_references(path, {"name": name}, "float64", parse_plan("tensor=2"), 3, tmp_path, runs)
        assert rank or said in found.unseen  # type: ignore[union-attr]
    measure_rounding(tmp_path, "forward")
    rounding = read_rounding(tmp_path / "rounding-forward.json")
    assert least < max(largest for largest, _ in rounding.of_tensors(3).values()) < most


@pytest.mark.full
@pytest.mark.parametrize("name", ["norm", "bits"])
def test_plans_are_compared_with_lifted_casts(name: str, tmp_path: Path) -> None:
    (tmp_path / "casts.py").write_text(
        FILE
        + f"""
def job():
    return make({name!r})
"""
    )
    plans = ["single", "ddp", "zero1", "zero2", "zero3", "tensor=2", "pipeline=2", "ddp recompute=full"]
    for plan, status, reason in verified(tmp_path / "casts.py", plans, tmp_path, steps=3):
        assert status == "equal" or (status == "unsupported" and "=" in plan), (plan, reason)
