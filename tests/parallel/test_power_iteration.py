"""Spectral norm: each microbatch sees the vectors of one device, whoever runs it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from evenly.comm.groups import Group
from evenly.data.generators import reseed
from evenly.errors import RunError
from evenly.parallel.core.buffer_rules import LOOK
from evenly.parallel.core.statistics import RunningStatistics

INPUTS = [torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in range(5)]


class Net(nn.Module):
    """Both forms; one layer is called twice, one never trains."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.new = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4), n_power_iterations=2)
        self.old = nn.utils.spectral_norm(nn.Linear(4, 4))
        self.still = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)).eval()
        self.checkpointed, self.preserves = checkpointed, True
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.checkpointed:
            return self.compute(x)
        return checkpoint(self.compute, x, use_reentrant=False, preserve_rng_state=self.preserves)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return self.still(self.new(self.old(self.new(x)).tanh()).tanh())


def copy_of(model: nn.Module) -> nn.Module:
    """Without hooks and graphs."""
    found = type(model)()
    found.load_state_dict(model.state_dict())
    return found


def same_buffers(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.buffers(), other.buffers(), strict=True))


def run(model: nn.Module, statistics: RunningStatistics, number: int) -> torch.Tensor:
    reseed(number)
    with statistics.recording(number):
        return model(INPUTS[number])


def ranks_of(model: nn.Module, count: int) -> list[tuple[nn.Module, RunningStatistics]]:
    """Copies of `model`, each looked at as a run does at its start."""
    found = []
    for _ in range(count):
        mine = copy_of(model)
        if isinstance(model, Net):
            mine.checkpointed = model.checkpointed
        statistics = RunningStatistics(mine, group=Group.alone(), alone=count == 1)
        with statistics.recording(LOOK):
            mine(INPUTS[0])
        found.append((mine, statistics))
    return found


@pytest.mark.parametrize("shares", [[[0, 1, 2, 3, 4]], [[0, 2, 4], [1, 3]], [[3, 4], [2], [0, 1]]])
def test_ranks_iterate_as_one_device_does(shares: Sequence[Sequence[int]]) -> None:
    plain = Net()
    ranks = ranks_of(plain, len(shares))
    for _ in range(2):
        wanted = [plain(x) for x in INPUTS]
        calls: list[list[int]] = [[]] * len(INPUTS)
        for (model, statistics), share in zip(ranks, shares, strict=True):
            before = copy_of(model)
            for number in share:
                assert torch.equal(run(model, statistics, number), wanted[number])
                calls[number] = statistics.calls(number)
            assert same_buffers(model, before)  # until the step ends
        (first, statistics), *others = ranks
        for _, other in others:
            statistics.merge(other)
        assert calls == [[2, 1, 0]] * len(INPUTS)
        statistics.sync(calls)
        assert same_buffers(first, plain)
        for model, _ in others:
            model.load_state_dict(first.state_dict())  # as the sum over ranks does


@pytest.mark.parametrize("backwards", [[0, 1, 2], [2, 0, 1]])
def test_a_repeated_forward_does_not_iterate(backwards: Sequence[int]) -> None:
    """In the order of any schedule."""
    plain = Net()
    ((model, statistics),) = ranks_of(Net(checkpointed=True), 1)
    outputs = [run(model, statistics, number) for number in range(3)]
    for number in backwards:
        outputs[number].square().sum().backward()
        plain_output = copy_of(plain)  # its vectors are those of the step's begin
        for one in range(number + 1):
            output = plain_output(INPUTS[one])
        plain.zero_grad()
        wanted = torch.autograd.grad(output.square().sum(), [*plain_output.parameters()])
        for parameter, gradient in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-13, atol=1e-13)
        model.zero_grad()
    statistics.sync([statistics.calls(number) for number in range(3)])
    for x in INPUTS[:3]:
        plain(x)
    assert same_buffers(model, plain)


def test_a_filler_may_be_repeated_and_leaves_no_trace() -> None:
    ((model, statistics),) = ranks_of(Net(checkpointed=True), 1)
    before = [buffer.clone() for buffer in model.buffers()]
    reseed(7)
    with statistics.recording(None):
        loss = model(INPUTS[0]).sum() * 0
    reseed(8)
    loss.backward()
    assert all(map(torch.equal, before, model.buffers()))


def test_what_cannot_be_repeated_is_refused() -> None:
    ((model, statistics),) = ranks_of(Net(checkpointed=True), 1)
    model.preserves = False
    output = run(model, statistics, 0)
    reseed(99)
    with pytest.raises(RunError, match=r"computing the spectral norm of new\S* again in the backward"):
        output.sum().backward()


def test_evaluation_and_other_calls_leave_no_trace() -> None:
    ((model, statistics),) = ranks_of(Net(), 1)
    before = copy_of(model)
    model(INPUTS[0])
    model.eval()
    with statistics.recording(0):
        model(INPUTS[0])
    assert statistics.calls(0) == [0, 0, 0] and same_buffers(model, before)


def test_vectors_that_were_set_between_steps_are_the_first_of_the_next() -> None:
    """As a resumed run sets them."""
    ((model, statistics),) = ranks_of(Net(), 1)
    other = copy_of(model)
    other(INPUTS[0])
    model.load_state_dict(other.state_dict())
    assert torch.equal(run(model, statistics, 0), other(INPUTS[0]))


class Varying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(self.one(x)) if x is INPUTS[1] else self.one(x)


def test_microbatches_that_call_it_unequally_often_are_refused_on_several_ranks() -> None:
    plain = Varying()
    (alone,) = ranks_of(plain, 1)
    for number, x in enumerate(INPUTS):
        assert torch.equal(run(*alone, number), plain(x))
    alone[1].sync([alone[1].calls(number) for number in range(5)])
    assert same_buffers(alone[0], plain)
    shared = ranks_of(plain, 2)[0]
    for number in range(3):
        run(*shared, number)
    with pytest.raises(RunError, match="not every microbatch calls it equally often: 1 to 2 times"):
        shared[1].sync([shared[1].calls(number) for number in range(3)])
