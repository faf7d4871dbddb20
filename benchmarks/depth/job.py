"""A plain pre-norm transformer of as many tiny blocks as asked."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import evenly

WIDTH, VOCABULARY, LENGTH = 16, 32, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(samples, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(samples, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Tower(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model: nn.Module, batch: Any) -> evenly.Loss:
    (tokens,) = batch
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
    return evenly.Loss(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel())


def job(blocks: int = 16) -> evenly.Job:
    tokens = torch.randint(0, VOCABULARY, (64, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return evenly.Job(
        model=lambda: Tower(blocks), loss=loss, data=torch.utils.data.TensorDataset(tokens),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), global_batch=4, microbatch=2, steps=10,
    )  # fmt: skip
