"""Small models whose derivation is known, and what they compute, for the tests of `evenly.model`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Case = tuple[nn.Module, Callable[[nn.Module, Any], Any], Any]

HEADS, WIDTH, VOCABULARY = 4, 8, 24  # width: of a head


def tokens(rows: int = 3, length: int = 6) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))


def next_token_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    out = model(ids[:, :-1])
    return F.cross_entropy(getattr(out, "logits", out).flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


class Attention(nn.Module):
    """Hard-coded head counts; `heads` x `width` need not be the model's width."""

    def __init__(self, size: int, heads: int, width: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.q, self.k, self.v = (nn.Linear(size, heads * width) for _ in range(3))
        self.o = nn.Linear(heads * width, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, L, _ = x.shape
        q, k, v = (of(x).view(B, L, self.heads, self.width).transpose(1, 2) for of in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        return self.o(mixed.transpose(1, 2).reshape(B, L, self.heads * self.width))


class PackedAttention(nn.Module):
    """Queries, keys and values in one matrix, taken apart by `how`; softmax by hand."""

    def __init__(self, size: int, how: str) -> None:
        super().__init__()
        self.how = how
        self.qkv, self.o = nn.Linear(size, 3 * size), nn.Linear(size, size, bias=False)
        self.register_buffer("mask", torch.ones(9, 9, dtype=torch.bool).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, L, D = x.shape
        if self.how == "chunk":
            q, k, v = (part.view(B, L, HEADS, WIDTH).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        else:
            q, k, v = self.qkv(x).view(B, L, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-2, -1)) / WIDTH**0.5
        scores = scores.masked_fill(~self.mask[:L, :L], float("-inf"))
        mixed = F.dropout(scores.softmax(-1), 0.1, self.training) @ v
        return self.o(mixed.permute(0, 2, 1, 3).reshape(B, L, D))


class Grouped(nn.Module):
    """Grouped heads by `enable_gqa` or by repeating."""

    def __init__(self, size: int, kv: int, how: str) -> None:
        super().__init__()
        self.kv, self.how = kv, how
        self.q, self.o = nn.Linear(size, size), nn.Linear(size, size)
        self.k, self.v = nn.Linear(size, kv * WIDTH), nn.Linear(size, kv * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, L, D = x.shape
        q = self.q(x).view(B, L, HEADS, WIDTH).transpose(1, 2)
        k, v = (of(x).view(B, L, self.kv, WIDTH).transpose(1, 2) for of in (self.k, self.v))
        if self.how == "repeat":
            k, v = (one.repeat_interleave(HEADS // self.kv, dim=1) for one in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.how == "gqa")
        return self.o(mixed.transpose(1, 2).reshape(B, L, D))


class Gated(nn.Module):
    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.gated, self.down = nn.Linear(size, 2 * hidden), nn.Linear(hidden, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gated(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module, size: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attention, self.mlp = attention, mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.dropout(self.attention(self.first(x)), 0.1, self.training)
        return x + self.mlp(self.second(x))


class LanguageModel(nn.Module):
    """One block; the head uses the embedding's weight, transposed."""

    def __init__(self, attention: nn.Module, mlp: nn.Module | None = None, size: int = HEADS * WIDTH) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, size)
        self.place = nn.Parameter(torch.randn(9, size))
        mlp = mlp or nn.Sequential(nn.Linear(size, 40), nn.GELU(), nn.Linear(40, size))
        self.block = Block(attention, mlp, size)
        self.norm = nn.LayerNorm(size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids) + self.place[: ids.shape[1]]
        return self.norm(self.block(x)) @ self.tok.weight.T


class ResidualMLP(nn.Module):
    """Three heads of odd width, and a last layer over classes; no norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(5, 21), nn.Linear(21, 5), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = torch.tanh(self.up(x)).view(len(x), 3, 7)
        return self.last(x + self.down((heads * heads.softmax(-1)).flatten(1)))


class Convolutions(nn.Sequential):
    """Two groups of channels between its convolutions."""

    def __init__(self) -> None:
        super().__init__(nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv1d(4, 4, 3), nn.Flatten(1))


def own(attention: nn.Module, mlp: nn.Module | None = None) -> Case:
    return LanguageModel(attention, mlp), next_token_loss, tokens()


def points() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 4


def class_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def transformer(name: str, attention: str = "sdpa", **settings: Any) -> Case:
    """A tiny model of transformers."""
    import transformers as t

    of = {
        "gpt2": (t.GPT2LMHeadModel, t.GPT2Config, dict(n_positions=9, n_embd=32, n_layer=2, n_head=4)),
        "llama": (t.LlamaForCausalLM, t.LlamaConfig, dict(intermediate_size=48, num_key_value_heads=2)),
        "bert": (t.BertForMaskedLM, t.BertConfig, dict(intermediate_size=48, max_position_embeddings=9)),
        "t5": (t.T5ForConditionalGeneration, t.T5Config, dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)),
        "vit": (t.ViTForImageClassification, t.ViTConfig, dict(intermediate_size=48, image_size=4, patch_size=2)),
    }
    kind, config, special = of[name]
    common: dict[str, Any] = {}
    if name in ("llama", "bert", "vit"):
        common |= dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    if name == "vit":
        common |= dict(num_channels=1, num_labels=4, hidden_dropout_prob=0.1)
    else:
        common |= dict(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    if name == "t5":
        common |= dict(decoder_start_token_id=0)
    made = config(**{**common, **special, **settings}, attn_implementation=attention)
    model = kind(made)
    if name == "vit":
        pictures = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(0)).to(model.dtype)
        return model, lambda m, b: F.cross_entropy(m(pixel_values=b[0]).logits, b[1]), (pictures, torch.arange(3))
    losses = {
        "bert": lambda m, ids: m(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss,
        "t5": lambda m, ids: m(input_ids=ids, labels=ids[:, :4].contiguous()).loss,
    }
    return model, losses.get(name, next_token_loss), tokens()
