"""TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from evenly.observe.loggers.logger import LoggedRun, Logger, LogRow, flat_config

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger(Logger):
    """Logs to TensorBoard's files in the folder `path`, by default `tensorboard/` in the run's own.

    A run that goes on has TensorBoard forget what was logged of the steps that it repeats.
    """

    name = "tensorboard"
    packages = ("tensorboard",)
    pip = "tensorboard"
    place = "tensorboard"

    def open(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = self.path(run)
        goes_on = any(folder.glob("events.out.tfevents.*"))
        self._writer = SummaryWriter(str(folder), purge_step=run.step + 1 if goes_on else None)
        if not goes_on:
            _add_config(self._writer, run)
        self._writer.flush()

    def add(self, rows: Sequence[LogRow]) -> None:
        for row in rows:
            for name, value in row.figures.items():
                self._writer.add_scalar(name, value, row.step, walltime=row.time_s)
        self._writer.flush()

    def finish(self, *, failed: bool) -> None:
        self._writer.close()


def _add_config(writer: SummaryWriter, run: LoggedRun) -> None:
    from torch.utils.tensorboard.summary import hparams

    figures = {"loss": 0.0, "eval_loss": 0.0}  # of which the dashboard of hparams shows the last
    if writer.file_writer is not None:  # as it is until the writer is closed
        for summary in hparams(flat_config(run.config), figures):
            writer.file_writer.add_summary(summary)
