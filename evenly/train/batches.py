"""The batches that a run trains on, step by step, read ahead."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from evenly.data.alone import alone
from evenly.data.loader import MicrobatchStream
from evenly.engine.executor import Batch
from evenly.errors import RunError

if TYPE_CHECKING:
    from evenly.train.run import Run


def batches_to_come(run: Run) -> Iterator[Batch]:
    """The batch of each step that comes next, while `run` goes on; of a stream, the next that it has."""
    if run.feed is not None:
        run.feed.begin(run.fitted, run.speeds)
    batch_of = _BatchesByIndex(run).batch if run.feed is None else run.feed.batch
    if (stated := run.job.loading) and run.world.is_main:
        stated_in_words = " ".join(f"{name}={value}" for name, value in stated.items())
        use = "the loader of each rank has" if run.feed is None else "rank 0 reads the stream without"
        print(f"evenly: {use} {stated_in_words}", file=sys.stderr, flush=True)
    run.clock = time.perf_counter()
    while run.goes_on:
        step = run.steps_done
        with alone():
            batch = batch_of(step)
        yield batch
        if run.steps_done == step:
            do = "give every batch to run.step, or to run.forward_backward before run.update()"
            raise RunError(f"batch of step {step + 1}", "no step was trained on it", do)
        run.interrupt.begin()
        if run.snapshots is not None:
            run.snapshots.take_if_due()


class _BatchesByIndex:
    """The batches of a map-style dataset.

    Reading goes ahead through the steps in order, and begins again where the loop has not trained on a batch, or has on
    others as well.
    """

    def __init__(self, run: Run) -> None:
        self._share = lru_cache(maxsize=64)(run.share)  # called here and by the loader, which may be ahead
        self._loader, self._steps = run.loader(), run.steps
        self._microbatches: MicrobatchStream | None = None
        self._last: Batch | None = None

    def batch(self, step: int) -> Batch:
        last = self._last
        if self._microbatches is None or last is None or last.remaining or step != last.share.step + 1:
            self._microbatches = self._loader.read(self._share(one) for one in range(step, self._steps))
        self._last = Batch(self._share(step), self._microbatches, self._loader)
        return self._last
