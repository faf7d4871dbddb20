"""Models and jobs whose speed is measured: written in plain torch, and the same for evenly and for the loop by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import evenly


@dataclass(frozen=True)
class Size:
    """Of a language model. llama: with rotary positions, RMS norms and gated layers, else as GPT-2."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int
    length: int
    vocabulary: int
    llama: bool = False


GPT2 = Size(12, 768, 12, 12, 3072, 1024, 50257)  # 124 M parameters
LLAMA = Size(16, 2048, 32, 8, 8192, 2048, 128256, llama=True)  # 1.24 B parameters
HOST = Size(12, 32, 4, 4, 64, 8, 64)
SMALL_GPT2 = Size(2, 32, 2, 2, 64, 16, 65)
SMALL_LLAMA = Size(2, 32, 4, 2, 64, 16, 65, llama=True)


class Attention(nn.Module):
    """Causal, (B, L, width) -> (B, L, width); queries may share keys and values."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size, each = size, size.width // size.heads
        self.ask = nn.Linear(size.width, (size.heads + 2 * size.kv_heads) * each, bias=not size.llama)
        self.out = nn.Linear(size.width, size.width, bias=not size.llama)
        turns = torch.outer(torch.arange(size.length), 500_000.0 ** (-torch.arange(0, each, 2) / each))
        self.register_buffer("turns", torch.stack([turns.cos(), turns.sin()]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = self.size
        heads = self.ask(x).unflatten(-1, (size.heads + 2 * size.kv_heads, -1)).transpose(1, 2)
        q, k, v = heads.split((size.heads, size.kv_heads, size.kv_heads), 1)
        if size.llama:
            q, k = self._turned(q), self._turned(k)
        if size.kv_heads < size.heads:
            k, v = (one.repeat_interleave(size.heads // size.kv_heads, 1) for one in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, heads, L, each), each half of its numbers turned by an angle that grows with the position."""
        cos, sin = self.turns[:, : x.shape[2]].to(x.dtype)  # pyright: ignore[reportIndexIssue]
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Feed(nn.Module):
    """The layers of a block that see each position alone."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.up = nn.Linear(size.width, size.inner, bias=not size.llama)
        self.gate = nn.Linear(size.width, size.inner, bias=False) if size.llama else None
        self.down = nn.Linear(size.inner, size.width, bias=not size.llama)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward layers, with norms before."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        norm: Any = nn.RMSNorm if size.llama else nn.LayerNorm
        self.norm, self.mix, self.norm_feed, self.feed = norm(size.width), Attention(size), norm(size.width), Feed(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(self.norm(x))
        return x + self.feed(self.norm_feed(x))


class LanguageModel(nn.Module):
    """Tokens (B, L) -> logits (B, L, vocabulary), or what the head is given; the head is the embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.places = None if size.llama else nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm: nn.Module = nn.RMSNorm(size.width) if size.llama else nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, *, head: bool = True) -> torch.Tensor:
        x = self.embed(tokens)
        if self.places is not None:
            x = x + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if head else self.norm(x)


def language_model(size: Size) -> LanguageModel:
    """With weights within 0.035 of zero that look random to a GPU: to draw a billion takes half a minute."""
    with ExitStack() as stack, torch.no_grad():
        for kind in (nn.Linear, nn.Embedding):
            stack.enter_context(patch.object(kind, "reset_parameters", lambda _: None))
        model = LanguageModel(size)
        for module in model.modules():
            for weight in module.parameters(recurse=False) if isinstance(module, nn.Linear | nn.Embedding) else ():
                numbers = torch.arange(weight.numel(), dtype=torch.int32).mul_(40503).bitwise_and_(0xFFFF)
                weight.copy_(numbers.view_as(weight)).mul_(0.07 / 0xFFFF).sub_(0.035)
    return model


