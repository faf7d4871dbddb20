"""What a run does with the model that the job has just built, while it is whole: weights, and a look at its adapter."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from evenly.checkpoint.adapter import Adapter, find_adapter
from evenly.comm.world import World
from evenly.engine.assemble import Load
from evenly.job import Job
from evenly.parallel.core.sharded_init import ShardedInit
from evenly.train.options import RunOptions


class ModelStart:
    """Gives a model, just built, the weights that its job names; to call it is a collective.

    adapter: what peft would save of the model; None where it is none of peft's, or was not called yet.

    Making one is a collective where the job names weights.
    """

    def __init__(self, job: Job, world: World, options: RunOptions) -> None:
        self.adapter: Adapter | None = None
        self._load: Load | None = None
        if job.weights is not None and not options.resume:  # the checkpoint counts
            from evenly.checkpoint.weights import load_weights  # takes a second to import

            self._load = load_weights(Path(job.weights), world)

    def __call__(self, model: nn.Module, init: ShardedInit | None) -> None:
        """Fills `model`, of which `init` keeps large tensors in slices."""
        if self._load is not None:
            self._load(model, init)
        self.adapter = find_adapter(model)
