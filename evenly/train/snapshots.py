"""Snapshots: the state of a run's newest steps in the memory of the machine, for ranks that may fail.

They are checkpoints in `checkpoint/shared_memory`, written by the run's own store. When a run is resumed, or the
launcher sees that its ranks have failed, the newest sound one becomes one of the run's checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from evenly.checkpoint.shared_memory import open_memory
from evenly.errors import UserError
from evenly.train.resume import snapshot

if TYPE_CHECKING:
    from evenly.checkpoint.store import CheckpointStore
    from evenly.train.run import Run


class Snapshots:
    """Of `run`, every so many steps; a collective. Raises `UserError` where its ranks share no memory."""

    def __init__(self, run: Run, store: CheckpointStore, every: int) -> None:
        asked, out = "keep snapshots in memory", run.out
        assert out is not None
        if run.world.local_size < run.world.size:
            found = f"{run.world.size} ranks on several machines, which share no memory"
            raise UserError(asked, found, "run without --snapshot")
        self._folder = store.on_first_rank(asked, lambda: open_memory(out))
        self._run, self._store, self._every = run, store, every

    def take_if_due(self) -> None:
        """Begins one, unless the state of this step is saved already or will be at the end."""
        run = self._run
        ends = not run.goes_on
        if not ends and run.saved_at != run.steps_done and run.steps_done % self._every == 0:
            with run.inside(), run.world.during("saving"), run.updaters.evaluating():
                self._store.save(snapshot(run), memory=self._folder)

    def close(self) -> None:
        """Frees the memory."""
        if self._run.world.is_main:
            self._folder.discard()
