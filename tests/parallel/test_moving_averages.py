"""Moving averages in buffers: found by forwards from several values, and folded as one device folds them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from evenly.comm.groups import Group
from evenly.errors import RunError
from evenly.parallel.core.buffer_rules import LOOK
from evenly.parallel.core.moving_averages import Probe
from evenly.parallel.core.statistics import RunningStatistics

INPUTS = [torch.randn(n + 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in range(5)]
Update = Callable[["Kept", torch.Tensor], None]


class Kept(nn.Module):
    """Three buffers, which `update` changes."""

    def __init__(self, update: Update, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.update = update
        self.register_buffer("mean", torch.arange(3, dtype=dtype))
        self.register_buffer("size", torch.ones((), dtype=dtype))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.update(self, x)
        return x * 2


def averages(self: Kept, x: torch.Tensor) -> None:
    self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
    self.size = self.size.lerp(x.square().mean().to(self.size), 0.25)
    self.calls += len(x)


def past_autograd(self: Kept, x: torch.Tensor) -> None:
    self.mean.data.copy_(0.99 * self.mean + 0.01 * x.mean(0))


def last(self: Kept, x: torch.Tensor) -> None:
    self.mean.copy_(x[-1])


def probed(model: Kept) -> dict[str, float | None]:
    probe = Probe({name: (model, name) for name in ("mean", "size", "calls")})
    for _ in range(3):
        with probe.forward():
            model(INPUTS[0])
    return probe.factors()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_factors_are_found_to_the_last_digit(dtype: torch.dtype) -> None:
    assert probed(Kept(averages, dtype)) == {"mean": 0.9, "size": 0.75, "calls": 1.0}
    assert probed(Kept(past_autograd, dtype))["mean"] == 0.99
    assert probed(Kept(last, dtype))["mean"] == 0.0


def squared(self: Kept, x: torch.Tensor) -> None:
    self.mean.square_().add_(x.mean(0))


def largest(self: Kept, x: torch.Tensor) -> None:
    self.mean.copy_(torch.maximum(self.mean, x.amax(0)))


def some(self: Kept, x: torch.Tensor) -> None:
    self.mean[0] = 0.9 * self.mean[0] + x[0, 0]


def of_each_other(self: Kept, x: torch.Tensor) -> None:
    self.mean.mul_(0.9).add_(x.mean(0) * self.size)
    self.size.mul_(0.5)


def started(self: Kept, x: torch.Tensor) -> None:
    self.mean.copy_(x.mean(0) if self.calls == 0 else 0.9 * self.mean + 0.1 * x.mean(0))
    self.calls += 1


@pytest.mark.parametrize("update", [squared, largest, some, of_each_other, started])
def test_what_has_not_one_factor_has_none(update: Update) -> None:
    assert probed(Kept(update))["mean"] is None


def test_a_probe_leaves_the_buffers_as_they_were() -> None:
    model = Kept(averages)
    before = copy.deepcopy(model)
    probed(model)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before.buffers(), strict=True))


@pytest.mark.parametrize("update", [averages, past_autograd, last])
def test_folding_after_the_step_is_folding_forward_by_forward(update: Update) -> None:
    plain, ranks = Kept(update), [Kept(update) for _ in range(2)]
    both = [RunningStatistics(model, group=Group.alone(), alone=False) for model in ranks]
    for statistics in both:
        statistics.add_averages({name: a for name, a in probed(Kept(update)).items() if a is not None})
    for _ in range(2):
        calls: list[list[int]] = [[]] * len(INPUTS)
        for number in (1, 0, 4, 2, 3):
            model, statistics = ranks[number % 2], both[number % 2]
            before = copy.deepcopy(model)
            with statistics.recording(number):
                model(INPUTS[number])
            assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before.buffers(), strict=True))
            model(INPUTS[number])  # a recomputation
            with statistics.recording(None):
                model(INPUTS[number])  # a filler
            calls[number] = statistics.calls(number)
        for x in INPUTS:
            plain(x)
        both[0].merge(both[1])
        both[0].sync(calls)
        for found, wanted in zip(ranks[0].buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
        ranks[1].load_state_dict(ranks[0].state_dict())  # as the sum over ranks does


def test_buffers_that_change_are_noticed_in_a_look_and_refused_after_it() -> None:
    model = Kept(averages)
    statistics = RunningStatistics(model, group=Group.alone(), alone=False)
    with statistics.noticing() as changed, statistics.recording(LOOK):
        model(INPUTS[0])
    assert changed == {"mean", "size", "calls"}
    statistics.add_averages({"mean": 0.9, "size": 0.75})
    with pytest.raises(RunError, match="buffer calls changes"), statistics.recording(0):
        model(INPUTS[0])


def test_another_shape_is_refused() -> None:
    model = Kept(lambda kept, x: setattr(kept, "mean", x.mean(0, keepdim=True)))
    statistics = RunningStatistics(model, group=Group.alone(), alone=False)
    statistics.add_averages({"mean": 0.0})
    with pytest.raises(RunError, match=r"buffer mean\s+found: it was \(3,\)"), statistics.recording(0):
        model(INPUTS[0])


def test_a_buffer_that_changes_in_an_evaluation_is_refused() -> None:
    model = Kept(averages)
    statistics = RunningStatistics(model, group=Group.alone(), alone=False)
    with statistics.evaluating():
        model(INPUTS[0])  # it is no moving average yet
    statistics.add_averages({"mean": 0.9})
    with pytest.raises(RunError, match="buffer mean changes in an evaluation"), statistics.evaluating():
        model(INPUTS[0])
