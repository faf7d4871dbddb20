"""Indices of any kind, epochs that data are told of, generators of the job's own: samples and order of a script."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from contextlib import redirect_stderr
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from kept_ranks import KeptRanks
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, RandomSampler, WeightedRandomSampler, default_collate

import evenly
from evenly.data.loader import indices_of_step

N, BATCH, STEPS = 12, 6, 7
PLANS = ("single", "ddp", "zero1", "zero2", "zero3", "tensor=2", "pipeline=2")
NAMES = [f"sample {n}" for n in range(N)]


def drawn(seed: int) -> torch.Tensor:
    return torch.randn(4, generator=torch.Generator().manual_seed(seed))


class Samples(Dataset[Any]):
    """Augments by the epoch of its key, or by that which it was told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return N

    def __getitem__(self, key: Any) -> tuple[torch.Tensor, torch.Tensor]:
        epoch, number = self.epoch, key
        if isinstance(key, tuple):
            epoch, number = key
        elif isinstance(key, slice):
            number = key.start * 20 + key.stop
        elif isinstance(key, str):
            number = NAMES.index(key)
        elif isinstance(key, torch.Tensor):
            number = int(key.sum())
        x = drawn(1000 * epoch + int(number))
        return x, x.sum()


class Drops:
    """A collate that follows the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __call__(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return x * (1 + 0.1 * self.epoch), y


class Keys:
    """A sampler of keys of one kind, which may follow the epoch."""

    epoch = 0

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[Any]:
        key: Any = {
            "pairs": lambda n: (self.epoch, n),
            "slices": lambda n: slice(n, n + self.epoch),
            "tensors": lambda n: torch.tensor([n, self.epoch]),
            "numpy": lambda n: np.int64((n + self.epoch) % N),
            "names": lambda n: NAMES[(n + self.epoch) % N],
        }[self.kind]
        return (key(n) for n in range(N))


class Batches(Keys):
    def __iter__(self) -> Iterator[Any]:
        keys = [*super().__iter__()]
        return iter([keys[:4], keys[4:10], keys[10:]])

    def __len__(self) -> int:
        return 3


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def loader(kind: str) -> DataLoader[Any]:
    """The loader of a script."""
    name, _, rest = kind.partition(" ")
    if kind == "epochs":
        return DataLoader(Samples(), batch_size=BATCH, collate_fn=Drops())
    if kind == "seeded loader":
        return DataLoader(Samples(), batch_size=BATCH, shuffle=True, generator=seeded())
    if kind == "seeded sampler":
        return DataLoader(Samples(), batch_size=BATCH, sampler=RandomSampler(range(N), generator=seeded()))
    if kind == "both seeded":
        weights = WeightedRandomSampler([1.0 + n for n in range(N)], 2 * N, generator=seeded(6))
        return DataLoader(Samples(), batch_size=BATCH, sampler=weights, generator=seeded())
    if kind == "endless":
        sampler = RandomSampler(range(N), replacement=True, num_samples=int(1e10), generator=seeded())
        return DataLoader(Samples(), batch_size=BATCH, sampler=sampler)
    if rest == "in batches":
        return DataLoader(Samples(), batch_sampler=Batches(name))
    return DataLoader(Samples(), batch_size=BATCH, sampler=Keys(name))


KINDS = (
    *("pairs", "slices", "tensors", "numpy", "names", "pairs in batches", "tensors in batches"),
    *("epochs", "seeded loader", "seeded sampler", "both seeded", "endless"),
)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 4), *(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)), nn.Linear(4, 1)
    )


def job(kind: str) -> evenly.Job:
    return evenly.Job(
        model=net,
        loss=lambda m, b: mse_loss(m(b[0])[:, 0], b[1]),
        data=loader(kind),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
        global_batch=BATCH,
        microbatch=3,
        steps=STEPS,
        precision="float64",
    )


def of_script(kind: str) -> Iterator[Any]:
    """The batches of a script, which calls set_epoch before each epoch."""
    given = loader(kind)
    for epoch in range(STEPS):
        for one in (given.dataset, given.sampler, given.batch_sampler, given.collate_fn):
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)
        yield from given


def plain(kind: str) -> list[float]:
    model, losses = net().double(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in islice(of_script(kind), STEPS):
        optimizer.zero_grad()
        loss = mse_loss(model(x.double())[:, 0], y.double())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses_of(kinds: list[str], plan: str) -> list[list[float]]:
    found = []
    for kind in kinds:
        with evenly.start(job(kind), plan=plan) as run:
            found.append([run.step(batch).loss for batch in run.batches()])
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return found


def check(kinds: list[str], plan: str, ranks: KeptRanks) -> None:
    for found in ranks.run(losses_of, kinds, plan, size=1 if plan == "single" else 2):
        for kind, losses in zip(kinds, found, strict=True):
            assert losses == pytest.approx(plain(kind), rel=1e-9, abs=1e-12), kind


def test_a_data_set_gets_keys_and_epochs_as_in_a_script(ranks: KeptRanks) -> None:
    check(["pairs", "tensors in batches", "epochs", "seeded loader", "endless"], "ddp", ranks)


@pytest.mark.full
@pytest.mark.parametrize("plan", PLANS)
def test_a_data_set_gets_keys_and_epochs_under_every_plan(plan: str, ranks: KeptRanks) -> None:
    check([*KINDS], plan, ranks)


def test_a_sampler_by_itself_has_keys_of_its_own() -> None:
    given = evenly.Job(
        model=net,
        loss=mse_loss,
        data=Samples(),
        sampler=Keys("pairs"),
        optimizer=torch.optim.SGD,
        global_batch=6,
        steps=4,
    )
    assert [indices_of_step(given, step)[:2] for step in (0, 3, 1, 2)] == [
        [(0, 0), (0, 1)],
        [(1, 6), (1, 7)],
        [(0, 6), (0, 7)],
        [(1, 0), (1, 1)],
    ]


def test_an_endless_order_is_read_from_any_step_and_again() -> None:
    given = job("endless")
    later = [indices_of_step(given, step) for step in (300, 301, 2)]
    assert later == [indices_of_step(job("endless"), step) for step in (300, 301, 2)]


def with_workers(more: dict[str, Any]) -> tuple[list[float], str]:
    given = DataLoader(Samples(), batch_size=BATCH, collate_fn=Drops(), num_workers=2, prefetch_factor=3)
    said = io.StringIO()
    with (
        redirect_stderr(said),
        evenly.start(dataclasses.replace(job("epochs"), data=given, collate=None, batch_sampler=None, **more)) as run,
    ):
        losses = [run.step(batch).loss for batch in run.batches()]
        loader = run.loader()
        assert (loader._workers, loader._prefetch) == (more.get("num_workers", 2), 3)
    return losses, said.getvalue()


def test_workers_of_a_loader_are_kept_and_read_the_right_epoch(ranks: KeptRanks) -> None:
    losses, said = ranks.run(with_workers, {}, size=1)[0]
    assert losses == pytest.approx(plain("epochs"), rel=1e-9)
    assert said == "evenly: the loader of each rank has num_workers=2 prefetch_factor=3\n"
    losses, said = ranks.run(with_workers, {"num_workers": 0}, size=1)[0]
    assert losses == pytest.approx(plain("epochs"), rel=1e-9)
    assert "num_workers=0" in said
