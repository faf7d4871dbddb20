"""The weights that a run starts from where its job names some."""

from __future__ import annotations

from pathlib import Path

from evenly.comm.world import World
from evenly.engine.assemble import Load
from evenly.job import Job
from evenly.train.options import RunOptions


def loading(job: Job, world: World, options: RunOptions) -> Load | None:
    """What gives the model of `job` its weights; None where it names none, or the run goes on from a checkpoint.

    A collective where it is not None.
    """
    if job.weights is None or options.resume:
        return None
    from evenly.checkpoint.weights import load_weights  # takes a second to import

    return load_weights(Path(job.weights), world)
