"""An optimizer with two faces (schedule-free): evaluated, saved, averaged and handed out as a script does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kept_ranks import KeptRanks
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import mse_loss

import evenly
from evenly.checkpoint.export import export

STEPS = 8
X = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))


class ScheduleFree(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": False})

    @torch.no_grad()
    def _turn(self, training: bool) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p] and group["training"] != training:
                    p.lerp_(self.state[p]["z"], 1 - group["beta"] if training else 1 - 1 / group["beta"])
            group["training"] = training

    def train(self) -> None:
        self._turn(True)

    def eval(self) -> None:
        self._turn(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["training"]:
                raise RuntimeError("call train() before")
            group["k"] += 1
            part = 1 / group["k"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, part)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - part) - 1))
                z.sub_(p.grad, alpha=group["lr"])


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))


def job(average: bool = False) -> evenly.Job:
    return evenly.Job(
        model=net, loss=lambda m, x: mse_loss(m(x)[:, 0], x.sum(1)), data=X, eval_data=X, optimizer=ScheduleFree,
        global_batch=12, microbatch=3, shuffle=False, steps=STEPS, precision="float64",
        average=evenly.EMA(decay=0.5) if average else None,
    )  # fmt: skip


def plain() -> tuple[list[float], list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses, evaluations after every other step, and the weights and their average in the evaluation's face."""
    model = net().double()
    optimizer = ScheduleFree(model.parameters())
    losses, evaluations = list[float](), list[float]()
    average: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        optimizer.train()
        x = X[12 * (step % 2) :][:12].double()
        loss = mse_loss(model(x)[:, 0], x.sum(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        optimizer.eval()
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        average = {n: average[n].lerp(p, 0.5) if average else p.clone() for n, p in weights.items()}
        if step % 2:
            evaluations.append(mse_loss(model(X.double())[:, 0], X.double().sum(1)).item())
    return losses, evaluations, weights, average


def trained(plan: str, out: Path, last: int, own: bool, average: bool) -> tuple[list[float], list[float], Any, Any]:
    """The same under a plan, going on from the folder; own: whether the loop turns the optimizer itself."""
    losses, evaluations = list[float](), list[float]()
    with evenly.start(job(average), plan=plan, out=out, steps=last, resume=last > STEPS // 2) as run:
        turns: Any = run.optimizer
        for batch in run.batches():
            losses.append(run.step(batch).loss)
            if run.steps_done % 2 == 0:
                if own:
                    turns.eval()
                evaluations.append(run.evaluate(average=False).loss)
                if own:
                    turns.train()
        with run.whole_model() as model:
            weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        found: dict[str, torch.Tensor] = {}
        if average:
            with run.averaged_weights(), run.whole_model() as model:
                found = {name: p.detach().clone() for name, p in model.named_parameters()}
    return losses, evaluations, weights, found


def check(plans: tuple[str, str], ranks: KeptRanks, out: Path, *, own: bool = False, average: bool = False) -> None:
    losses, evaluations, weights, averages = plain()
    found: tuple[list[float], list[float]] = ([], [])
    for plan, last in zip(plans, (STEPS // 2, STEPS), strict=True):
        size = 1 if plan == "single" else 2
        some, more, mine, averaged = ranks.run(trained, plan, out, last, own, average, size=size)[0]
        found[0].extend(some)
        found[1].extend(more)
    assert found[0] == pytest.approx(losses, rel=1e-9) and found[1] == pytest.approx(evaluations, rel=1e-9)
    for wanted, got in ((weights, mine), *([(averages, averaged)] if average else [])):
        assert all(torch.allclose(got[name], one, rtol=1e-9, atol=1e-12) for name, one in wanted.items())
    export(out, out / "exported", average=average)
    saved = load_file(out / "exported" / "model.safetensors")
    wanted = averages if average else weights
    assert all(torch.allclose(saved[name], one, rtol=1e-9, atol=1e-12) for name, one in wanted.items())


def test_evaluations_and_what_is_handed_out_have_the_face_of_evaluations(ranks: KeptRanks, tmp_path: Path) -> None:
    check(("zero2", "single"), ranks, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["single", "ddp", "zero1", "zero3", "tensor=2"])
def test_both_faces_under_every_plan(plan: str, ranks: KeptRanks, tmp_path: Path) -> None:
    check((plan, plan), ranks, tmp_path, average=True)
    check((plan, "zero3"), ranks, tmp_path / "own", own=True)
