"""A small job, and its steps under a plan on a GPU that is pretended."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from fake_cuda.stand_ins import one_gpu
from fake_cuda.tensor import gpu
from torch import nn
from torch.nn import functional as F

import evenly

Fault = Literal["", "cpu", "item", "device"]
TOKENS, WIDTH, LENGTH = 22, 16, 6


class Attention(nn.Module):
    """Two heads of eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.ask, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in self.ask(x).chunk(3, -1))
        drop = 0.1 if self.training else 0.0
        return self.out(F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward part, with dropout; `fault`: what it does that costs time, or fails, on a GPU."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), Attention()
        self.feed = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 26), nn.GELU(), nn.Dropout(0.1), nn.Linear(26, WIDTH))
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(self.norm(x))
        if self.fault == "cpu":
            x = x.cpu().to(x.device, non_blocking=True)
        if self.fault == "item":
            x = x * (1.0 if x.detach().sum().item() > 1e30 else 0.5)
        if self.fault == "device":
            x = x + torch.ones(WIDTH)
        return x + self.feed(x)


class Model(nn.Module):
    """Four blocks between an embedding and a head."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(fault) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """24 rows of tokens."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(0, TOKENS, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))


def loss(model: nn.Module, batch: torch.Tensor) -> evenly.Loss:
    logits = model(batch[:, :-1])
    total = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum")
    right = (logits.argmax(-1) == batch[:, 1:]).sum()
    return evenly.Loss(total, batch[:, 1:].numel(), metrics={"accuracy": (right, batch[:, 1:].numel())})


def make_job(fault: Fault = "") -> evenly.Job:
    """Batches of eight rows in microbatches of two, with AdamW, clipping and a metric."""
    return evenly.Job(
        model=lambda: Model(fault),
        loss=loss,
        data=Rows(),
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        global_batch=8,
        microbatch=2,
        steps=3,
        clip_norm=0.5,
    )


def train(library: Path, plan: str, fault: Fault = "") -> dict[str, Any]:
    """The steps of the job on this rank: what they came to, and how the host waited in each but the first."""
    logging.disable(logging.WARNING)
    with one_gpu(library), evenly.start(make_job(fault), plan=plan) as run:
        reports, waits = [], []
        for batch in run.batches():
            with gpu.noting() as noted:
                reports.append(run.step(batch))
            waits.append(noted)
        with run.whole_model(main_only=True, device="cpu") as model:
            weights = None if model is None else {n: p.detach().double().numpy() for n, p in model.state_dict().items()}
        return {
            "losses": [one.loss for one in reports],
            "norms": [one.grad_norm for one in reports],
            "metrics": [one.metrics for one in reports],
            "waits": waits[1:],
            "weights": weights,
        }
