"""Parameters within `run.whole_parameters()`: read and changed as in the same loop in plain torch on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kept_ranks import KeptRanks
from test_own_loops import PlainLoop, assert_close, class_loss, job, whole_state
from torch import nn

import evenly
from evenly.errors import RunError
from evenly.verify.reference import named_tensors

PLANS = [("single", 1), *((plan, 2) for plan in ("ddp", "zero1", "zero3", "tensor=2", "pipeline=2"))]


@torch.no_grad()
def change(model: nn.Module) -> None:
    """Change parameters by bounds, by what they say themselves, and one row of one."""
    model.last.weight.clamp_(-0.2, 0.2)
    model.first.bias[1:3] = 0.5
    for parameter in model.layers[1].parameters():
        parameter.mul_(1.0 / parameter.norm().clamp(min=1.0)).add_(0.01 * parameter.mean())


def norms(model: nn.Module, run: Any = None) -> list[float]:
    """Return the norms of the parameters of the last layer, unless another rank has it."""
    if run is not None and run.composed.pipeline is not None and "last.weight" in run.composed.pipeline.placeholders:
        return []
    return [float(parameter.norm()) for parameter in model.last.parameters()]


def changed_in_hook_and_loop(plan: str) -> None:
    found: list[list[float]] = []

    def in_hook(run: evenly.Run, _: Any) -> None:
        with run.whole_parameters():
            change(run.model)
            with run.whole_parameters():
                found.append(norms(run.model, run))

    plain = PlainLoop(job())
    step, expected = plain.optimizer.step, []

    def changed_before() -> None:
        change(plain.model)
        step()

    plain.optimizer.step = changed_before
    with evenly.start(job(on_step=in_hook), plan=plan) as run:
        for batch in run.batches():
            run.forward_backward(batch)
            with run.whole_parameters():
                change(run.model)
            run.update()
            with run.whole_parameters():
                change(run.model)
            plain.step([plain.of_data()])
            change(plain.model)
            expected = norms(plain.model)
            change(plain.model)
            assert_close(whole_state(run), named_tensors(plain.model))
            assert not found[-1] or found[-1] == pytest.approx(expected, rel=1e-9)
    assert len(found) == plain.steps_done > 2


@pytest.mark.full_but("single-1", "zero3-2")
@pytest.mark.parametrize(("plan", "size"), PLANS)
def test_they_are_those_of_one_device(plan: str, size: int, ranks: KeptRanks) -> None:
    ranks.run(changed_in_hook_and_loop, plan, size=size)


def test_inside_a_step_they_are_refused() -> None:
    runs: list[evenly.Run] = []

    def loss(model: nn.Module, batch: Any) -> evenly.Loss:
        if runs:
            with runs[0].whole_parameters():
                change(model)
        return class_loss(model, batch)

    with evenly.start(job(loss=loss), plan="single") as run:
        runs.append(run)
        batch = next(run.batches())
        with pytest.raises(RunError, match=r"run.whole_parameters\(\)\n.*a step or an evaluation is under way"):
            run.step(batch)
        runs.clear()
