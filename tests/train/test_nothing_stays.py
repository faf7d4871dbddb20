"""A run that has ended leaves nothing in its process: notebooks and loops over runs start many."""

from __future__ import annotations

import gc
import weakref

import psutil
import pytest
from jobs import tower_job
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


@pytest.mark.parametrize(("plan", "size"), PLANS.items())
def test_neither_models_nor_threads_stay(ranks: KeptRanks, plan: str, size: int) -> None:
    for threads, models in ranks.run(threads_and_models, plan, size=size):
        assert models == 0
        assert threads[-1] <= threads[1], threads