class Bottleneck(nn.Module):
    """As in ResNet-50: (B, width in, H, W) -> (B, 4 width, H / stride, W / stride)."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        shapes = ((before, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        convolutions = [nn.Conv2d(a, b, k, s, k // 2, bias=False) for a, b, k, s in shapes]
        norms = [nn.BatchNorm2d(b) for _, b, _, _ in shapes]
        self.layers = nn.Sequential(
            convolutions[0], norms[0], nn.ReLU(), convolutions[1], norms[1], nn.ReLU(), convolutions[2], norms[2]
        )
        alike = before == 4 * width and stride == 1
        passed = nn.Sequential(nn.Conv2d(before, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
        self.passed: nn.Module = nn.Identity() if alike else passed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.layers(x) + self.passed(x))


def residual_net(depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> nn.Module:
    """ResNet-50; images (B, 3, H, W) -> logits (B, classes)."""
    blocks: list[nn.Module] = []
    before = width
    for number, depth in enumerate(depths):
        for place in range(depth):
            blocks.append(Bottleneck(before, width << number, 2 if number and not place else 1))
            before = 4 * (width << number)
    begin = (nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    end = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))
    return nn.Sequential(*begin, *blocks, *end)


class Tokens(Dataset[torch.Tensor]):
    """Rows of random tokens."""

    def __init__(self, size: Size, rows: int = 256) -> None:
        self.rows = torch.randint(size.vocabulary, (rows, size.length + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index % len(self.rows)]


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Random images of bytes with a class each."""

    def __init__(self, side: int, classes: int, count: int = 32) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(256, (count, 3, side, side), generator=generator, dtype=torch.uint8)
        self.classes = classes

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index % len(self.images)], index % self.classes


def token_loss(model: nn.Module, batch: torch.Tensor) -> evenly.Loss:
    logits = model(batch[:, :-1])
    total = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
    return evenly.Loss(total, batch[:, 1:].numel())


def chunked_token_loss(model: nn.Module, batch: torch.Tensor) -> evenly.Loss:
    """The same without all logits."""
    weight: Any = model.get_parameter("head.weight")
    hidden = model(batch[:, :-1], head=False)
    return evenly.Loss(
        evenly.nn.linear_cross_entropy(hidden, weight, batch[:, 1:], reduction="sum"), batch[:, 1:].numel()
    )


def class_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> evenly.Loss:
    images, classes = batch
    logits = model(images.float().div_(127.5).sub_(1))
    return evenly.Loss(F.cross_entropy(logits, classes, reduction="sum"), len(classes))


@dataclass(frozen=True)
class Case:
    """What is trained. units: tokens or images of a sample. chunked_loss: the loss without all logits."""

    model: Callable[[], nn.Module]
    data: Any
    loss: Callable[[nn.Module, Any], evenly.Loss]
    batch: int
    microbatch: int
    units: int
    chunked_loss: Callable[[nn.Module, Any], evenly.Loss] | None = None

    def job(self, steps: int) -> evenly.Job:
        return evenly.Job(
            model=self.model,
            loss=self.loss,
            data=self.data,
            optimizer=partial(torch.optim.AdamW, lr=1e-4),
            global_batch=self.batch,
            microbatch=self.microbatch,
            steps=steps,
            clip_norm=1.0,
        )


def language_case(size: Size, batch: int, microbatch: int) -> Case:
    return Case(
        partial(language_model, size), Tokens(size), token_loss, batch, microbatch, size.length, chunked_token_loss
    )


def case_of(name: str, *, cpu: bool) -> Case:
    """gpt2, llama, resnet or host; with tiny shapes on the CPU."""
    if name == "gpt2":
        return language_case(SMALL_GPT2, 4, 2) if cpu else language_case(GPT2, 32, 16)
    if name == "llama":
        return language_case(SMALL_LLAMA, 4, 2) if cpu else language_case(LLAMA, 8, 4)
    if name == "host":
        return language_case(HOST, 4, 2)
    if cpu:
        return Case(partial(residual_net, (1,), 8, 10), Images(16, 10), class_loss, 8, 4, 1)
    return Case(residual_net, Images(224, 1000), class_loss, 256, 128, 1)
