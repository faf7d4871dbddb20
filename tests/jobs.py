"""Small jobs that show what goes wrong: odd shapes, uneven weights, ragged samples, dropout, statistics, ties."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import evenly
from evenly.data.nest import tensors_in


class Points(torch.utils.data.Dataset):
    """(x of 5 numbers, class of 3), from a seed."""

    def __init__(self, count: int, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 5, generator=draw)
        self.y = torch.randint(0, 3, (count,), generator=draw)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        # A draw per sample: augmentation must follow the sample, not the rank or the loader's worker.
        return self.x[index] + 0.1 * torch.randn(5, dtype=torch.float32), self.y[index]


class Sentences(torch.utils.data.Dataset):
    """Ragged sequences of 2 to 17 of so many tokens."""

    def __init__(self, count: int, seed: int = 0, tokens: int = 11) -> None:
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 18, (count,), generator=draw).tolist()
        self.rows = [torch.randint(1, tokens, (n,), generator=draw) for n in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def pad(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    inputs = nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=-100)
    return {"inputs": inputs, "labels": labels}


class Classifier(nn.Module):
    """BatchNorm (one layer called twice), dropout, a frozen, an unused and a now-and-then-used parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7, bias=False)
        self.norm = nn.BatchNorm1d(7)
        self.slow = nn.BatchNorm1d(7, momentum=None)
        self.last = nn.Linear(7, 3)
        self.sometimes = nn.Parameter(torch.full((3,), 0.5))
        self.never = nn.Parameter(torch.ones(4, 3))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.first(x))
        h = self.slow(self.norm(F.dropout(h, 0.2, self.training)) + self.frozen)
        out = self.last(F.gelu(h))
        return out * self.sometimes if bool(x[0, 0] > 0.3) else out


class LanguageModel(nn.Module):
    """Tied embedding and head, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mix = nn.GRU(6, 6, batch_first=True)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.mix(F.dropout(self.embed(tokens), 0.1, self.training))
        return self.head(hidden)


class Block(nn.Module):
    """Attention and a feed-forward part, dropout; `gate` is used by sentences of an even length alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(width, 13), nn.GELU(), nn.Dropout(0.1), nn.Linear(13, width))
        self.gate = nn.Parameter(torch.full((3, width), 0.5))
        self.never = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        x = x + self.mix(h, h, h, attn_mask=mask, need_weights=False)[0]
        h = self.feed(x)
        return x + (h * self.gate.sum(0) if x.shape[1] % 2 == 0 else h)


class Unlike(nn.Module):
    """Nothing in it repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.3))
        self.read = nn.LSTM(8, 4, bidirectional=True)
        self.quiet = nn.ReLU()
        self.decide = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.read(self.first(x)[None])
        return self.decide(self.quiet(states[0]))


class InPlace(nn.Module):
    """Its blocks change results of matrix products in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.ReLU(inplace=True)) for _ in range(3)))
        self.decide = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decide(self.layers(x))


class Tower(nn.Module):
    """Blocks between a tied embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def class_loss(model: nn.Module, batch: Any) -> evenly.Loss:
    x, y = batch
    return evenly.Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))


def token_loss(model: nn.Module, batch: Any) -> evenly.Loss:
    labels = batch["labels"].flatten()
    total = F.cross_entropy(model(batch["inputs"]).flatten(0, 1), labels, ignore_index=-100, reduction="sum")
    return evenly.Loss(total, (labels != -100).sum())


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def classifier_job(**changes: Any) -> evenly.Job:
    """37 samples, batches of 10 in microbatches of 3 or less, a short last batch of 7."""
    fields: dict[str, Any] = dict(
        model=Classifier, loss=class_loss, data=Points(37), eval_data=Points(11, seed=1), optimizer=adam,
        global_batch=10, microbatch=3, steps=6, clip_norm=0.3, schedule=warm_up, name="classifier",
    )  # fmt: skip
    return evenly.Job(**{**fields, **changes})


def language_job(**changes: Any) -> evenly.Job:
    """Ragged samples dealt by cost."""
    data = Sentences(41)
    fields: dict[str, Any] = dict(
        model=LanguageModel, loss=token_loss, data=data, eval_data=Sentences(9, seed=1), optimizer=adam,
        collate=pad, cost=lambda i: len(data[i]), microbatch_cost=40, global_batch=12, steps=6, clip_norm=0.7,
        schedule=warm_up, name="language",
    )  # fmt: skip
    return evenly.Job(**{**fields, **changes})


def tower_job(**changes: Any) -> evenly.Job:
    """The language job with a model of blocks."""
    return language_job(**{"model": Tower, "name": "tower", **changes})


JOBS = {"classifier": classifier_job, "language": language_job}
ALL_JOBS = {**JOBS, "tower": tower_job}


def losses_of(model: Any, data: Any, plan: str, **changes: Any) -> list[float]:
    """The losses of three steps of SGD on this rank, of a model whose squared outputs are the loss."""
    fields: dict[str, Any] = dict(
        model=model, loss=lambda model, x: evenly.Loss(model(x).square().sum(), len(x)), data=data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3), steps=3,
    )  # fmt: skip
    with evenly.start(evenly.Job(**{**fields, **changes}), plan=plan) as run:
        return [run.step(batch).loss for batch in run.batches()]


def output_types(job: evenly.Job, plan: str) -> list[tuple[str, list[torch.dtype]]]:
    """The name of each module that a step calls on this rank, in order, with the types of the tensors it returns."""
    found: list[tuple[str, list[torch.dtype]]] = []
    with evenly.start(job, plan=plan) as run:
        for name, module in run.composed.model.named_modules():
            module.register_forward_hook(
                lambda _, __, result, name=name: found.append((name, [one.dtype for one in tensors_in(result)]))
            )
        run.step(next(run.batches()))
    return found
