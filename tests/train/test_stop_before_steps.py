"""A signal before the first step ends a run at once: there is nothing to save, and data may take long to read."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from kept_ranks import KeptRanks
from torch.utils.data import Dataset

import evenly


class Slow(Dataset[Any]):
    """Its first sample is read when a signal has come."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        time.sleep(5)
        return torch.ones(4)


def stopped() -> float:
    job = evenly.Job(
        model=lambda: torch.nn.Linear(4, 1),
        loss=lambda m, b: m(b).mean(),
        data=Slow(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        global_batch=12,
        steps=3,
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), evenly.start(job, plan="single") as run:
        began = time.monotonic()
        for batch in run.batches():
            run.step(batch)
    return time.monotonic() - began


def test_a_signal_while_the_first_batch_is_read_ends_the_run(ranks: KeptRanks) -> None:
    assert ranks.run(stopped, size=1)[0] < 2
