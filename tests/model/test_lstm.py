"""The layer of an LSTM on the CPU: what it keeps, beside what torch's own operation keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evenly.model.costs import CostCounter
from evenly.model.lstm import workspace_bytes
from evenly.parallel.core.memory import MemoryCounter
from evenly.planner.profile import Profile
from evenly.planner.profile_recorder import profile_module

STEPS, SAMPLES, WIDTH, HIDDEN = 9, 4, 5, 11


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("steps", "samples", "width", "hidden"),
    [(1, 1, 1, 1), (7, 3, 5, 11), (32, 8, 64, 128), (33, 5, 300, 100), (10, 4, 32, 256), (16, 2, 512, 64)],
)
def test_its_workspace(steps: int, samples: int, width: int, hidden: int, dtype: torch.dtype) -> None:
    state, bias = torch.zeros(samples, hidden, dtype=dtype), torch.zeros(4 * hidden, dtype=dtype)
    try:
        kept = torch.ops.aten.mkldnn_rnn_layer(
            torch.zeros(steps, samples, width, dtype=dtype),
            torch.zeros(4 * hidden, width, dtype=dtype),
            torch.zeros(4 * hidden, hidden, dtype=dtype),
            bias, bias, state, state, False, [], 2, hidden, 1, True, False, False, True,
        )[3]  # fmt: skip
    except RuntimeError as error:
        # oneDNN computes an LSTM in bfloat16 only where the processor has AVX-512.
        if dtype == torch.bfloat16 and "primitive descriptor" in str(error):
            pytest.skip("this processor has no LSTM in bfloat16")
        raise
    assert workspace_bytes(steps, samples, width, hidden=hidden, itemsize=dtype.itemsize) == kept.nbytes


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.states = nn.LSTM(WIDTH, HIDDEN, num_layers=2, bidirectional=True)
        self.last = nn.Linear(2 * HIDDEN, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.states(x)[0])


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().sum()


def read(dtype: torch.dtype = torch.float32) -> Profile:
    return profile_module(Reader().to(dtype), loss, torch.empty(STEPS, SAMPLES, WIDTH, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_reading_holds_what_a_run_holds(dtype: torch.dtype) -> None:
    model, x = Reader().to(dtype), torch.randn(STEPS, SAMPLES, WIDTH, dtype=dtype)
    with MemoryCounter() as counter:
        counter.track((*model.parameters(), x), "parameters")
        held = counter.now[0, "parameters"]
        kept = loss(model, x)
        after_forward = counter.peak_bytes(0) - held
    assert kept.requires_grad
    now = peak = 0
    for one in read(dtype).forward:
        peak, now = max(peak, now + one.peak.total), now + one.left.total
    assert peak == after_forward


def test_its_products_are_counted() -> None:
    of_layers = sum(2 * 2 * 4 * HIDDEN * (width + HIDDEN) for width in (WIDTH, 2 * HIDDEN))  # in both directions
    expected = STEPS * SAMPLES * (of_layers + 2 * 2 * HIDDEN * 3)
    works = read().works
    for stage, times in (("forward", 1), ("backward", 2)):
        found = [work for (where, _), ones in works.items() if where == stage for work in ones]
        assert sum(work.flops * work.times for work in found) == times * expected
        assert sum(work.times for work in found if work.rows == SAMPLES) == times * 4 * STEPS
    with CostCounter() as counter:
        loss(Reader(), torch.randn(STEPS, SAMPLES, WIDTH))
    assert counter.flops == expected
