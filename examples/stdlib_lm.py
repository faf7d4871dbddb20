"""A byte-level GPT on the sources of Python's own standard library; nothing is downloaded.

    evenly run examples/stdlib_lm.py --devices 2
    evenly run examples/stdlib_lm.py --devices 2 --set steps=300 --set width=192 --set layers=6
    evenly verify examples/stdlib_lm.py --plans "single;ddp" --devices 2

A sample is one whole function of 16 to 1024 bytes. Samples are ragged, so the loss counts bytes, not samples.
"""

from __future__ import annotations

import ast
import math
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

import evenly


def read_functions(modules: int = 30) -> list[bytes]:
    """Functions and methods of the first top-level modules of the standard library, in a fixed order."""
    functions: list[bytes] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:modules]:
        lines = path.read_bytes().splitlines(keepends=True)
        top = ast.parse(b"".join(lines)).body
        methods = [node for scope in top if isinstance(scope, ast.ClassDef) for node in scope.body]
        found = [n for n in top + methods if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        functions += [b"".join(lines[node.lineno - 1 : node.end_lineno]) for node in found]
    return [function for function in functions if 16 <= len(function) <= 1024]


def collate(functions: list[bytes]) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes and the bytes that follow them, both (samples, length); 0 begins and ends a function."""
    rows = [torch.tensor([0, *function, 0]) for function in functions]
    inputs = pad_sequence([row[:-1] for row in rows], batch_first=True)
    return inputs, pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=-100)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> evenly.Loss:
    inputs, targets = batch
    total = cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)
    return evenly.Loss(total=total, weight=(targets != -100).sum())


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(dropout)
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp(self.norm_mlp(x)))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(1025, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, bytes_in: torch.Tensor) -> torch.Tensor:
        x = self.embed(bytes_in) + self.place(torch.arange(bytes_in.shape[1], device=bytes_in.device))
        return self.head(self.norm(self.blocks(x)))


def job(steps: int = 100, width: int = 96, layers: int = 2, batch: int = 16, lr: float = 4e-3) -> evenly.Job:
    functions = read_functions()
    train, held_out = [f for i, f in enumerate(functions) if i % 20], sorted(functions[::20], key=len)

    def lr_factor(step: int) -> float:
        warmup, progress = min(1.0, (step + 1) * 10 / steps), min(1.0, step / steps)
        return warmup * (1 + math.cos(math.pi * progress)) / 2

    return evenly.Job(
        model=lambda: GPT(width, layers),
        loss=loss,
        data=train,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01),
        global_batch=batch,
        steps=steps,
        collate=collate,
        cost=lambda index: len(train[index]),
        microbatch_cost=2048,
        schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor),
        clip_norm=1.0,
        eval_data=held_out,
        name="stdlib_lm",
    )
