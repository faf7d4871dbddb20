"""Jobs whose hooks and loops move more than the optimizer does, and plain loops of the same in torch alone."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import evenly

FILE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import own_hooks
def job(name):
    return own_hooks.make(name)
"""
WITH_LOOP = (
    FILE
    + """
def loop(run):
    own_hooks.LOOPS[run.job.name](run)
"""
)


class Experts(nn.Module):
    """A router whose bias is moved after each step, by how often each expert was chosen in the whole batch."""

    def __init__(self, experts: int = 4, width: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, width) * 0.3)
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("counts", torch.zeros(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).sigmoid()
        chosen = (scores + self.bias).topk(2, -1).indices
        if self.training:
            with torch.no_grad():
                self.counts += F.one_hot(chosen, len(self.bias)).sum((0, 1)).to(self.counts.dtype)
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        return x + torch.einsum("be,bd,edf->bf", weights, x, self.up)


class Student(nn.Module):
    """A head, and a teacher's, which follows it after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.body(x).relu()
        return self.head(features) + 0.5 * self.teacher(features)


def balance(run: Any, _: Any) -> None:
    with torch.no_grad(), run.whole_parameters():
        for module in run.model.modules():
            if isinstance(module, Experts):
                module.bias += 0.01 * (module.counts.mean() - module.counts).sign()
                module.counts.zero_()


def follow(run: Any, _: Any) -> None:
    with torch.no_grad(), run.whole_parameters():
        for old, new in zip(run.model.teacher.parameters(), run.model.head.parameters(), strict=True):
            old.mul_(0.9).add_(new, alpha=0.1)


def shake(run: Any, _: Any) -> None:
    """Draws, and writes what it has drawn."""
    with torch.no_grad(), run.whole_parameters():
        run.model.body.bias.add_(0.01 * torch.randn(8).to(run.model.body.bias) + 0.001 * random.random())


def follow_on_main(run: Any, _: Any) -> None:
    """A mistake: the copies of the other ranks stay."""
    if run.is_main:
        follow(run, _)


def asks_for_more(run: Any, _: Any) -> None:
    run.composed.close()  # nothing of a plain loop's


def plain(run: Any) -> None:
    for batch in run.batches():
        report = run.step(batch)
        run.log({"reward": report.loss})


def clamped(run: Any) -> None:
    for batch in run.batches():
        run.step(batch)
        with torch.no_grad(), run.whole_parameters():
            run.model.body.weight.clamp_(-0.2, 0.2)


def of_two_passes(run: Any) -> None:
    for batch in run.batches():
        with run.whole_model() as model:
            samples = [
                (x + 0.1 * torch.randn(8), torch.tensor(int(model(x.to(model.body.weight)).argmax())))
                for x, _ in batch.samples()
            ]
        run.forward_backward(batch)
        run.forward_backward(run.batch(samples), loss=second_loss)
        run.update()
        if random.random() < 0.5:
            follow(run, None)


def fails(run: Any) -> None:
    run.executor.look([])


def second_loss(model: nn.Module, batch: Any) -> evenly.Loss:
    return evenly.Loss(0.3 * F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))


def loss(model: nn.Module, batch: Any) -> evenly.Loss:
    return evenly.Loss(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))


HOOKS: dict[str, Any] = {
    "experts": balance, "teacher": follow, "drawing": shake, "on main": follow_on_main,
    "stopping": lambda run, report: report.step == 2 and run.stop(),
    "internal": asks_for_more, "loop": (), "loop clamped": (), "loop of two passes": (), "loop that fails": (),
}  # fmt: skip
LOOPS = {"loop": plain, "loop clamped": clamped, "loop of two passes": of_two_passes, "loop that fails": fails}


def make(name: str, **changes: Any) -> evenly.Job:
    x = torch.randn(30, 8, generator=torch.Generator().manual_seed(0))
    experts = lambda: nn.Sequential(Experts(), Experts(), nn.Linear(8, 3))  # noqa: E731
    fields: dict[str, Any] = dict(
        model=experts if name == "experts" else Student,
        loss=loss,
        data=TensorDataset(x, (x.sum(1) > 0).long()),
        optimizer=lambda p: torch.optim.AdamW([q for q in p if q.requires_grad], lr=1e-2),
        global_batch=12,
        microbatch=3,
        steps=3,
        on_step=HOOKS[name],
        name=name,
    )
    return evenly.Job(**{**fields, **changes})
