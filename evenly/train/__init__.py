"""The step, precision, the run and its loop."""

from evenly.train.run import Batch, Evaluation, Run, StepReport, start

__all__ = ["Batch", "Evaluation", "Run", "StepReport", "start"]
