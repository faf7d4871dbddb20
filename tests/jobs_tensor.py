"""Jobs whose modules are hard to split: head counts written into `view`, packed weights, masks, heads by threes, and
torch's own attention in its encoder and decoder.

    evenly verify tests/jobs_tensor.py --plans "single;ddp" --set name=packed

Dropout is on in all, and none weighs its samples alike: by the tokens that count, or by class.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jobs import Points, Sentences, pad, token_loss, warm_up
from torch import nn
from torch.nn import functional as F

import evenly

VOCABULARY, LONGEST, WIDTH = 256, 17, 32


class HeadsBlock(nn.Module):
    """Pre-norm; 4 heads of 8 numbers, as constants, and `kv_heads` of keys and values that they share."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        self.norm, self.norm_mlp = nn.LayerNorm(32), nn.LayerNorm(32)
        self.query, self.key, self.value = nn.Linear(32, 32), nn.Linear(32, 8 * kv_heads), nn.Linear(32, 8 * kv_heads)
        self.out, self.up, self.down = nn.Linear(32, 32, bias=False), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, L, _ = x.shape
        h = self.norm(x)
        q = self.query(h).view(B, L, 4, 8).transpose(1, 2)
        k, v = (part(h).view(B, L, self.kv_heads, 8).transpose(1, 2) for part in (self.key, self.value))
        k, v = (shared.repeat_interleave(4 // self.kv_heads, dim=1) for shared in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, L, 4 * 8)
        x = x + F.dropout(self.out(mixed), 0.1, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_mlp(x)))), 0.1, self.training)


class HeadsModel(nn.Module):
    """The head is the embedding by use alone: no module holds it a second time."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.tok, self.place = nn.Embedding(VOCABULARY, 32), nn.Parameter(0.1 * torch.randn(LONGEST, 32))
        self.blocks = nn.ModuleList(HeadsBlock(kv_heads) for _ in range(2))
        self.norm = nn.LayerNorm(32)
        nn.init.normal_(self.tok.weight, std=0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.tok(tokens) + self.place[: tokens.shape[1]], 0.1, self.training)
        for block in self.blocks:
            x = block(x)
        h = self.norm(x)
        return h @ self.tok.weight.T


class PackedBlock(nn.Module):
    """Queries, keys and values are thirds of one weight, gate and value of the MLP halves of another; own softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gated, self.down = nn.Linear(WIDTH, 2 * 48, bias=False), nn.Linear(48, WIDTH, bias=False)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("future", torch.ones(LONGEST, LONGEST).triu(1).bool())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        scores = (q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(self.future[:length, :length], float("-inf"))
        mixed = self.drop(torch.softmax(scores, dim=-1)) @ v
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        gate, value = self.gated(self.norm_mlp(x)).chunk(2, dim=-1)
        return x + self.drop(self.down(F.silu(gate) * value))


class PackedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.Sequential(PackedBlock(), PackedBlock())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens)))


class EncoderModel(nn.Module):
    """torch's encoder with a causal mask and one of padding."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.1, "gelu", batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        future = torch.ones(2 * tokens.shape[1:], dtype=torch.bool, device=tokens.device).triu(1)
        return self.head(self.encoder(self.embed(tokens), future, src_key_padding_mask=tokens == 0))


class DecoderModel(nn.Module):
    """torch's encoder and decoder: each token is told by those before it, and by the whole sequence turned round."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.reader = nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.1)
        self.writer = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 4, 64, 0.1), 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, padding = self.embed(tokens.T), (tokens == 0).flip(1)
        future = nn.Transformer.generate_square_subsequent_mask(len(x), dtype=x.dtype)
        memory = self.reader(x.flip(0), src_key_padding_mask=padding)
        return self.head(self.writer(x, memory, future, memory_key_padding_mask=padding)).transpose(0, 1)


class ThreesBlock(nn.Module):
    """3 heads of 7 numbers, which no 2 or 4 ranks can share evenly, and an MLP of 20, which they can."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values, self.out = nn.Linear(12, 21), nn.Linear(12, 21, bias=False), nn.Linear(21, 12)
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)
        self.norm, self.norm_mlp = nn.LayerNorm(12), nn.LayerNorm(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        weights = self.keys(h).view(-1, 3, 7).softmax(dim=-1)
        mixed = F.dropout(weights, 0.1, self.training) * self.values(h).view(-1, 3, 7)
        x = x + self.out(mixed.flatten(1))
        return x + F.dropout(self.down(torch.tanh(self.up(self.norm_mlp(x)))), 0.1, self.training)


class ThreesModel(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 12), ThreesBlock(), ThreesBlock(), nn.Linear(12, 3))


def weighted_class_loss(model: nn.Module, batch: Any) -> evenly.Loss:
    x, y = batch
    weights = torch.tensor([1.0, 0.5, 2.0], dtype=x.dtype, device=x.device)
    return evenly.Loss(F.cross_entropy(model(x), y, weight=weights, reduction="sum"), weights[y].sum())


def adam(parameters: Any) -> torch.optim.Optimizer:
    """With an epsilon that keeps the rounding noise of key biases, whose gradient is 0, from becoming steps."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-6)


def text_job(**changes: Any) -> evenly.Job:
    """Ragged sentences of 256 tokens, microbatches of 4 or less."""
    fields: dict[str, Any] = dict(
        loss=token_loss, data=Sentences(41, tokens=VOCABULARY), eval_data=Sentences(9, seed=1, tokens=VOCABULARY),
        optimizer=adam, collate=pad, global_batch=12, microbatch=4, steps=6, clip_norm=0.7, schedule=warm_up,
    )  # fmt: skip
    return evenly.Job(**{**fields, **changes})


def heads_job(kv_heads: int = 4, **changes: Any) -> evenly.Job:
    return text_job(**{"model": lambda: HeadsModel(kv_heads), "name": "heads", **changes})


def packed_job(**changes: Any) -> evenly.Job:
    return text_job(**{"model": PackedModel, "name": "packed", **changes})


def encoder_job(norm_first: bool = False, **changes: Any) -> evenly.Job:
    return text_job(**{"model": lambda: EncoderModel(norm_first), "name": "encoder", **changes})


def decoder_job(**changes: Any) -> evenly.Job:
    return text_job(**{"model": DecoderModel, "name": "decoder", **changes})


def threes_job(**changes: Any) -> evenly.Job:
    fields: dict[str, Any] = dict(
        model=ThreesModel, loss=weighted_class_loss, data=Points(37), eval_data=Points(11, seed=1), optimizer=adam,
        global_batch=10, microbatch=3, steps=6, clip_norm=0.7, schedule=warm_up, name="threes",
    )  # fmt: skip
    return evenly.Job(**{**fields, **changes})


TENSOR_JOBS: dict[str, Callable[..., evenly.Job]] = {
    "heads": heads_job,
    "packed": packed_job,
    "encoder": encoder_job,
    "norm first": partial(encoder_job, norm_first=True),
    "decoder": decoder_job,
    "threes": threes_job,
}


def job(name: str = "heads", **changes: Any) -> evenly.Job:
    return TENSOR_JOBS[name](**changes)
