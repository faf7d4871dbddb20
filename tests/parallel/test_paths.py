"""Microbatches that take several paths through the model's code, in stages: held against a plain loop."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_ranks import KeptRanks, RankFailure
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import evenly
from evenly.engine.build import build_model
from evenly.engine.find_stages import stage_plan_of
from evenly.errors import EvenlyError
from evenly.parallel.pipeline.model import StagedModel
from evenly.plan import parse_plan
from evenly.verify.compare import judge
from evenly.verify.ranks import compare_job, keep_reference

BATCH, MICROBATCH, STEPS = 12, 3, 6
PLANS = ["pipeline=2", "pipeline=2 schedule=zbv", "data=2 pipeline=2 zero=2", "tensor=2 pipeline=2"]
OTHERS = ["single", "ddp", "zero1", "zero2", "zero3", "tensor=2"]


def layers(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(count))


class Paths(nn.Module):
    """A trunk with a head for each task, and a tower for images; kind: in which way batches differ."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.kind, self.inp, self.blocks = kind, nn.Linear(8, 16), layers(4)
        self.vision_inp, self.vision = nn.Linear(8, 16), layers(2)
        self.heads = nn.ModuleDict({"a": nn.Linear(16, 3), "b": nn.Linear(16, 1)})

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        x = self.inp(batch["x"])
        other = self.kind in ("value", "skip") and float(batch["flag"].sum()) > 0
        if batch["image"] is not None:
            image = self.vision_inp(batch["image"])
            for block in self.vision:
                image = block(image)
            x = x + image
        early = x
        for number, block in enumerate(self.blocks):
            if not (self.kind == "value" and other and number == 1):
                x = x + block(x)
        return self.heads[batch["task"]](x + early if self.kind == "skip" and other else x)


def sample(kind: str, number: int, late: int) -> dict[str, Any]:
    """Number `number` of the data; late: the first step of another path, 0 where they alternate."""
    step, x = number // BATCH, torch.randn(8, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    other = step >= late if late else step % 2 == 1
    image = x.flip(0) if kind == "image" and other else None
    task = "b" if kind == "head" and other else "a"
    return {"x": x, "y": int(x[:3].argmax()), "task": task, "flag": torch.tensor(float(other)), "image": image}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    image = None if samples[0]["image"] is None else torch.stack([one["image"] for one in samples])
    stacked = {key: torch.stack([one[key] for one in samples]) for key in ("x", "flag")}
    y = torch.tensor([one["y"] for one in samples])
    return {**stacked, "y": y, "task": samples[0]["task"], "image": image}


def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    out = model(batch)
    return cross_entropy(out, batch["y"]) if batch["task"] == "a" else mse_loss(out[:, 0], batch["y"].to(out))


def job(kind: str, late: int = 0) -> evenly.Job:
    return evenly.Job(
        model=lambda: Paths(kind), loss=loss, data=[sample(kind, n, late) for n in range(BATCH * STEPS)],
        collate=collate, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), global_batch=BATCH, microbatch=MICROBATCH,
        shuffle=False, steps=STEPS, precision="float64",
    )  # fmt: skip


def by_hand(kind: str, late: int = 0) -> dict[str, torch.Tensor]:
    """The parameters after a plain loop."""
    model = Paths(kind).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        samples = [sample(kind, step * BATCH + n, late) for n in range(BATCH)]
        cut = [samples[n : n + MICROBATCH] for n in range(0, BATCH, MICROBATCH)]
        optimizer.zero_grad()
        sum(loss(model, collate(one)) * len(one) / BATCH for one in cut).backward()  # type: ignore[union-attr]
        optimizer.step()
    return {name: one.detach() for name, one in model.named_parameters()}


def trained(kind: str, plan: str, late: int = 0, out: Path | None = None) -> dict[str, torch.Tensor]:
    """The parameters after a run."""
    with evenly.start(job(kind, late), plan=plan, out=out) as run:
        for batch in run.batches():
            run.step(batch)
        with run.whole_model() as model:
            return {name: one.detach().clone() for name, one in model.named_parameters()}


def ranks_of(plan: str) -> int:
    return 1 if plan == "single" else 4 if plan.count("=2") > (2 if "zero=2" in plan else 1) else 2


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("head", "pipeline=2"),
        *(
            pytest.param(kind, plan, marks=pytest.mark.full)
            for kind in ("head", "image", "value", "skip")
            for plan in (*PLANS, *OTHERS)
            if (kind, plan) != ("head", "pipeline=2") and not (plan == "zero3" and kind in ("image", "value"))
        ),
    ],
)
def test_paths_of_the_first_batches_run_in_stages(kind: str, plan: str, ranks: KeptRanks) -> None:
    expected = by_hand(kind)
    for found in ranks.run(trained, kind, plan, size=ranks_of(plan)):
        for name, one in expected.items():
            assert torch.allclose(found[name], one, rtol=1e-11, atol=1e-13), name


