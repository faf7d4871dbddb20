"""The look before the first step keeps no more for backwards than a step does."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager

import pytest
import torch
from jobs_pipeline import points_job
from kept_ranks import KeptRanks
from torch import nn

import evenly


class Layers(nn.Sequential):
    def __init__(self) -> None:
        blocks = (nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8))
        super().__init__(nn.Linear(5, 16), *blocks, nn.Linear(16, 3))


class Saved:
    """What forwards have saved for backwards and is still there: elements now, and the most at once."""

    def __init__(self) -> None:
        self.elements = self.most = 0

    @contextmanager
    def counting(self) -> Generator[None]:
        """Counts from nothing within."""
        self.elements = self.most = 0
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: One(tensor, self), lambda one: one.tensor):
            yield


class One:
    def __init__(self, tensor: torch.Tensor, of: Saved) -> None:
        self.tensor, self._of = tensor.detach(), of  # an output would keep the function that has saved it
        self._size = 0 if hasattr(tensor, "fake_mode") else tensor.numel()
        of.elements += self._size
        of.most = max(of.most, of.elements)

    def __del__(self) -> None:
        self._of.elements -= self._size


def most_saved(plan: str) -> tuple[int, int]:
    """Elements that the look, and then the first step, have saved at once on this rank."""
    logging.disable(logging.WARNING)
    saved = Saved()
    job = points_job(model=Layers, global_batch=12, microbatch=1, eval_data=None, steps=1)
    with saved.counting(), evenly.start(job, plan=plan) as run:
        look = saved.most
        assert saved.elements == 0  # all of it is gone
        with saved.counting():
            for batch in run.batches():
                run.step(batch)
        return look, saved.most


PLANS = {
    "ddp": 2,
    "zero3": 2,
    "tensor=2": 2,
    "pipeline=2 schedule=1f1b": 2,
    "pipeline=2 schedule=interleaved": 2,
    "data=2 pipeline=2 zero=3": 4,
}


@pytest.mark.full_but("zero3-2", "tensor=2-2", "pipeline=2 schedule=1f1b-2")
@pytest.mark.parametrize(("plan", "size"), PLANS.items())
def test_the_look_before_the_first_step_saves_no_more_than_a_step(plan: str, size: int, ranks: KeptRanks) -> None:
    for look, step in ranks.run(most_saved, plan, size=size):
        assert 0 < look <= step
