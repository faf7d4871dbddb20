"""Models and data shared by every contender.  Seeded, offline, identical in every process.

A workload hands out: a model with seeded weights, a map-style training set that is already in the
order in which it must be consumed (sample i belongs to optimizer step i // global_batch), a
map-style evaluation set, one collate function and one loss function.
Items are dicts {"input_ids", "labels"}; labels of -100 do not count.
"""

from __future__ import annotations

import ast
import os
import pathlib
import sysconfig
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

CACHE = pathlib.Path(__file__).with_name("cache")
SEED = 1234


# ---------------------------------------------------------------- corpus: the standard library
def _sources():
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "test", "tests"}.isdisjoint(path.parts):
            try:
                yield path.read_bytes()
            except OSError:
                continue


def _functions(source: bytes):
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = source.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            text = b"".join(lines[node.lineno - 1 : node.end_lineno])
            if 16 <= len(text) <= 1024:
                yield text


def corpus() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(all bytes, bytes of all functions, start offset of each function); built once."""
    file = CACHE / "corpus.npz"
    if not file.exists():
        CACHE.mkdir(exist_ok=True)
        sources = list(_sources())
        functions = [f for s in sources for f in _functions(s)]
        offsets = np.cumsum([0] + [len(f) for f in functions])
        part = CACHE / f"corpus.{os.getpid()}.npz"  # all ranks may be building it
        np.savez(
            part,
            text=np.frombuffer(b"\n".join(sources), np.uint8),
            functions=np.frombuffer(b"".join(functions), np.uint8),
            offsets=offsets,
        )
        part.replace(file)
    with np.load(file) as z:
        return z["text"], z["functions"], z["offsets"]


# ---------------------------------------------------------------- data sets
class Windows(torch.utils.data.Dataset):
    """Fixed-length windows of the byte stream; optionally hashed byte trigrams as a big vocabulary."""

    def __init__(self, n: int, seq: int, vocab: int, seed: int):
        self.text, _, _ = corpus()
        self.seq, self.vocab = seq, vocab
        self.starts = np.random.default_rng(seed).integers(2, len(self.text) - seq - 1, n)

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, i):
        s = self.starts[i]
        ids = self.text[s : s + self.seq + 1].astype(np.int64)
        if self.vocab > 256:
            t = self.text[s - 2 : s + self.seq + 1].astype(np.int64)
            ids = (t[:-2] * 65536 + t[1:-1] * 256 + t[2:]) * 2654435761 % 4294967291 % self.vocab
        ids = torch.from_numpy(ids)
        return {"input_ids": ids[:-1], "labels": ids[1:]}


class Functions(torch.utils.data.Dataset):
    """Whole functions, 16..1024 bytes; byte 0 starts each, so a function of n bytes has n targets."""

    def __init__(self, n: int, seed: int):
        _, self.text, self.offsets = corpus()
        count = len(self.offsets) - 1
        rng = np.random.default_rng(seed)
        self.ids = np.concatenate([rng.permutation(count) for _ in range(-(-n // count))])[:n]

    def __len__(self):
        return len(self.ids)

    def length(self, i) -> int:
        """Of sample i, which need not be read for it."""
        k = self.ids[i]
        return int(self.offsets[k + 1] - self.offsets[k])

    def __getitem__(self, i):
        k = self.ids[i]
        y = torch.from_numpy(self.text[self.offsets[k] : self.offsets[k + 1]].astype(np.int64))
        return {"input_ids": torch.cat([torch.zeros(1, dtype=torch.int64), y[:-1]]), "labels": y}


class Digits(torch.utils.data.Dataset):
    def __init__(self, n: int, seed: int):
        from sklearn.datasets import load_digits

        d = load_digits()
        self.x = torch.tensor(d.images, dtype=torch.get_default_dtype())[:, None] / 16
        self.y = torch.tensor(d.target)
        rng = np.random.default_rng(seed)
        self.ids = np.concatenate([rng.permutation(len(self.y)) for _ in range(-(-n // len(self.y)))])[:n]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        k = int(self.ids[i])
        return {"input_ids": self.x[k], "labels": self.y[k]}


def collate(items):
    """Stack; one-dimensional ragged items are right-padded to the longest of the microbatch."""
    x, y = [i["input_ids"] for i in items], [i["labels"] for i in items]
    if x[0].dim() == 1:
        x = nn.utils.rnn.pad_sequence(x, batch_first=True)
        y = nn.utils.rnn.pad_sequence(y, batch_first=True, padding_value=-100)
        return {"input_ids": x, "labels": y}
    return {"input_ids": torch.stack(x), "labels": torch.stack(y)}


# ---------------------------------------------------------------- models
class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # a key bias has no gradient but noise
        self.proj = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # right padding is never attended to
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocab: int, width: int, layers: int, heads: int, max_len: int):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(max_len, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, input_ids, head=True):
        """Logits; without the head what it would be given."""
        x = self.tok(input_ids) + self.pos.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if head else self.norm(x)


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, input_ids):
        return self.net(input_ids)


def loss(logits, labels, reduction="mean"):
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction=reduction)


def per_sample(logits, labels):
    """(summed loss, counted labels) of every sample: what an exact evaluation needs."""
    flat = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="none")
    return flat.view(len(labels), -1).sum(1), (labels != -100).view(len(labels), -1).sum(1)


# ---------------------------------------------------------------- workloads
@dataclass(frozen=True)
class Workload:
    name: str
    kind: str  # "windows" | "functions" | "digits"
    global_batch: int
    micro_batch: int  # per rank
    budget: int | None = None  # of padded length per microbatch, for those who cut ragged batches by that
    vocab: int = 256
    width: int = 256
    layers: int = 4
    heads: int = 4
    seq: int = 256
    lr: float = 3e-4
    dtype: torch.dtype = torch.float32
    remainder: int = 0  # the last step has only so many samples (0: a whole global batch)
    n_eval: int = 101

    def accumulation(self, world: int) -> int:
        return self.global_batch // (self.micro_batch * world)

    def model(self) -> nn.Module:
        torch.manual_seed(SEED)
        torch.set_default_dtype(self.dtype)
        if self.kind == "digits":
            return CNN()
        return GPT(self.vocab, self.width, self.layers, self.heads, 1024 if self.kind == "functions" else self.seq)

    def _data(self, n, seed):
        torch.set_default_dtype(self.dtype)
        if self.kind == "windows":
            return Windows(n, self.seq, self.vocab, seed)
        return Functions(n, seed) if self.kind == "functions" else Digits(n, seed)

    def train_set(self, steps: int):
        whole = steps - bool(self.remainder)
        return self._data(whole * self.global_batch + self.remainder, SEED)

    def eval_set(self):
        return self._data(self.n_eval, SEED + 1)


_W1 = Workload("W1", "windows", 32, 8)
_W2 = Workload("W2", "functions", 64, 8, budget=1024)
# Small models in float64 for questions of equality: what is left of a difference is not rounding.
_small = {"width": 64, "layers": 2, "heads": 2, "dtype": torch.float64}
WORKLOADS = {
    w.name: w
    for w in [
        _W1,
        _W2,
        Workload("W3", "windows", 8, 4, vocab=50257, width=128, layers=2),
        Workload("W4", "digits", 64, 32),
        # For benchmarks/tensor: a step is one microbatch, which all ranks have.
        replace(_W1, name="T1", global_batch=8),
        replace(_W1, name="T2", global_batch=8, width=128, layers=2),
        replace(_W1, name="W1s", seq=64, **_small),
        replace(_W2, name="W2s", **_small),
        replace(_W1, name="W1p5", seq=64, remainder=5, **_small),
        replace(_W1, name="W1p21", seq=64, remainder=21, **_small),
        replace(_W2, name="W2p21", remainder=21, **_small),
    ]
}
# The same in float32, for peers that cannot hold float64.
WORKLOADS |= {
    n + "f": replace(w, name=n + "f", dtype=torch.float32)
    for n, w in list(WORKLOADS.items())
    if w.dtype == torch.float64
}
