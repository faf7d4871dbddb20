"""This rank's share of a batch, as the executors run it."""

from __future__ import annotations

from collections.abc import Iterator

from evenly.data.loader import Microbatch, MicrobatchStream, Share
from evenly.parallel.core.memory import HOST, on


class Batch:
    """This rank's share of one batch, or of an evaluation; a training batch is given to `Run.step` once."""

    def __init__(self, share: Share, microbatches: MicrobatchStream) -> None:
        self.share, self.microbatches = share, microbatches
        self._left = share.runs

    def rounds(self, size: int) -> Iterator[list[Microbatch]]:
        """The microbatches in order, `size` at a time."""
        while self._left:
            now = min(size, self._left)
            self._left -= now
            with on(HOST):
                microbatches = [next(self.microbatches) for _ in range(now)]
            yield microbatches

    @property
    def left(self) -> int:
        """Microbatches that were not yet run."""
        return self._left
