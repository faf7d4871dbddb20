"""A recurrent classifier with time in dim 0: which word of Python is this, from its letters alone?

    evenly run examples/recurrent.py --devices 2
    evenly run examples/recurrent.py --devices 2 --set steps=400 --set hidden=96
    evenly verify examples/recurrent.py --plans "dp;balanced-dp;ddp" --devices 3

Batches are (time, samples), as recurrent networks take them. Nobody has to say which dim holds the samples: devices
get whole microbatches, and only `collate` knows how they are laid out.
"""

from __future__ import annotations

import builtins
import keyword
import re
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

import evenly

CLASSES = ("other name", "keyword", "built-in", "class or constant")
Sample = tuple[torch.Tensor, int]


def read_samples() -> list[Sample]:
    """Letters of each distinct word of the standard library's own modules, and its class; in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(root.glob("[a-m]*.py")))
    words = sorted(set(re.findall(r"[A-Za-z_]{2,20}", text)))
    return [(torch.tensor([ord(letter) for letter in word]), class_of(word)) for word in words]


def class_of(word: str) -> int:
    if keyword.iskeyword(word):
        return 1
    if hasattr(builtins, word):
        return 2
    return 3 if word[0].isupper() else 0


def collate(samples: list[Sample]) -> dict[str, torch.Tensor]:
    return {
        "letters": pad_sequence([letters for letters, _ in samples]),  # (time, samples)
        "lengths": torch.tensor([len(letters) for letters, _ in samples]),
        "labels": torch.tensor([label for _, label in samples]),
    }


class Reader(nn.Module):
    """Reads a word in both directions; the last states decide."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(128, 16)
        self.read = nn.LSTM(16, hidden, layers, bidirectional=True, dropout=0.1)
        self.decide = nn.Linear(2 * hidden, len(CLASSES))

    def forward(self, letters: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.letters(letters), lengths.cpu(), enforce_sorted=False)
        _, (states, _) = self.read(packed)
        return self.decide(torch.cat([states[-2], states[-1]], dim=1))


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> evenly.Loss:
    logits = model(batch["letters"], batch["lengths"])
    return evenly.Loss(nn.functional.cross_entropy(logits, batch["labels"], reduction="sum"), len(logits))


def job(steps: int = 200, hidden: int = 48, layers: int = 2, lr: float = 3e-3) -> evenly.Job:
    samples = read_samples()
    train, held_out = [s for i, s in enumerate(samples) if i % 10], samples[::10]
    return evenly.Job(
        model=lambda: Reader(hidden, layers),
        loss=loss,
        data=train,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        global_batch=64,
        steps=steps,
        collate=collate,
        microbatch=12,
        clip_norm=1.0,
        eval_data=held_out,
        name="recurrent",
    )
