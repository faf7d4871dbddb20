"""The batches that a run trains on, step by step, read ahead."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from evenly.engine.executor import Batch
from evenly.errors import RunError

if TYPE_CHECKING:
    from evenly.train.run import Run


def batches_to_come(run: Run) -> Iterator[Batch]:
    """The batch of each step that comes next, while `run` goes on.

    Reading goes ahead through the steps in order, and begins again where the loop has not trained on a batch, or has on
    others as well.
    """
    share = lru_cache(maxsize=64)(run.share)  # called here and by the loader, which may be ahead
    loader = run.loader()
    microbatches = batch = None
    run.clock = time.perf_counter()
    while run.goes_on:
        step = run.steps_done
        if microbatches is None or batch is None or batch.remaining or step != batch.share.step + 1:
            microbatches = loader.read(share(one) for one in range(step, run.steps))
        yield (batch := Batch(share(step), microbatches, loader))
        if run.steps_done == step:
            do = "give every batch to run.step, or to run.forward_backward before run.update()"
            raise RunError(f"batch of step {step + 1}", "no step was trained on it", do)
        if run.snapshots is not None:
            run.snapshots.take_if_due()
