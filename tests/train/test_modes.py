"""Training and evaluation mode as a script has them, and what a model's own train() and eval() do to its weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kept_ranks import KeptRanks
from torch import nn
from torch.nn.functional import cross_entropy, linear

import evenly
from evenly.errors import EvenlyError

STEPS, EVERY, BATCH = 5, 2, 12
PLANS = ("single", "ddp", "zero1", "zero2", "zero3", "tensor=2", "pipeline=2")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, 8)
        self.norm.running_mean.fill_(0.3)  # as pretrained

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Frozen(Block):
    """Its train() leaves BatchNorm in evaluation mode, and returns nothing."""

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)
        self.norm.eval()


class ByHand(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm.eval()


class Taught(Block):
    """A student that keeps its teacher in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).requires_grad_(False)

    def train(self, mode: bool = True) -> Taught:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.5 * self.teacher(x)


class Merged(Block):
    """eval() puts a low-rank update into a frozen weight, and train() takes it out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3, requires_grad=False)
        self.a, self.b, self.merged = (
            nn.Parameter(torch.randn(2, 8) * 0.3),
            nn.Parameter(torch.randn(8, 2) * 0.1),
            False,
        )

    def train(self, mode: bool = True) -> Merged:
        super().train(mode)
        if mode == self.merged:
            with torch.no_grad():
                self.weight.add_(self.b @ self.a, alpha=-1.0 if mode else 1.0)
            self.merged = not mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = linear(x, self.weight)
        return super().forward(x) + (y if self.merged else y + x @ self.a.T @ self.b.T)


class Clamped(Block):
    """eval() changes trained weights for good."""

    def train(self, mode: bool = True) -> Clamped:
        super().train(mode)
        if not mode:
            with torch.no_grad():
                self.up.weight.clamp_(-0.2, 0.2)
        return self


class Halved(Block):
    def train(self, mode: bool = True) -> Halved:
        super().train(mode)
        return self.double() if mode else self.half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.up.weight.dtype)).to(x.dtype)


class Renewed(Block):
    def train(self, mode: bool = True) -> Renewed:
        super().train(mode)
        if not mode:
            self.up.weight = nn.Parameter(self.up.weight.detach() / 2)
        return self


class Net(nn.Module):
    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.enter, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


X = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
Y = X[:, :3].argmax(1)
DATA = torch.utils.data.TensorDataset(X, Y)


def job(block: type[Block]) -> evenly.Job:
    return evenly.Job(
        model=lambda: Net(block),
        loss=lambda m, b: cross_entropy(m(b[0]), b[1]),
        data=DATA,
        eval_data=DATA,
        optimizer=lambda p: torch.optim.SGD([one for one in p if one.requires_grad], lr=0.1),
        global_batch=BATCH,
        microbatch=3,
        shuffle=False,
        steps=STEPS,
        precision="float64",
    )


def change_by_hand(model: Any, step: int) -> None:
    if step == 1:
        model.blocks[0].norm.eval()


def plain(block: type[Block]) -> tuple[list[dict[str, torch.Tensor]], list[float]]:
    """The parameters and buffers after each step, and the losses of the evaluations."""
    model = Net(block).double()
    by_hand = [one for one in model.modules() if not one.training]
    model.train()
    for one in by_hand:
        one.training = False
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found, losses = [], []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        first = BATCH * ((step - 1) % 2)
        for start in range(first, first + BATCH, 3):
            x, y = X[start : start + 3].double(), Y[start : start + 3]
            (cross_entropy(model(x), y) * 3 / BATCH).backward()
        optimizer.step()
        change_by_hand(model, step)
        found.append({k: v.detach().clone() for k, v in (*model.named_parameters(), *model.named_buffers())})
        if step % EVERY == 0:
            modes = [(one, one.training) for one in model.modules()]
            model.eval()
            with torch.no_grad():
                losses.append(cross_entropy(model(X.double()), Y).item())
            model.train()
            for one, mode in modes:
                one.training = mode
    return found, losses


def worst(block: type[Block], plan: str) -> float | str:
    """The largest difference from the plain loop, or the sentence of the refusal."""
    expected, losses = plain(block)
    found = 0.0
    try:
        with evenly.start(job(block), plan=plan) as run:
            for step, batch in enumerate(run.batches(), 1):
                run.step(batch)
                change_by_hand(run.model, step)
                pipeline = run.composed.pipeline
                for name, tensor in (*run.model.named_parameters(), *run.model.named_buffers()):
                    if pipeline is None or name not in pipeline.placeholders:
                        full = run.composed.full_view(name, tensor.detach())
                        found = max(found, float((full - expected[step - 1][name]).abs().max()))
                if step % EVERY == 0:
                    found = max(found, abs(run.evaluate().loss - losses[step // EVERY - 1]))
    except EvenlyError as problem:
        return str(problem)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return found


def outcomes(blocks: list[type[Block]], plan: str) -> dict[str, float | str]:
    return {block.__name__: worst(block, plan) for block in blocks}


KEPT = [Frozen, ByHand, Taught, Merged, Clamped]
REFUSED = [Halved, Renewed]


def check(blocks: list[type[Block]], plan: str, ranks: KeptRanks) -> None:
    for found in ranks.run(outcomes, blocks, plan, size=1 if plan == "single" else 2):
        for name, outcome in found.items():
            if name in {one.__name__ for one in REFUSED} or (name == "Merged" and plan == "pipeline=2"):
                assert isinstance(outcome, str), (name, outcome)
                assert "of another stage" in outcome or "in the place of blocks.0." in outcome, outcome
            else:
                assert isinstance(outcome, float), (name, outcome)
                assert outcome < 1e-9, (name, outcome)


def test_modes_and_what_they_write_are_those_of_a_script(ranks: KeptRanks) -> None:
    check([Frozen, Merged, Halved], "zero3", ranks)


@pytest.mark.full
@pytest.mark.parametrize("plan", PLANS)
def test_modes_and_what_they_write_under_every_plan(plan: str, ranks: KeptRanks) -> None:
    check([*KEPT, *REFUSED], plan, ranks)
