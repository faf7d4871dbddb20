"""T5 of transformers from a small configuration: which word was taken out of this line of Python?

    evenly run examples/t5.py --devices 2
    evenly run examples/t5.py --devices 2 --set steps=400 --set width=96
    evenly verify examples/t5.py --plans "single;ddp" --devices 2

An encoder reads the line with a gap in it, a decoder spells the word. One tensor is the embedding of both and the head.
Lines and words are ragged, so the loss counts bytes; they are the tokens, and nothing is downloaded.
"""

from __future__ import annotations

import re
import sysconfig
import zlib
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import T5Config, T5ForConditionalGeneration

import evenly

BYTES, PADDING, GAP, END = 256, 0, 1, 2  # no source has these three bytes
Sample = tuple[bytes, bytes]


def read_lines(pattern: str) -> list[Sample]:
    """Lines of 16 to 80 bytes of the standard library with a gap for one of their words, and that word."""
    texts = [path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob(pattern))]
    lines = dict.fromkeys(line.strip() for text in texts for line in text.splitlines())
    return [with_gap(line) for line in lines if 16 <= len(line) <= 80 and re.search(rb"[a-z]{2}", line)]


def with_gap(line: bytes) -> Sample:
    """Which word it is follows from the line alone: it is the same in every process."""
    words = list(re.finditer(rb"\w*[a-z]{2}\w*", line))
    word = words[zlib.crc32(line) % len(words)]
    return line[: word.start()] + bytes([GAP]) + line[word.end() :], word[0]


def collate(samples: list[Sample]) -> dict[str, torch.Tensor]:
    """Each (samples, length): the line, the word one byte later, the word and its end."""
    lines = [torch.tensor([*line]) for line, _ in samples]
    before, words = ([torch.tensor(ids) for ids in lists] for lists in (
        [[PADDING, *word] for _, word in samples], [[*word, END] for _, word in samples],
    ))  # fmt: skip
    return {
        "line": pad_sequence(lines, batch_first=True, padding_value=PADDING),
        "before": pad_sequence(before, batch_first=True, padding_value=PADDING),
        "word": pad_sequence(words, batch_first=True, padding_value=-100),
    }


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> evenly.Loss:
    line, word = batch["line"], batch["word"]
    mask = (line != PADDING).long()
    logits = model(input_ids=line, attention_mask=mask, decoder_input_ids=batch["before"], use_cache=False).logits
    total = cross_entropy(logits.flatten(0, 1), word.flatten(), reduction="sum", ignore_index=-100)
    return evenly.Loss(total=total, weight=(word != -100).sum())


def job(steps: int = 200, width: int = 64, layers: int = 2, heads: int = 4, lr: float = 3e-3) -> evenly.Job:
    config = T5Config(
        vocab_size=BYTES,
        d_model=width,
        d_kv=width // heads,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=heads,
        dropout_rate=0.1,
        pad_token_id=PADDING,
        eos_token_id=END,
        decoder_start_token_id=PADDING,
    )
    return evenly.Job(
        model=lambda: T5ForConditionalGeneration(config),
        loss=loss,
        data=read_lines("[a-c]*.py"),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        global_batch=32,
        steps=steps,
        collate=collate,
        microbatch=8,
        clip_norm=1.0,
        eval_data=read_lines("h*.py"),
        name="t5",
    )
