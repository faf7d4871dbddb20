"""A run leaves nothing in its process, neither when it has ended nor, in random numbers, when it has begun."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from jobs import tower_job
from jobs_pipeline import PIPELINE_JOBS
from kept_ranks import KeptRanks

import evenly

PLANS = {"ddp": 2, "zero3": 2, "tensor=2": 2}


def threads_and_models(plan: str) -> tuple[list[int], int]:
    """The threads of this process before and after three runs, and how many of their models are left."""
    models, threads = [], [psutil.Process().num_threads()]
    for _ in range(3):
        with evenly.start(tower_job(steps=1), plan=plan) as run:
            for batch in run.batches():
                run.step(batch)
            models.append(weakref.ref(run.model))
        del run, batch
        gc.collect()
        threads.append(psutil.Process().num_threads())
    return threads, sum(model() is not None for model in models)


@pytest.mark.full_but("zero3-2")
@pytest.mark.parametrize(("plan", "size"), PLANS.items())
def test_neither_models_nor_threads_stay(ranks: KeptRanks, plan: str, size: int) -> None:
    for threads, models in ranks.run(threads_and_models, plan, size=size):
        assert models == 0
        assert threads[-1] <= threads[1], threads


def drawn_after_start(plan: str) -> tuple[float, float, float]:
    """What a loop of one's own draws before its first step; samples draw too."""
    job = PIPELINE_JOBS["chain"](data=Drawing())
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    with evenly.start(job, plan=plan):
        return random.random(), float(np.random.rand()), float(torch.rand(1))


class Drawing(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.data = PIPELINE_JOBS["chain"]().data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        random.random()
        np.random.rand()
        torch.rand(1)
        return self.data[index]


def test_starting_a_run_leaves_random_numbers_as_they_are(ranks: KeptRanks) -> None:
    found = [
        drawn for plan in ("ddp", "zero3", "tensor=2", "pipeline=2") for drawn in ranks.run(drawn_after_start, plan)
    ]
    torch.manual_seed(1)
    assert {*found} == {found[0]}
    assert found[0][2] == float(torch.rand(1))
