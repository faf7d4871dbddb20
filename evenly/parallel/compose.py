"""The one place that applies a plan to a model: which strategies, in which order.

Order: the model stands on the rank's device with its final parameters before anything is split, because the
strategies hold on to the parameters that they find.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from evenly.cluster.world import World
from evenly.parallel.gradients import GradientSum
from evenly.parallel.recompute import Recomputation
from evenly.parallel.statistics import RunningStatistics
from evenly.plan import Plan


class Gradients(Protocol):
    """What a step asks of whoever adds up gradients; `parallel.gradients` says in which order."""

    def begin(self, *, numbers: int = 0) -> None: ...
    def expect_last(self) -> None: ...
    def send(self, numbers: Sequence[float] | torch.Tensor = ()) -> None: ...
    def receive(self) -> list[float]: ...
    def divide(self, divisor: float) -> None: ...
    def norm(self) -> torch.Tensor: ...
    def scale(self, factor: float) -> None: ...
    def rest(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Composed:
    """A model as its plan runs it.

    model:      what the job's loss calls.
    gradients:  adds gradients over microbatches and ranks.
    statistics: keeps the running statistics of normalisation layers.
    sharded:    share of the parameters' elements that this plan really splits, 0 to 1.
    in_step:    whether ranks meet inside the model, so that each must run as many microbatches as the others.
    recomputed: the blocks that recompute, None where none do.
    """

    model: nn.Module
    gradients: Gradients
    statistics: RunningStatistics
    sharded: float
    in_step: bool
    recomputed: Recomputation | None

    def close(self) -> None:
        """Leaves the model as it would be without a plan."""
        self.gradients.close()
        self.statistics.close()
        if self.recomputed is not None:
            self.recomputed.close()


def compose(model: nn.Module, plan: Plan, world: World) -> Composed:
    """Applies `plan` (fitted to the world and resolved) to `model`, which is changed in place."""
    group, wide = world.group("data"), plan.exact == "bitwise"
    statistics = RunningStatistics(model, group=group)
    recomputed = None
    if plan.recompute in ("selective", "full"):
        recomputed = Recomputation(model, selective=plan.recompute == "selective")
    if plan.zero and world.size > 1:
        from evenly.parallel.shards import ShardedGradients  # takes seconds to import

        assert plan.shard != "auto"  # the plan is fitted
        sharded = ShardedGradients(model, world=world, zero=plan.zero, shard=plan.shard or world.size, wide=wide)
        return Composed(model, sharded, statistics, sharded=sharded.share, in_step=True, recomputed=recomputed)
    gradients = GradientSum(model, group=group, wide=wide)
    return Composed(model, gradients, statistics, sharded=0.0, in_step=False, recomputed=recomputed)
