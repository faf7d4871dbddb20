"""A small job, and its steps under a plan on a GPU that is pretended."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fake_cuda.stand_ins import one_gpu
from fake_cuda.tensor import gpu
from jobs_pipeline import WIDTH as ODD_WIDTH
from jobs_pipeline import Chain, text_job
from torch import nn
from torch.nn import functional as F

import evenly
from evenly.verify.compare import RankComparison
from evenly.verify.ranks import compare_steps, keep_reference
from evenly.verify.tasks import PlanSteps
from evenly.verify.trajectory import measure_rounding, trajectory_folder

TOKENS, WIDTH, LENGTH = 22, 16, 6


class Attention(nn.Module):
    """Two heads of eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.ask, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in self.ask(x).chunk(3, -1))
        drop = 0.1 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward part, with dropout. faulty: whether it does what a GPU waits for, or refuses."""

    def __init__(self, faulty: bool) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), Attention()
        wider = (nn.Linear(WIDTH, 26), nn.GELU(), nn.Dropout(0.1), nn.Linear(26, WIDTH))
        self.feed = nn.Sequential(nn.LayerNorm(WIDTH), *wider)
        self.faulty = faulty

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(self.norm(x))
        if self.faulty:
            x = self.moved(x) * self.scale(x) + self.bias(x)
        return x + self.feed(x)

    def moved(self, x: torch.Tensor) -> torch.Tensor:
        return x.cpu().to(x.device, non_blocking=True)

    def scale(self, x: torch.Tensor) -> float:
        return 1.0 if x.detach().sum().item() < 1e30 else 0.5

    def bias(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:1, :1], torch.ones(1, 1, WIDTH, dtype=x.dtype)]).mean()


class Model(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, faulty: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(faulty) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """24 rows of tokens."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(0, TOKENS, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))


def loss(model: nn.Module, batch: torch.Tensor) -> evenly.Loss:
    logits = model(batch[:, :-1])
    total = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum")
    right = (logits.argmax(-1) == batch[:, 1:]).sum()
    return evenly.Loss(total, batch[:, 1:].numel(), metrics={"accuracy": (right, batch[:, 1:].numel())})


def make_job(faulty: bool = False) -> evenly.Job:
    """Batches of eight rows in microbatches of two, with AdamW, clipping and a metric."""
    return evenly.Job(
        model=lambda: Model(faulty),
        loss=loss,
        data=Rows(),
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        global_batch=8,
        microbatch=2,
        steps=2,
        clip_norm=0.5,
    )


def train(library: Path, plan: str, faulty: bool = False) -> dict[str, Any]:
    """The steps of the job on this rank: what they came to; how the host waited, and tensors of two devices met, in the
    last.
    """
    logging.disable(logging.WARNING)
    with one_gpu(library, mixes=[] if faulty else None), evenly.start(make_job(faulty), plan=plan) as run:
        reports: list[Any] = []
        for batch in run.batches():
            gpu.waits.clear()
            reports.append(run.step(batch))
        waits = [*gpu.waits]
        with run.whole_model(main_only=True, device="cpu") as model:
            weights = {} if model is None else {n: p.detach().double().numpy() for n, p in model.named_parameters()}
        found = [(one.loss, one.grad_norm, one.metrics["accuracy"]) for one in reports]
        tensor = run.composed.tensor
        return {
            "reports": found,
            "waits": waits,
            "mixes": [*(gpu.mixes or ())],
            "weights": weights,
            "overlapped": tensor is not None and tensor.axis.overlapped,
        }


def _verified() -> evenly.Job:
    return replace(make_job(), precision="float64", steps=3, eval_data=Rows(), eval_every=2)


def train_in_a_loop(library: Path, folder: Path) -> None:
    """Keeps in `folder` what `compared_with_loop` compares with."""
    with one_gpu(library):
        for kind in ("none", "sums"):
            keep_reference(_verified(), 3, trajectory_folder(folder, kind), kind, device="cuda:0")
        measure_rounding(folder, "sums")


def compared_with_loop(library: Path, folder: Path, plan: str) -> list[RankComparison]:
    """Two steps under `plan`, and a run that goes on from their checkpoint."""
    logging.disable(logging.WARNING)
    with one_gpu(library):
        parts = [PlanSteps(plan, first, last, folder / plan.replace(" ", ",")) for first, last in ((0, 2), (2, 3))]
        return [compare_steps(_verified(), part, 3, folder) for part in parts]


class Kept(Chain):
    """What it keeps for the end is one of two results of a function that a GPU's autocast calls by itself, too."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Linear(ODD_WIDTH, ODD_WIDTH)

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        h = self.begin(x)
        grown, kept, other = torch.exp(h), h.float(), (h * 2).float()
        return super().through(x + 0.1 * grown + 0.1 * other, tokens) + 3 * kept


def kept_losses(library: Path, plan: str) -> list[float]:
    """Of three steps."""
    logging.disable(logging.WARNING)
    job = text_job(model=Kept, steps=3, eval_data=None, eval_every=None)
    with one_gpu(library), evenly.start(job, plan=plan) as run:
        return [run.step(batch).loss for batch in run.batches()]
