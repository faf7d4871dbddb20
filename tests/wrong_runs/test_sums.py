"""Losses that are sums, not divided: as a script computes them, its short last batch included."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from battery import full_state, leave
from kept_ranks import KeptRanks
from torch import nn
from torch.nn import functional as F

import evenly
from evenly.errors import JobWarning
from evenly.verify.additive import loss_not_additive
from evenly.verify.reference import reference_steps

STEPS, BATCH = 6, 32
x = torch.randn(100, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
State = dict[str, torch.Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 1)
        for number, parameter in enumerate(self.parameters()):
            nn.init.uniform_(parameter, -1, 1, generator=torch.Generator().manual_seed(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def summed(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(net(batch), batch.sum(1, keepdim=True), reduction="sum")


def as_sum(net: nn.Module, batch: torch.Tensor) -> evenly.Loss:
    total = summed(net, batch)
    return evenly.Sum(total, metrics={"loss of a sample": (total, len(batch))})


def job(**changes: Any) -> evenly.Job:
    given: dict[str, Any] = {"model": Net, "loss": as_sum, "data": x, "shuffle": False, "eval_data": x[:40]}
    given |= {"optimizer": partial(torch.optim.SGD, lr=1e-3), "precision": "float64", "clip_norm": 50.0}
    return evenly.Job(**{**given, "global_batch": BATCH, "microbatch": 5, "steps": STEPS, **changes})


def script(precision: torch.dtype = torch.float64) -> tuple[list[float], State, float]:
    """The script's own loop: losses, what it has in the end, and the loss of its evaluation."""
    net, losses = Net().to(precision), list[float]()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for step in range(STEPS):
        first = step % 4 * BATCH  # the fourth batch has 4 samples
        loss = summed(net, x[first : first + BATCH].to(precision))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 50.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, net.state_dict(), summed(net, x[:40].to(precision)).item()


def trained(plan: str, changes: dict[str, Any]) -> tuple[list[float], State, float, dict[str, float]]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", JobWarning)
        with evenly.start(job(**changes), plan=plan) as run:
            reports = [run.step(batch) for batch in run.batches()]
            assert {one.weight for one in reports} == {1.0}
            state, found = full_state(run), run.evaluate()
    leave()
    return [one.loss for one in reports], state, found.loss, reports[-1].metrics


def check(found: tuple[list[float], State, float, dict[str, float]], tolerance: float = 1e-9) -> None:
    dtype = torch.float64 if tolerance < 1e-6 else torch.float32
    losses, state, evaluated = script(dtype)
    assert found[0] == pytest.approx(losses, rel=tolerance) and found[2] == pytest.approx(evaluated, rel=tolerance)
    for name, value in found[1].items():
        assert torch.allclose(value, state[name], rtol=tolerance, atol=tolerance), name
    assert found[3]["loss of a sample"] == pytest.approx(losses[-1] / BATCH, rel=tolerance)


def test_a_sum_is_that_of_the_script_in_its_short_batch_too(ranks: KeptRanks) -> None:
    for found in ranks.run(trained, "ddp", {}):
        check(found)


@pytest.mark.full
@pytest.mark.parametrize(
    ("plan", "size"),
    [
        *(("single", 1), ("dp replicas=2", 1), ("zero1", 2), ("zero2", 2), ("zero3", 2), ("ddp", 3)),
        *(("tensor=2", 2), ("pipeline=2", 2), ("data=2 pipeline=2", 4), ("single recompute=full", 1)),
    ],
)
@pytest.mark.parametrize("microbatch", [5, BATCH])
def test_a_sum_is_that_of_the_script_under_every_plan(ranks: KeptRanks, plan: str, size: int, microbatch: int) -> None:
    for found in ranks.run(trained, plan, {"microbatch": microbatch}, size=size):
        check(found)


@pytest.mark.full
def test_an_exact_sum_has_the_same_bits_on_any_number_of_ranks(ranks: KeptRanks) -> None:
    changes = {"precision": "float32", "data": x.float(), "eval_data": x[:40].float()}
    alone = ranks.run(trained, "single exact=bitwise", changes, size=1)[0]
    check(alone, 1e-4)
    for found in ranks.run(trained, "ddp exact=bitwise", changes):
        assert found[0] == alone[0] and all(torch.equal(found[1][name], alone[1][name]) for name in alone[1])


def test_passes_of_a_step_add_up_to_their_sum() -> None:
    """As a script that calls backward for several batches before it steps."""
    nets = [Net().double(), Net().double()]
    for first in (0, 32):
        summed(nets[0], x[first : first + 32]).backward()
    with evenly.start(job(clip_norm=None)) as run:
        for first in (0, 32):
            run.forward_backward(run.batch([*x[first : first + 32]]))
        report = run.update()
    leave()
    expected = sum(summed(nets[1], x[first : first + 32]).item() for first in (0, 32))
    assert report.loss == pytest.approx(expected, rel=1e-12)
    norm = torch.stack([p.grad.norm() for p in nets[0].parameters() if p.grad is not None]).norm()
    assert report.grad_norm == pytest.approx(float(norm), rel=1e-9)


def test_the_reference_of_verify_holds_sums_against_the_script() -> None:
    losses, state, evaluated = script()
    *_, last = found = [*reference_steps(job(), STEPS)]
    assert [one.loss for one in found] == pytest.approx(losses, rel=1e-12)
    assert last.evaluation[""]["loss"] == pytest.approx(evaluated, rel=1e-12)
    assert all(torch.allclose(last.tensors[name], value, rtol=1e-12) for name, value in state.items())
    assert loss_not_additive(job()) == ""
    mean = job(loss=lambda net, batch: evenly.Sum(summed(net, batch) / len(batch)))
    assert "has the total" in loss_not_additive(mean)


def test_phases_may_have_sums_and_means() -> None:
    phase = partial(evenly.Phase, optimizer=partial(torch.optim.SGD, lr=1e-3))
    both = {
        "first": phase(parameters="blocks.*", loss=lambda net, batch: evenly.Sum(summed(net, batch))),
        "second": phase(parameters="head.*", loss=lambda net, batch: evenly.Loss(summed(net, batch), len(batch))),
    }
    changes = {"phases": both, "loss": as_sum, "clip_norm": None}
    one = {name: value for name, value in vars(job()).items() if name not in ("optimizer",)} | changes
    with evenly.start(evenly.Job(**one)) as run:
        for batch in run.batches():
            run.step(batch)
        state = full_state(run)
    leave()
    net = Net().double()
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-3) for part in (net.blocks, net.head)]
    for step in range(STEPS):
        batch = x[step % 4 * BATCH :][:BATCH]
        for optimizer, divisor in zip(optimizers, (1, len(batch)), strict=True):
            net.zero_grad()
            (summed(net, batch) / divisor).backward()
            optimizer.step()
    assert all(torch.allclose(state[name], value, rtol=1e-9) for name, value in net.state_dict().items())


def test_a_step_is_a_sum_or_a_mean() -> None:
    def either(net: nn.Module, batch: torch.Tensor) -> evenly.Loss:
        return evenly.Sum(summed(net, batch)) if batch[0, 0] > 0 else evenly.Loss(summed(net, batch), len(batch))

    with evenly.start(job(loss=either)) as run, pytest.raises(evenly.RunError, match=r"is a mean or a sum"):
        run.step(next(run.batches()))
    leave()
    with pytest.raises(TypeError):
        evenly.Sum(torch.zeros(()), weight=2.0)  # pyright: ignore[reportCallIssue]
