"""The step, precision, the run and its loop."""

from evenly.engine.executor import Batch
from evenly.train.reports import Evaluation, StepReport
from evenly.train.run import Run, start

__all__ = ["Batch", "Evaluation", "Run", "StepReport", "start"]
