"""exact=bitwise at any magnitude: jobs whose gradients are data, from 1e-30 to 1e30, with ties, on 1 to 4 ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from kept_ranks import KeptRanks
from torch import nn
from torch.distributed.tensor import DTensor

import evenly
from evenly.parallel.data import grouping

ELEMENTS, STEPS = 910, 4


def number(rng: random.Random) -> float:
    """Of any magnitude, or one of a few that add up to a tie, or so small that it tips one."""
    sign = rng.choice([-1, 1])
    if rng.random() < 0.3:
        return sign * rng.random() * 10 ** rng.uniform(-30, 30)
    return sign * (2**24 + rng.randrange(64)) * 2.0 ** rng.choice([0, 0, 0, -24, -53, -60, -90, -120])


def samples() -> list[torch.Tensor]:
    rng = random.Random(5)
    return [torch.tensor([number(rng) for _ in range(ELEMENTS)], dtype=torch.float32) for _ in range(26)]


class Block(nn.Module):
    """A loss of 0 whose gradient is the input."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.weight - self.weight.detach()).flatten() * x).sum()


class Adder(nn.Module):
    """Blocks, a parameter that not every microbatch uses, one that none does, and BatchNorm; no dims in one of them."""

    def __init__(self, *, scalar: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(301), Block(30, 10), Block(299)])
        self.sometimes, self.never = Block(1 if scalar else 9), Block(3)
        self.scalar = Block() if scalar else None
        self.norm = nn.BatchNorm1d(ELEMENTS, momentum=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm(torch.cat([x, -x / 3]))
        parts = x[0].split([301, 300, 299, 1, 9])
        total = torch.stack([block(part) for block, part in zip(self.blocks, parts, strict=False)]).sum()
        if x[0, 0] > 0:
            total = total + self.sometimes(parts[4][: self.sometimes.weight.numel()])
        return total if self.scalar is None else total + self.scalar(parts[3])


def run(
    plan: str, scalar: bool = False, batch: int = 13, steps: int = STEPS, precision: str = "float32"
) -> dict[str, torch.Tensor]:
    """Trains the job in microbatches of one sample; what every step leaves, from any rank."""
    job = evenly.Job(
        model=lambda: Adder(scalar=scalar),
        loss=lambda model, x: evenly.Loss(model(x), 1),
        data=samples(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
        global_batch=batch,
        microbatch=1,
        steps=steps,
        clip_norm=1.0,
        precision=precision,
    )
    found: dict[str, torch.Tensor] = {}
    with evenly.start(job, plan=f"{plan} exact=bitwise") as run:
        for batch in run.batches():
            report = run.step(batch)
            found[f"{report.step} norm"] = torch.tensor(report.grad_norm)
            for name, tensor in run.model.state_dict().items():
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                found[f"{report.step} {name}"] = whole.detach().clone()
    return found


def differing(plan: str, expected: dict[str, torch.Tensor], *options: Any) -> dict[str, int]:
    """By name, the elements in which a run under `plan` has other bits than expected."""
    found = run(plan, *options)
    assert found.keys() == expected.keys()
    counts = {name: int((found[name] != tensor).sum()) for name, tensor in expected.items()}
    return {name: count for name, count in counts.items() if count}


def differing_in_small_buckets(plan: str, expected: dict[str, torch.Tensor], *options: Any) -> dict[str, int]:
    """As `differing`, with a bucket for each parameter and a unit of zero3 for each block."""
    before = {name: getattr(grouping, name) for name in ("FIRST_BUCKET_BYTES", "BUCKET_BYTES", "SMALL_BYTES")}
    try:
        for name in before:
            setattr(grouping, name, 1 if "BUCKET" in name else 0)
        return differing(plan, expected, *options)
    finally:
        for name, value in before.items():
            setattr(grouping, name, value)


@pytest.fixture(scope="module")
def alone(ranks: KeptRanks) -> dict[bool, dict[str, torch.Tensor]]:
    """What one device has, with and without parameters that have no dims."""
    return {scalar: ranks.run(run, "single", scalar, size=1)[0] for scalar in (False, True)}


Alone = dict[bool, dict[str, torch.Tensor]]
PLANS = [("ddp", 2), ("ddp", 3), ("zero1", 2), ("zero1", 4), ("zero2", 3), ("zero3", 2), ("zero3", 3), ("hsdp", 4)]


@pytest.mark.full_but("ddp-2", "zero1-2", "zero3-2")
@pytest.mark.parametrize(("plan", "size"), [*PLANS, ("zero=1 shard=2", 4), ("balanced-dp replicas=3", 1)])
def test_sums_of_any_magnitude_have_the_bits_of_one_device(
    plan: str, size: int, ranks: KeptRanks, alone: Alone
) -> None:
    assert ranks.run(differing, plan, alone[False], size=size) == [{}] * size


@pytest.mark.full_but("zero2-2")
@pytest.mark.parametrize(
    ("plan", "size"), [("ddp", 2), ("ddp", 4), ("zero1", 3), ("zero2", 2), ("zero3", 2), ("hsdp", 4)]
)
def test_and_in_many_buckets(plan: str, size: int, ranks: KeptRanks, alone: Alone) -> None:
    assert ranks.run(differing_in_small_buckets, plan, alone[False], size=size) == [{}] * size


@pytest.mark.full_but("zero1-2")
@pytest.mark.parametrize(("plan", "size"), [("ddp", 2), ("zero1", 2), ("zero2", 3)])
def test_and_of_parameters_without_dims(plan: str, size: int, ranks: KeptRanks, alone: Alone) -> None:
    assert ranks.run(differing, plan, alone[True], True, size=size) == [{}] * size


@pytest.mark.full_but("2-bfloat16")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_and_of_a_microbatch_on_each_rank(precision: str, size: int, ranks: KeptRanks) -> None:
    options = (False, size, 26 // size + 1, precision)  # the last batch has fewer samples, except on 2 ranks
    (expected,) = ranks.run(run, "single", *options, size=1)
    for compare in (differing, differing_in_small_buckets):
        assert ranks.run(compare, "ddp", expected, *options, size=size) == [{}] * size


class Saturated(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Inputs so large, and labels that the model gives itself, that its softmax saturates: of one element, gradients of
    microbatches differ by more than 2**60.
    """

    def __init__(self) -> None:
        self.x = 100 * torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            self.y = saturated_model()(self.x).argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def saturated_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


def saturated(plan: str, steps: int = 50) -> dict[str, torch.Tensor]:
    """The parameters after `steps`."""
    job = evenly.Job(
        model=saturated_model,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        data=Saturated(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        global_batch=24,
        microbatch=1,
        steps=steps,
        clip_norm=1.0,
        seed=3,
    )
    with evenly.start(job, plan=f"{plan} exact=bitwise") as run:
        for batch in run.batches():
            run.step(batch)
        named = {name: p.detach() for name, p in run.model.named_parameters()}
        return {name: (p.full_tensor() if isinstance(p, DTensor) else p).clone() for name, p in named.items()}


@pytest.fixture(scope="module")
def saturated_alone(ranks: KeptRanks) -> dict[str, torch.Tensor]:
    return ranks.run(saturated, "single", size=1)[0]


@pytest.mark.full_but("ddp-2")
@pytest.mark.parametrize(("plan", "size"), [("ddp", 2), ("ddp", 3), ("ddp", 4), ("zero2", 3), ("zero3", 2)])
def test_fifty_steps_of_a_saturated_model_have_the_bits_of_one_device(
    plan: str, size: int, ranks: KeptRanks, saturated_alone: dict[str, torch.Tensor]
) -> None:
    for found in ranks.run(saturated, plan, size=size):
        assert all(torch.equal(found[name], expected) for name, expected in saturated_alone.items())
