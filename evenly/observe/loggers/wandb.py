"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from evenly.observe.loggers.logger import KeptRun, LoggedRun, Logger, LogRow

if TYPE_CHECKING:
    import wandb


class WandbLogger(Logger):
    """Logs to a run of `project` in Weights & Biases; whether online or not, WANDB_MODE says.

    A run that goes on goes on there too, under the same id. Where the process has a run of wandb's already, it is that
    one that gets the figures, and it stays open.
    Raises `UserError` where the package is missing.
    """

    name = "wandb"
    packages = ("wandb",)
    pip = "wandb"

    def __init__(self, project: str) -> None:
        super().__init__()
        self._project = project

    def open(self, run: LoggedRun) -> None:
        import wandb

        self._kept = KeptRun(run.kept(self.name), self._project)
        self._is_own = wandb.run is None
        self._run: wandb.Run = wandb.run or self._started(run)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._kept.id = self._run.id
        self._kept.note(())

    def _started(self, run: LoggedRun) -> wandb.Run:
        import wandb

        return wandb.init(
            project=self._project,
            name=run.name,
            id=self._kept.id,
            resume="allow" if self._kept.id is not None else None,
            config={**run.config} if self._kept.id is None else None,
            dir=None if run.out is None else str(run.out),
            settings=wandb.Settings(silent=True, console="off"),  # which leaves the terminal to the run
        )

    def add(self, rows: Sequence[LogRow]) -> None:
        for row in rows:
            if figures := self._kept.left(row):
                self._run.log({"step": row.step, **figures})
        self._kept.note(rows)

    def finish(self, *, failed: bool) -> None:
        if self._is_own:
            self._run.finish(exit_code=int(failed))
