"""The average of a run's weights, where its job keeps one: made, evaluated, and named for a checkpoint."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from evenly.checkpoint.manifest import AVERAGE

if TYPE_CHECKING:
    import torch

    from evenly.engine.averaged_weights import AveragedWeights
    from evenly.engine.compose import Composed
    from evenly.job import Job
    from evenly.plan import Plan
    from evenly.train.run import Run


def averaged_weights(job: Job, plan: Plan, composed: Composed) -> AveragedWeights | None:
    """The average that `job` keeps of the parameters of `composed`, not yet begun; None where it keeps none."""
    if job.average is None:
        return None
    from evenly.engine.averaged_weights import AveragedWeights  # DTensors take seconds to import

    return AveragedWeights(job.average, plan, composed)


@contextmanager
def in_model(run: Run, asked: bool) -> Generator[bool]:
    """Within, the model has the average if that is `asked` and it has begun; yields whether it has it.

    Raises `RunError` where the weights are asked for and the model has the average already.
    """
    average = run.weight_average
    if average is not None and not asked:
        average.require_weights("evaluating the weights themselves")
    with nullcontext() if average is None or not asked else average.in_model():
        yield average is not None and average.is_in_model


def named_averages(run: Run) -> dict[str, torch.Tensor]:
    """What this rank has of the average by name in a checkpoint; empty where it has not begun."""
    if run.weight_average is None or not run.weight_average.count:
        return {}
    return {f"{AVERAGE}{name}": tensor for name, tensor in run.weight_average.named_tensors().items()}
