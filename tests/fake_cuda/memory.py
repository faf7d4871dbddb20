"""What a step of a small job holds on GPUs that are pretended, and what is predicted of it."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import torch
from fake_cuda.stand_ins import one_gpu
from torch import nn
from torch.nn import functional as F

import evenly
from evenly.plan import parse_plan
from evenly.planner.job_memory import memory_of_ranks
from evenly.planner.job_profile import JobProfiler
from evenly.train.step import counting_memory

WIDTH, LENGTH, HEADS = 32, 40, 4


class Block(nn.Module):
    """What saves more or less on a GPU than on a CPU: attention and a GELU by hand under autocast, RMSNorm, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_mlp = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.drop = nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (one(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        weights = torch.softmax(q @ k.transpose(-1, -2) / 3, -1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        h = self.up(self.norm_mlp(x))
        return x + self.drop(self.down(0.5 * h * (1 + torch.tanh(0.8 * (h + 0.04 * torch.pow(h, 3.0))))))


class Model(nn.Module):
    """Three blocks between an embedding and a head; under `tensor` its loss is over split classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(model: nn.Module, batch: torch.Tensor) -> evenly.Loss:
    logits, labels = model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
    return evenly.Loss(F.cross_entropy(logits, labels, reduction="sum"), len(labels))


def make_job(classes: int) -> evenly.Job:
    draw = torch.Generator().manual_seed(0)
    return evenly.Job(
        model=partial(Model, classes),
        loss=loss,
        data=[*torch.randint(0, classes, (24, LENGTH + 1), generator=draw)],
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        global_batch=8,
        microbatch=4,
        steps=3,
    )


def peaks(library: Path, plans: list[str], classes: int) -> list[int]:
    """For every plan the most that this rank's GPU holds in the second step."""
    logging.disable(logging.WARNING)
    found: list[int] = []
    with one_gpu(library):
        for plan in plans:
            with evenly.start(make_job(classes), plan=plan) as run:
                batches = run.batches()
                run.step(next(batches))
                batch = next(batches)
                with counting_memory(run) as counter:
                    run.step(batch)
                found.append(counter.peak_bytes(0))
    return found


def predicted(plan: str, ranks: int, classes: int) -> list[int]:
    """Of every rank."""
    job = make_job(classes)
    fitted = parse_plan(plan).fit(ranks).complete(job.precision)
    return [meter.peak for meter in memory_of_ranks(JobProfiler(job, step=1, device="cuda"), fitted)]
