"""Random cases: a module of random blocks, a job and a plan, all as data that follow from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import evenly
from benchmarks.random_modules.blocks import KINDS, TOKENS, plain

PLANS = [
    *(f"data={n}" for n in (2, 3, 4)), *(f"data={n} zero={zero}" for n in (2, 3) for zero in (1, 2, 3)),
    "data=4 zero=3 shard=2", "data=4 zero=1 shard=2", "dp replicas=2", "balanced-dp replicas=2", "single",
    "data=2 recompute=full", "data=2 zero=2 recompute=selective", "data=2 zero=3 recompute=full",
    "tensor=2", "tensor=2", "tensor=3", "data=2 tensor=2", "data=2 tensor=2 zero=2", "tensor=2 sequence_parallel=on",
    "pipeline=2", "pipeline=2", "pipeline=3 schedule=gpipe", "pipeline=2 schedule=interleaved stages_per_rank=2",
    "pipeline=2 schedule=zero-bubble", "data=2 pipeline=2", "data=2 pipeline=2 zero=1", "tensor=2 pipeline=2",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One case. Positions are of `blocks`.

    skips:  (from, to): what block `from` was given is added to what block `to` gives.
    again:  blocks that are called a second time, right after the first.
    shared: (first, other): blocks of one kind that hold the same parameters.
    towers: 1, or 2 that run side by side and are added.
    """

    seed: int
    plan: str
    blocks: tuple[str, ...]
    width: int = 6
    skips: tuple[tuple[int, int], ...] = ()
    again: tuple[int, ...] = ()
    shared: tuple[tuple[int, int], ...] = ()
    towers: int = 1
    tied_head: bool = False
    weightless: bool = False  # some samples count for nothing, in some microbatches all
    penalty: bool = False  # an L2 term over all parameters
    optimizer: str = "sgd"
    schedule: bool = False
    clip: bool = False
    length: int = 5
    global_batch: int = 6
    microbatch: int = 2
    precision: str = "float64"


def random_case(seed: int) -> Case:
    """The case of `seed`."""
    draw = random.Random(seed)
    count = draw.choice((1, 2, 3, 4, 4, 6))
    repeated = draw.random() < 0.6  # as most models are: a few kinds in turn
    kinds = draw.sample([*KINDS], draw.choice((1, 2))) if repeated else [*KINDS]
    blocks = tuple(kinds[n % len(kinds)] if repeated else draw.choice(kinds) for n in range(count))
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    alike = [(a, b) for a, b in pairs if blocks[a] == blocks[b]]
    return Case(
        seed=seed,
        plan=draw.choice(PLANS),
        blocks=blocks,
        width=draw.choice((6, 9, 12)),
        skips=tuple(draw.sample(pairs, min(len(pairs), draw.choice((0, 0, 1, 2))))),
        again=tuple(n for n in range(count) if draw.random() < 0.1),
        shared=tuple(draw.sample(alike, 1)) if alike and draw.random() < 0.2 else (),
        towers=2 if draw.random() < 0.15 else 1,
        tied_head=draw.random() < 0.4,
        weightless=draw.random() < 0.3,
        penalty=draw.random() < 0.1,
        optimizer=draw.choice(("sgd", "momentum", "adamw", "adamw", "adagrad", "rmsprop")),
        schedule=draw.random() < 0.4,
        clip=draw.random() < 0.5,
        length=draw.choice((3, 5, 8)),
        global_batch=draw.choice((4, 6, 7)),
        microbatch=draw.choice((1, 2, 3)),
        precision=draw.choice(("float64",) * 17 + ("float32", "float32", "bfloat16")),
    )


def smaller(case: Case) -> Iterator[Case]:
    """Cases that are simpler than `case` in one respect each."""
    for n in range(len(case.blocks) if len(case.blocks) > 1 else 0):
        yield replace(case, blocks=case.blocks[:n] + case.blocks[n + 1 :], skips=(), again=(), shared=())
    plainer: list[dict[str, Any]] = [
        dict(skips=()), dict(again=()), dict(shared=()), dict(towers=1), dict(tied_head=False), dict(weightless=False),
        dict(penalty=False), dict(optimizer="sgd"), dict(schedule=False), dict(clip=False), dict(width=6),
        dict(length=3), dict(microbatch=1), dict(global_batch=4), dict(precision="float64"),
    ]  # fmt: skip
    for n, kind in enumerate(case.blocks):
        if kind != "linear":
            plainer.append(dict(blocks=(*case.blocks[:n], "linear", *case.blocks[n + 1 :])))
    yield from (found for change in plainer if (found := replace(case, **change)) != case)


class Tower(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.blocks = nn.ModuleList(KINDS[kind](case.width) for kind in case.blocks)
        for first, other in case.shared:
            self.blocks[other] = self.blocks[first]

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        given: list[torch.Tensor] = []
        for number, block in enumerate(self.blocks):
            given.append(x)
            for _ in range(2 if number in self.case.again else 1):
                x = plain(block(x, tokens))
            for first, to in self.case.skips:
                if to == number:
                    x = x + 0.5 * given[first]
        return x


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, case.width)
        self.towers = nn.ModuleList(Tower(case) for _ in range(case.towers))
        self.norm, self.head = nn.LayerNorm(case.width), nn.Linear(case.width, TOKENS, bias=False)
        if case.tied_head:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        outs = [tower(x, tokens) for tower in self.towers]
        return self.head(self.norm(outs[0] if len(outs) == 1 else outs[0] + 0.3 * outs[1]))


class Texts(torch.utils.data.Dataset[Any]):
    """Sequences of `length` tokens; of a weightless case the first quarter has no labels that count."""

    def __init__(self, case: Case, count: int) -> None:
        draw = torch.Generator().manual_seed(case.seed)
        self.rows = torch.randint(0, TOKENS, (count, case.length + 1), generator=draw)
        self.labels = self.rows[:, 1:].clone()
        self.labels[:, ::3] = -100
        if case.weightless:
            self.labels[: count // 4] = -100

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows[index, :-1], self.labels[index]


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, eps=1e-6),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-6),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-6),
}


def job_of(case: Case) -> evenly.Job:
    """The job of `case`: three steps, the second with the short batch of an epoch."""

    def loss(model: Any, batch: Any) -> evenly.Loss:
        tokens, labels = batch
        total = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        weight = (labels != -100).sum()
        if case.penalty:
            total = total + 1e-2 * weight * sum(p.square().sum() for p in model.parameters())
        return evenly.Loss(total, weight)

    def halving(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    return evenly.Job(
        model=lambda: Model(case),
        loss=loss,
        data=Texts(case, case.global_batch + case.global_batch // 2),
        eval_data=Texts(replace(case, seed=case.seed + 1), 5),
        optimizer=OPTIMIZERS[case.optimizer],
        schedule=halving if case.schedule else None,
        clip_norm=0.5 if case.clip else None,
        global_batch=case.global_batch,
        microbatch=case.microbatch,
        steps=3,
        precision=case.precision,  # type: ignore[arg-type]
        seed=case.seed,
        name=f"random module {case.seed}",
    )
