"""The model of benchmarks/host: twelve blocks so small that a step is Python and what torch does around its kernels.

`gpt` is the GPT of benchmarks/peers, written in plain layers, which rivals can be written for by hand; `gpt2` that of
transformers. A rank runs two microbatches of one sample of 16 tokens in a step, four under a pipeline.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[1] / "peers"))

import workloads

LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY = 12, 32, 4, 16, 256
MICROBATCHES = 2  # of one sample, that each rank runs in a step
PIPELINED = 4  # the same under a pipeline: as many as the most stages
CLIP_NORM, LR = 1.0, 1e-4


def model(kind: str, layers: int = LAYERS) -> nn.Module:
    torch.manual_seed(1)
    if kind == "gpt":
        return workloads.GPT(VOCABULARY, WIDTH, layers, HEADS, LENGTH)
    from transformers import GPT2Config, GPT2LMHeadModel

    how: Any = dict(n_positions=LENGTH, n_embd=WIDTH, n_layer=layers, n_head=HEADS, bos_token_id=0, eos_token_id=0)
    no_dropout: Any = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **how, **no_dropout))


class Stage(nn.Module):
    """One of `stages` stages of `gpt`, not the last: an equal share of the blocks, and the first the embeddings."""

    def __init__(self, stages: int, number: int = 0) -> None:
        super().__init__()
        whole: Any = model("gpt")
        share = LAYERS // stages
        self.embeddings = nn.ModuleList() if number else nn.ModuleList([whole.tok, whole.pos])
        self.blocks = whole.blocks[number * share : (number + 1) * share]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Ids [B, LENGTH], or [B, LENGTH, WIDTH] of the stage before -> [B, LENGTH, WIDTH]."""
        if self.embeddings:
            tok, pos = self.embeddings
            x = tok(x) + pos.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x


def summed_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of tokens [B, LENGTH + 1]."""
    found = model(tokens[:, :-1])
    logits = found if isinstance(found, torch.Tensor) else found.logits
    return F.cross_entropy(logits.flatten(0, -2), tokens[:, 1:].flatten(), reduction="sum")


class Tokens(torch.utils.data.Dataset[torch.Tensor]):
    """Drawn at random, once."""

    def __init__(self, samples: int = 64) -> None:
        generator = torch.Generator().manual_seed(2)
        self.tokens = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=generator)

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tokens[index % len(self.tokens)]