@pytest.mark.full
def test_a_path_first_met_later_runs_where_stages_can(ranks: KeptRanks) -> None:
    expected = by_hand("head", 4)
    for found in ranks.run(trained, "head", "pipeline=2", 4, size=2):
        for name, one in expected.items():
            assert torch.allclose(found[name], one, rtol=1e-11, atol=1e-13), name


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("skip", "pipeline=2"),
        *(pytest.param("skip", plan, marks=pytest.mark.full) for plan in PLANS[1:]),
        pytest.param("image", "pipeline=2", marks=pytest.mark.full),
    ],
)
def test_a_path_that_stages_cannot_run_ends_the_run_with_the_step_before_saved(
    kind: str, plan: str, tmp_path: Path, ranks: KeptRanks
) -> None:
    with pytest.raises(RankFailure, match="the state after step 4 is saved"):
        ranks.run(trained, kind, plan, 4, tmp_path, size=ranks_of(plan))
    assert [one.name for one in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000004"]
    manifest = next((tmp_path / "checkpoints" / "step-00000004").glob("*.json"))
    assert json.loads(manifest.read_text())["step"] == 4


class Drops(nn.Module):
    """Leaves out each block by a draw, now and then all of them."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rate, self.inp, self.blocks, self.out = rate, nn.Linear(8, 16), layers(4), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            draw = torch.rand([])
            if not self.training or draw >= self.rate:
                x = x + block(x)
        return self.out(x)[:, 0]


def dropping(rate: float) -> evenly.Job:
    data = torch.randn(24, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return evenly.Job(
        model=lambda: Drops(rate), loss=lambda model, x: mse_loss(model(x), x.sum(1)), data=data, shuffle=False,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01), global_batch=12, microbatch=3, steps=4, precision="float64",
    )  # fmt: skip


def compared(rate: float, plan: str, folder: Path) -> Any:
    return compare_job(dropping(rate), plan, 4, folder)


@pytest.mark.parametrize(
    ("rate", "plan"),
    [
        (0.9, "pipeline=2"),
        *(pytest.param(rate, plan, marks=pytest.mark.full) for rate in (0.1, 0.3, 0.6) for plan in PLANS[:3]),
        pytest.param(0.999, "pipeline=2 schedule=zbv", marks=pytest.mark.full),
    ],
)
def test_blocks_left_out_by_a_draw_keep_their_stage(rate: float, plan: str, tmp_path: Path, ranks: KeptRanks) -> None:
    keep_reference(dropping(rate), 4, tmp_path / "reference")
    row = judge(plan, ranks.run(compared, rate, plan, tmp_path, size=ranks_of(plan)))
    assert row.status == "equal", row.reason


DRAWS = {  # of a block's input and of its number, what is added to the former; None leaves the block out
    "noise": lambda x, _: torch.randn(x.shape[-1]).to(x),
    "gathered": lambda x, _: torch.rand(9)[torch.randint(9, [1])].to(x),
    "masked": lambda x, _: torch.ones(16).to(x).masked_fill(torch.rand(16) < 0.1, 0),
    "compared": lambda x, _: x * 0 if torch.rand([]) < 0.8 else None,
    "sized": lambda x, _: x * 0 if len((torch.rand(2) < 0.6).nonzero()) else None,
    "selected": lambda x, _: x * 0 if len((one := torch.rand(2))[one < 0.6]) else None,
    "contained": lambda x, number: x * 0 if number in torch.randperm(5)[:4] else None,
    "listed": lambda x, number: x * 0 if number in torch.randperm(5)[:4].tolist() else None,
}


class Drawing(Drops):
    def __init__(self, how: str) -> None:
        super().__init__(0)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for number, block in enumerate(self.blocks):
            if (more := DRAWS[self.how](x, number)) is not None:
                x = x + block(x + more)
        return self.out(x)[:, 0]


@pytest.mark.parametrize("how", DRAWS)
def test_only_draws_that_may_leave_out_blocks_cost_memory(how: str) -> None:
    job, plan = replace(dropping(0), model=lambda: Drawing(how)), parse_plan("pipeline=2").fit(2).complete("float64")
    model = StagedModel(build_model(job, precision="float64", device=None), "cpu")
    owners = stage_plan_of(job, model, plan, device="cpu")[0].owners
    assert owners["inp.weight"] == ((0,) if how in ("noise", "gathered", "masked") else (0, 1))


def drawn(how: str, plan: str, folder: Path) -> Any:
    return compare_job(replace(dropping(0), model=lambda: Drawing(how)), plan, 4, folder)


@pytest.mark.full
@pytest.mark.parametrize("plan", PLANS[:3])
@pytest.mark.parametrize("how", DRAWS)
def test_what_draws_between_blocks_decide_is_the_same_in_stages(
    how: str, plan: str, tmp_path: Path, ranks: KeptRanks
) -> None:
    keep_reference(replace(dropping(0), model=lambda: Drawing(how)), 4, tmp_path / "reference")
    row = judge(plan, ranks.run(drawn, how, plan, tmp_path, size=ranks_of(plan)))
    assert row.status == "equal", row.reason


@pytest.mark.full
@pytest.mark.parametrize("kind", ["image", "value"])
def test_ranks_that_gather_parameters_together_say_no(kind: str, ranks: KeptRanks) -> None:
    for found in ranks.run(refused, kind, "data=1 pipeline=2 zero=3"):
        assert "microbatches call other blocks than each other" in found


def refused(kind: str, plan: str) -> str:
    try:
        with evenly.start(job(kind), plan=plan):
            return ""
    except EvenlyError as problem:
        return str(problem)
