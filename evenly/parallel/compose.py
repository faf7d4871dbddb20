"""The one place that applies a plan to a model: which strategies, in which order.

Order: the model stands on the rank's device with its final parameters before anything is split, because the
strategies hold on to the parameters that they find.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from evenly.cluster.world import World
from evenly.parallel.gradients import GradientSum
from evenly.parallel.statistics import RunningStatistics
from evenly.plan import Plan


@dataclass(frozen=True)
class Composed:
    """A model as its plan runs it.

    model:      what the job's loss calls.
    gradients:  adds gradients over microbatches and ranks.
    statistics: keeps the running statistics of normalisation layers.
    sharded:    share of the parameters' elements that this plan really splits, 0 to 1.
    """

    model: nn.Module
    gradients: GradientSum
    statistics: RunningStatistics
    sharded: float

    def close(self) -> None:
        """Leaves the model as it would be without a plan."""
        self.gradients.close()
        self.statistics.close()


def compose(model: nn.Module, plan: Plan, world: World) -> Composed:
    """Applies `plan` (fitted to the world and resolved) to `model`, which is changed in place."""
    group = world.group("data")
    return Composed(
        model=model,
        gradients=GradientSum(model, group=group, wide=plan.exact == "bitwise"),
        statistics=RunningStatistics(model, group=group),
        sharded=0.0,
    )
