"""A tiny model under an optimizer of a library: in a plain loop, and in legs of a run under a plan."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from makers import maker
from torch import nn
from torch.nn.functional import cross_entropy

import evenly
from evenly.data.generators import seeded
from evenly.data.stream import stream_key

STEPS, HALF, BATCH = 12, 6, 8
DRAW = torch.Generator().manual_seed(3)
X, Y = torch.randn(24, 5, generator=DRAW, dtype=torch.float64), torch.randint(0, 3, (24,), generator=DRAW)


class Blocks(nn.Module):
    """Two blocks of odd widths."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5)) for _ in range(2))
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def job(subject: str) -> evenly.Job:
    """Return the job that trains with the optimizer of `subject`."""
    return evenly.Job(
        model=Blocks,
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        data=torch.utils.data.TensorDataset(X, Y),
        optimizer=maker(subject),
        global_batch=BATCH,
        microbatch=4,
        shuffle=False,
        steps=STEPS,
        precision="float64",
    )


def turn(optimizer: Any, face: str) -> None:
    """Calls `eval` or `train` of an optimizer that has it."""
    getattr(optimizer, face, lambda: None)()


def plain(subject: str, parts: int = 1) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train in a plain loop; return the losses and the parameters at the end, as they are evaluated.

    parts: of a batch, whose gradients are added up.
    """
    warnings.simplefilter("ignore")
    model, losses = Blocks().double(), list[float]()
    with seeded(stream_key(0, "optimizer", 0)):
        optimizer = maker(subject)(model.parameters())
    turn(optimizer, "train")
    for step in range(STEPS):
        begin = BATCH * (step % 3)
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for rows in range(begin, begin + BATCH, BATCH // parts):
            part = cross_entropy(model(X[rows : rows + BATCH // parts]), Y[rows : rows + BATCH // parts]) / parts
            part.backward()
            loss += part.detach()
        with seeded(stream_key(0, "optimizer", step + 1)):
            optimizer.step()
        losses.append(loss.item())
        if step + 1 in (HALF, STEPS):  # the run saves here
            turn(optimizer, "eval")
            if step + 1 < STEPS:
                turn(optimizer, "train")
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def leg(subject: str, plan: str, out: Path, last: int) -> tuple[int, list[float], dict[str, torch.Tensor], str, str]:
    """Run to step `last`, from where the folder `out` left off.

    Returns the steps done, losses, whole parameters, and the kind and text of the error that ended it.
    """
    warnings.simplefilter("ignore")
    done, losses, found = 0, list[float](), dict[str, torch.Tensor]()
    try:
        with evenly.start(job(subject), plan=plan, out=out, steps=last, resume=last > HALF) as run:
            for batch in run.batches():
                losses.append(run.step(batch).loss)
                done = run.steps_done
            with run.whole_model() as model:
                found = {name: p.detach().clone() for name, p in model.named_parameters()}
    except evenly.EvenlyError as problem:
        return done, losses, found, "refused" if not done else "error", str(problem)
    except Exception as problem:
        return done, losses, found, "raw", f"{type(problem).__name__}: {problem}"
    return done, losses, found, "", ""
