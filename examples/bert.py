"""A BERT classifier from a small configuration: which package of the standard library is this function from?

    evenly run examples/bert.py --devices 2
    evenly run examples/bert.py --devices 2 --set steps=200 --set hidden=128
    evenly verify examples/bert.py --plans "single;ddp" --devices 2

The text is that of Python's own sources: nothing is downloaded, neither weights nor words.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import zlib
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForSequenceClassification

import evenly

PACKAGES = ("asyncio", "email", "importlib", "multiprocessing", "unittest", "xml")
PADDING, CLASSIFY, VOCABULARY = 0, 1, 2048
Sample = tuple[list[int], int]


def read_samples(words: int) -> list[Sample]:
    """Token ids of each function or class and the number of its package, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    return [
        (tokens(text, words), label)
        for label, package in enumerate(PACKAGES)
        for path in sorted((root / package).rglob("*.py"))
        if "test" not in path.parts and "tests" not in path.parts
        for text in functions_of(path.read_text(encoding="utf-8"))
    ]


def functions_of(source: str) -> list[str]:
    lines, kinds = source.splitlines(), (ast.FunctionDef, ast.AsyncFunctionDef)
    top = ast.parse(source).body
    methods = [node for scope in top if isinstance(scope, ast.ClassDef) for node in scope.body]
    return ["\n".join(lines[n.lineno - 1 : n.end_lineno]) for n in top + methods if isinstance(n, kinds)]


def tokens(text: str, words: int) -> list[int]:
    """[CLASSIFY] and the first words, each as its hash (the same in every process, unlike `hash`)."""
    found = islice(re.finditer(r"[A-Za-z]+|\d+|[^\w\s]", text.lower()), words)
    return [CLASSIFY, *(2 + zlib.crc32(word[0].encode()) % (VOCABULARY - 2) for word in found)]


def collate(samples: list[Sample]) -> dict[str, torch.Tensor]:
    rows = [torch.tensor(ids) for ids, _ in samples]
    input_ids = pad_sequence(rows, batch_first=True, padding_value=PADDING)
    labels = torch.tensor([label for _, label in samples])
    return {"input_ids": input_ids, "attention_mask": (input_ids != PADDING).long(), "labels": labels}


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> evenly.Loss:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    total = nn.functional.cross_entropy(logits, batch["labels"], reduction="sum")
    return evenly.Loss(total=total, weight=len(logits))


def job(steps: int = 150, hidden: int = 64, layers: int = 2, words: int = 48, lr: float = 1e-3) -> evenly.Job:
    samples = read_samples(words)
    train, held_out = [s for i, s in enumerate(samples) if i % 10], samples[::10]
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * hidden,
        max_position_embeddings=words + 1,
        num_labels=len(PACKAGES),
        initializer_range=0.05,
    )
    return evenly.Job(
        model=lambda: BertForSequenceClassification(config),
        loss=loss,
        data=train,
        # The key biases have a true gradient of 0: this epsilon keeps its rounding noise from becoming steps.
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr, eps=1e-6),
        global_batch=32,
        steps=steps,
        collate=collate,
        microbatch=8,
        clip_norm=1.0,
        eval_data=held_out,
        name="bert",
    )
