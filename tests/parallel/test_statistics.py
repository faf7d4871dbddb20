"""Running statistics: folded after the step as torch folds them call by call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from evenly.comm.groups import Group
from evenly.errors import RunError, UserError
from evenly.parallel.core.statistics import RunningStatistics


class Net(nn.Module):
    """Two layers, one of them called a varying number of times."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=momentum)
        self.other = nn.InstanceNorm1d(3, track_running_stats=True)

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = self.norm(x) + 0.1 * x
        return self.other(x)


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
def test_folding_after_the_step_is_folding_call_by_call(momentum: float | None) -> None:
    torch.manual_seed(0)
    plain = Net(momentum).double()
    model = copy.deepcopy(plain)
    statistics = RunningStatistics(model, group=Group.alone())
    for _ in range(2):
        inputs = [(torch.randn(4, 3, 5, dtype=torch.float64) + n, times) for n, times in enumerate((1, 2, 0, 3))]
        outputs = [plain(*pair) for pair in inputs]
        calls = []
        for number, pair in reversed([*enumerate(inputs)]):  # any order of microbatches
            with statistics.recording(number):
                torch.testing.assert_close(model(*pair), outputs[number])
            calls.insert(0, statistics.calls(number))
        assert calls == [[1, 1], [2, 1], [0, 1], [3, 1]]
        statistics.sync(calls)
        for (name, found), (_, wanted) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13, msg=name)


def test_recomputation_and_evaluation_leave_no_trace() -> None:
    model = Net(0.1)
    before = {name: b.clone() for name, b in model.named_buffers()}
    statistics = RunningStatistics(model, group=Group.alone())
    with statistics.recording(0):
        model(torch.randn(4, 3, 5), 1)
    model(torch.randn(4, 3, 5), 1)  # outside of recording, as a recomputation in the backward is
    assert statistics.calls(0) == [1, 1]
    model.eval()
    with statistics.recording(1):
        model(torch.randn(4, 3, 5), 1)
    assert statistics.calls(1) == [0, 0]
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())


def test_a_forward_that_raises_leaves_the_layer_as_it_was() -> None:
    model = nn.BatchNorm1d(3)
    statistics = RunningStatistics(model, group=Group.alone())
    running = model.running_mean
    with statistics.recording(0), pytest.raises(ValueError, match="expected 2D or 3D input"):
        model(torch.randn(3))
    assert model.running_mean is running and model.momentum == 0.1


def test_closing_gives_the_layer_back() -> None:
    model = nn.BatchNorm1d(3)
    statistics = RunningStatistics(model, group=Group.alone())
    statistics.close()
    model(torch.randn(4, 3))
    assert model.num_batches_tracked == 1


def test_synchronised_statistics_are_refused() -> None:
    with pytest.raises(UserError, match="SyncBatchNorm"):
        RunningStatistics(nn.Sequential(nn.SyncBatchNorm(3)), group=Group.alone())


class OwnForward(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) - self.running_mean


class OwnName(nn.BatchNorm1d):
    pass


class WithActivation(nn.BatchNorm2d):
    """As others write it: torch's code once more, with an activation and a dropout behind it."""

    weight_of_new = 1.0  # of what torch adds

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__(channels, **options)
        self.drop, self.act = nn.Dropout(0.5), nn.ReLU(inplace=True)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        factor = self.momentum or 0.0
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        found = nn.functional.batch_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            factor * self.weight_of_new,
            self.eps,
        )
        return self.act(self.drop(found))


class OtherWeight(WithActivation):
    weight_of_new = 0.5


class Uncounted(WithActivation):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        found = super().forward(input)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.sub_(1)
        return found


class Assigning(nn.BatchNorm2d):
    """Its statistics are other tensors after each call."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        var, mean = torch.var_mean(input.detach(), (0, 2, 3))
        self.num_batches_tracked = None if self.num_batches_tracked is None else self.num_batches_tracked + 1
        count = self.num_batches_tracked
        new = 1 / float(count) if self.momentum is None and count is not None else self.momentum or 0.0
        self.running_mean = torch.lerp(self.running_mean, mean, new)
        self.running_var = torch.lerp(self.running_var, var, new)
        return nn.functional.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("kind", [WithActivation, Assigning])
def test_a_forward_of_its_own_that_follows_torch_s_rule_is_recorded(
    kind: type[nn.BatchNorm2d], momentum: float | None
) -> None:
    torch.manual_seed(0)
    model = kind(3, momentum=momentum).double()
    plain, before = copy.deepcopy(model), torch.get_rng_state()
    statistics = RunningStatistics(model, group=Group.alone())
    assert torch.equal(torch.get_rng_state(), before)
    inputs = [torch.randn(4, 3, 2, 2, dtype=torch.float64) + n for n in range(3)]
    for x in inputs:
        plain(x)
    for number in (2, 0, 1):
        with statistics.recording(number):
            model(inputs[number])
    statistics.sync([statistics.calls(number) for number in range(3)])
    for (name, found), (_, wanted) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13, msg=name)


@pytest.mark.parametrize("kind", [OtherWeight, Uncounted])
def test_a_forward_of_its_own_with_another_rule_is_refused(kind: type[WithActivation]) -> None:
    with pytest.raises(UserError, match=f"layer 0 is a {kind.__name__} with a forward of its own"):
        RunningStatistics(nn.Sequential(kind(3)), group=Group.alone())


def test_layers_with_a_forward_of_their_own_are_refused() -> None:
    RunningStatistics(nn.Sequential(OwnName(3), nn.InstanceNorm2d(3, track_running_stats=True)), group=Group.alone())
    RunningStatistics(nn.Sequential(OwnForward(3, track_running_stats=False)), group=Group.alone())
    with pytest.raises(UserError, match="layer 0 is a OwnForward with a forward of its own"):
        RunningStatistics(nn.Sequential(OwnForward(3)), group=Group.alone())


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x


def test_other_buffers_that_change_are_refused_on_several_ranks() -> None:
    model = nn.Sequential(Counter())
    alone = RunningStatistics(model, group=Group.alone())
    with alone.recording(0):
        model(torch.ones(1))
    shared = RunningStatistics(model, group=Group("data", [0, 1], own=0, handle=None, device=torch.device("cpu")))
    with pytest.raises(RunError, match=r"buffer 0\.seen changes"), shared.recording(0):
        model(torch.ones(1))
