"""State and parameters in the host's memory: the numbers of one device, and nothing of them on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import classifier_job, tower_job
from kept_ranks import KeptRanks
from torch import nn

import evenly
from evenly.errors import UserError
from evenly.parallel.core.memory import HOST
from evenly.train.step import counting_memory
from evenly.verify.compare import RankComparison, judge
from evenly.verify.ranks import compare_job, keep_reference

STEPS = 4


def compare(plan: str, precision: str, folder: Path) -> RankComparison:
    return compare_job(tower_job(precision=precision), plan, STEPS, folder)


@pytest.mark.full_but("single offload=optimizer-1", "zero3 offload=optimizer-2", "zero3 offload=parameters-1")
@pytest.mark.parametrize(
    ("plan", "size"),
    [
        ("single offload=optimizer", 1),
        ("balanced-dp replicas=2 offload=optimizer", 1),
        ("zero2 offload=optimizer", 3),
        ("zero3 offload=optimizer", 2),
        ("zero3 offload=parameters", 1),
        ("zero3 shard=2 offload=parameters recompute=full", 4),
    ],
)
def test_what_lies_on_the_host_changes_no_number(plan: str, size: int, ranks: KeptRanks, tmp_path: Path) -> None:
    keep_reference(tower_job(precision="float64"), STEPS, tmp_path / "reference")
    row = judge(plan, ranks.run(compare, plan, "float64", tmp_path, size=size))
    assert (row.status, row.reason) == ("equal", "")
    assert row.param_diff is not None and row.param_diff < 1e-11
    keep_reference(tower_job(precision="float32"), STEPS, tmp_path / "reference")
    ranks.run(compare, "single exact=bitwise", "float32", tmp_path, size=1)
    plan += " exact=bitwise"
    assert judge(plan, ranks.run(compare, plan, "float32", tmp_path, size=size)).bits_differ == 0


def peaks(plan: str) -> tuple[dict[str, int], dict[str, int], int]:
    """Of device 0 and of the host, by category, and bytes of the parameters of which this rank has a part."""
    with evenly.start(tower_job(precision="float32"), plan=plan) as run:
        batches = run.batches()
        run.step(next(batches))
        with counting_memory(run) as counter:
            run.step(next(batches))
            now = {place: {c: size for (n, c), size in counter.now.items() if n == place} for place in (0, HOST)}
        return now[0], now[HOST], sum(p.numel() * p.element_size() for p in run.model.parameters())


@pytest.mark.full_but("single offload*", "zero3 offload*")
@pytest.mark.parametrize(
    ("plan", "size", "device", "host"),
    [
        ("single", 1, {"parameters": 1.0, "optimizer": 2.0}, {}),
        ("single offload=optimizer", 1, {"parameters": 1.0}, {"optimizer": 2.0}),
        ("zero1 offload=optimizer", 2, {"parameters": 1.0}, {"optimizer": 1.0}),
        ("zero3 offload=parameters", 2, {}, {"parameters": 0.5, "gradients": 0.5, "optimizer": 1.0}),
    ],
)
def test_memory_is_that_of_the_host(
    plan: str, size: int, device: dict[str, float], host: dict[str, float], ranks: KeptRanks
) -> None:
    found = ranks.run(peaks, plan, size=size)
    for category in ("parameters", "gradients", "optimizer"):  # of all ranks together: they do not hold quite as much
        on_device, on_host = (sum(row[place].get(category, 0) / row[2] for row in found) for place in (0, 1))
        if category != "gradients":  # of what is not offloaded they come and go
            assert on_device == pytest.approx(size * device.get(category, 0), rel=0.05)
        assert on_host == pytest.approx(size * host.get(category, 0), rel=0.05)


def train(plan: str) -> dict[str, torch.Tensor]:
    """Parameters at the end of a run that limits one of them after every step."""
    with evenly.start(tower_job(), plan=plan, steps=STEPS) as run:
        for batch in run.batches():
            run.step(batch)
            with torch.no_grad():
                run.model.blocks[0].gate.clamp_(-0.3, 0.3)
        return {name: p.detach().clone() for name, p in run.model.named_parameters()}


def test_what_a_job_changes_between_steps_stays_changed() -> None:
    expected, found = train("single"), train("single offload=optimizer")
    assert float(expected["blocks.0.gate"].abs().max()) == pytest.approx(0.3)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


class Warm(nn.Linear):
    """A parameter without dims."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.heat = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.heat


def test_state_that_an_optimizer_made_at_once_moves_with_it(tmp_path: Path) -> None:
    job = classifier_job(model=Warm, optimizer=lambda p: torch.optim.Adagrad(p, lr=0.1), precision="float64")
    keep_reference(job, STEPS, tmp_path / "reference")
    row = judge("offload", [compare_job(job, "single offload=optimizer", STEPS, tmp_path)])
    assert (row.status, row.reason) == ("equal", "")
    assert row.param_diff is not None and row.param_diff < 1e-11


class Own(torch.optim.SGD):
    """Of a class that nobody knows."""


def refusal(plan: str) -> str:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return Own(parameters, lr=1e-2)

    try:
        with evenly.start(tower_job(optimizer=optimizer), plan=plan) as run:
            run.step(next(run.batches()))
            return "nothing"
    except UserError as problem:
        return str(problem)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("ddp offload=optimizer", "nothing"),
        ("zero1 offload=optimizer", "optimizer Own under offload=optimizer"),
        ("zero3 offload=parameters", "optimizer Own under offload=parameters"),
    ],
)
def test_an_unknown_optimizer_needs_whole_parameters(plan: str, said: str, ranks: KeptRanks) -> None:
    assert all(said in text for text in ranks.run(refusal, plan, size=2))


def test_memory_is_pinned_only_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    empty = torch.empty_like

    def watched(tensor: torch.Tensor, **how: Any) -> torch.Tensor:
        asked.append(how.get("pin_memory", False))
        return empty(tensor, **how)

    monkeypatch.setattr(torch, "empty_like", watched)
    with evenly.start(tower_job(model=lambda: nn.Sequential(nn.Linear(2, 2))), plan="single offload=optimizer"):
        assert asked and not any(asked)
