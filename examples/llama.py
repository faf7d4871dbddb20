"""Llama of transformers from a small configuration, heads that share keys and values, on Python's own sources.

    evenly run examples/llama.py --devices 2
    evenly run examples/llama.py --devices 2 --set kv_heads=1 --set layers=4 --set width=128
    evenly verify examples/llama.py --plans "single;ddp" --devices 2

Four heads of queries share `kv_heads` heads of keys and values; embedding and head are two tensors. Bytes are the
tokens, so that nothing is downloaded, neither weights nor words.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

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
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits.flatten(0, 1)
    labels = batch[:, 1:].flatten()
    return evenly.Loss(nn.functional.cross_entropy(logits, labels, reduction="sum"), len(labels))


def job(
    steps: int = 150, width: int = 64, layers: int = 3, heads: int = 4, kv_heads: int = 2, length: int = 65
) -> evenly.Job:
    config = LlamaConfig(
        vocab_size=BYTES,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=length,
        attention_dropout=0.1,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    return evenly.Job(
        model=lambda: LlamaForCausalLM(config),
        loss=loss,
        data=Windows("[a-c]*.py", length),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        global_batch=24,
        steps=steps,
        microbatch=4,
        clip_norm=1.0,
        eval_data=Windows("h*.py", length),
        name="llama",
    )
