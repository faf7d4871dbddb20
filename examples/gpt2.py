"""GPT-2 of transformers from a small configuration, its embedding tied to its head, on Python's own sources.

    evenly run examples/gpt2.py --devices 2
    evenly run examples/gpt2.py --devices 2 --plan "zero3 recompute=full" --set layers=4
    evenly verify examples/gpt2.py --plans "ddp;zero3;hsdp" --devices 4

One tensor is both embedding and head: it is counted once, cut once, and its gradient has both parts. Bytes are the
tokens, so that nothing is downloaded, neither weights nor words.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import evenly

BYTES = 256


class Windows(Dataset[torch.Tensor]):
    """Windows of bytes of the standard library's modules, one beside the other."""

    def __init__(self, pattern: str, length: int) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        text = b"".join(path.read_bytes() for path in sorted(root.glob(pattern)))
        self.bytes, self.length = torch.frombuffer(bytearray(text), dtype=torch.uint8), length

    def __len__(self) -> int:
        return len(self.bytes) // self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.bytes[index * self.length : (index + 1) * self.length].long()


def loss(model: nn.Module, batch: torch.Tensor) -> evenly.Loss:
    logits = model(input_ids=batch[:, :-1]).logits.flatten(0, 1)
    labels = batch[:, 1:].flatten()
    return evenly.Loss(nn.functional.cross_entropy(logits, labels, reduction="sum"), len(labels))


def job(steps: int = 150, width: int = 64, layers: int = 3, length: int = 65, lr: float = 2e-3) -> evenly.Job:
    config = GPT2Config(
        vocab_size=BYTES,
        n_positions=length,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=True,
    )
    return evenly.Job(
        model=lambda: GPT2LMHeadModel(config),
        loss=loss,
        data=Windows("[a-c]*.py", length),
        # A key bias has a true gradient of 0: this epsilon keeps its rounding noise from becoming steps.
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr, eps=1e-6),
        global_batch=24,
        steps=steps,
        microbatch=4,
        clip_norm=1.0,
        eval_data=Windows("h*.py", length),
        name="gpt2",
    )
