"""Tensors of other layouts than strided, in batches and in the model: the numbers of a plain loop, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kept_ranks import KeptRanks
from torch import nn
from torch.nn.functional import mse_loss

import evenly
from evenly.errors import EvenlyError

STEPS, BATCH = 4, 12
PLANS = ("single", "ddp", "zero1", "zero2", "zero3", "tensor=2", "pipeline=2")
DRAW = torch.Generator().manual_seed(1)
ROWS = [torch.randn(2 + n % 5, 8, generator=DRAW).relu() for n in range(24)]
LINKS = torch.randn(8, 8, generator=DRAW).relu()


def jagged(items: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(torch.cat(items), lengths=torch.tensor([len(one) for one in items]))


def means(items: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([one.mean(0) for one in items])


COLLATES: dict[str, Any] = {
    "coo": lambda items: means(items).to_sparse(),
    "csr": lambda items: means(items).to_sparse_csr(),
    "csc": lambda items: means(items).to_sparse_csc(),
    "jagged": jagged,
    "nested": torch.nested.nested_tensor,
}


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        if kind.startswith("buffer"):
            links = LINKS.to_sparse_csr() if "csr" in kind else LINKS.to_sparse()
            self.register_buffer("links", links, persistent="kept" in kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_nested:
            x = torch.stack([one.mean(0) for one in x.unbind()])
        x = x @ self.enter.weight.T + self.enter.bias if x.layout != torch.strided else self.enter(x)
        if hasattr(self, "links"):
            x = (self.links @ x.T).T
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)[:, 0]


def collate(kind: str) -> Any:
    together = COLLATES.get(kind, means)
    return lambda items: {"x": together(items), "y": torch.stack([one.sum() / 10 for one in items])}


def job(kind: str) -> evenly.Job:
    return evenly.Job(
        model=lambda: Net(kind),
        loss=lambda m, b: mse_loss(m(b["x"]), b["y"]),
        data=ROWS,
        collate=collate(kind),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
        global_batch=BATCH,
        microbatch=3,
        shuffle=False,
        steps=STEPS,
        precision="float64",
    )


def plain(kind: str) -> list[dict[str, torch.Tensor]]:
    """The parameters after each step; samples one by one, in dense tensors."""
    model, found = Net(kind).double(), []
    if kind.startswith("buffer"):
        model.links = LINKS.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = ROWS[BATCH * (step % 2) :][:BATCH]
        x, y = means(rows).double(), torch.stack([one.sum() / 10 for one in rows]).double()
        if kind in ("jagged", "nested"):
            x = means([one.double() for one in rows])
        mse_loss(model(x), y).backward()
        optimizer.step()
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found


def outcome(kind: str, plan: str) -> float | str:
    expected, worst = plain(kind), 0.0
    try:
        with evenly.start(job(kind), plan=plan) as run:
            for step, batch in enumerate(run.batches()):
                run.step(batch)
                pipeline = run.composed.pipeline
                for name, p in run.model.named_parameters():
                    if pipeline is None or name not in pipeline.placeholders:
                        full = run.composed.full_view(name, p.detach())
                        worst = max(worst, float((full - expected[step][name]).abs().max()))
    except EvenlyError as problem:
        return str(problem)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return worst


def outcomes(kinds: list[str], plan: str) -> dict[str, float | str]:
    return {kind: outcome(kind, plan) for kind in kinds}


IN_BATCHES, IN_MODEL = [*COLLATES], ["buffer coo", "buffer csr", "buffer kept coo"]
# Refused before the first step, by the words of the sentence; under all other plans equal.
REFUSED = {
    **{(plan, kind): "is of layout torch.sparse" for plan in PLANS[1:] for kind in IN_MODEL},
    ("single", "buffer kept coo"): "is of layout torch.sparse",
    **{("pipeline=2", kind): "does not run on fake tensors" for kind in ("coo", "csr", "csc")},
    ("tensor=2", "coo"): "the first forward under plan",
    **{("tensor=2", kind): "does not run on fake tensors" for kind in ("csr", "csc", "jagged", "nested")},
    ("pipeline=2", "nested"): "doesn't support sizes",
}


def check(kinds: list[str], plan: str, ranks: KeptRanks) -> None:
    for by_kind in ranks.run(outcomes, kinds, plan, size=1 if plan == "single" else 2):
        for kind, found in by_kind.items():
            if (words := REFUSED.get((plan, kind))) is not None:
                assert isinstance(found, str) and words in found, (kind, found)
            else:
                assert isinstance(found, float) and found < 1e-9, (kind, found)


def test_other_layouts_have_the_numbers_of_dense_tensors_or_are_refused(ranks: KeptRanks) -> None:
    check(["coo", "csr", "jagged", "buffer kept coo"], "ddp", ranks)


@pytest.mark.full
@pytest.mark.parametrize("plan", PLANS)
def test_other_layouts_under_every_plan(plan: str, ranks: KeptRanks) -> None:
    check([*IN_BATCHES, *IN_MODEL], plan, ranks)
