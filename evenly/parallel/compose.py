"""The one place that applies a plan to a model: which strategies, in which order.

Order: the model stands on the rank's device with its final parameters before anything is split, because the
strategies hold on to the parameters that they find.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from evenly.cluster.world import World
from evenly.comm.groups import Group
from evenly.errors import PlanError
from evenly.parallel.calls import BlockCalls
from evenly.parallel.forwards import BlockForwards, Forward
from evenly.parallel.gradients import Gradients, GradientSum, Parts, trainable
from evenly.parallel.memory import on
from evenly.parallel.recompute import CachesOff, recomputing
from evenly.parallel.replicas import ReplicaGradients, Replicas
from evenly.parallel.statistics import RunningStatistics
from evenly.plan import Plan

if TYPE_CHECKING:
    from evenly.model.splits import ParameterSplit
    from evenly.parallel.optimizer import Cut
    from evenly.parallel.tensor.model import SplitModel


@dataclass(frozen=True)
class Composed:
    """A model as its plan runs it.

    model:      the parameters and buffers of this rank.
    replicas:   the model on each device of this rank, which run side by side; only one but for `replicas` in the plan.
    gradients:  adds gradients over microbatches, replicas and ranks.
    statistics: of each replica, keeps the running statistics of normalisation layers.
    forwards:   of each replica, what its blocks run instead of their own forward.
    calls:      of each replica, the calls of its blocks, which draw random numbers of their own.
    cuts:       parameters that this rank does not step as they stand, but its part of them or a copy on the host.
    sharded:    share of the parameters' elements that this plan really splits, 0 to 1.
    tensor:     the model's parameters as parts of larger ones, where the tensor axis splits them.
    in_step:    whether ranks meet inside the model, so that each must run as many microbatches as the others.
    """

    model: nn.Module
    replicas: Replicas
    gradients: Gradients
    statistics: list[RunningStatistics]
    forwards: list[BlockForwards | CachesOff]
    calls: list[BlockCalls]
    cuts: Sequence[Cut] = ()
    sharded: float = 0.0
    tensor: SplitModel | None = None
    in_step: bool = False

    @property
    def layers(self) -> int:
        """How many layers keep running statistics."""
        return self.statistics[0].layers

    @property
    def computing(self) -> AbstractContextManager[None]:
        """Around everything that the job computes with the model."""
        return nullcontext() if self.tensor is None else self.tensor.axis

    def whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """All of what the ranks hold of a parameter or buffer, or of its gradient; a collective where it is cut."""
        full_tensor = getattr(tensor, "full_tensor", None)
        mine = tensor if full_tensor is None else full_tensor()
        return mine if self.tensor is None else self.tensor.whole(name, mine)

    def fold_statistics(self, calls: Sequence[Sequence[int]]) -> None:
        """Ends a step; `calls` as of `RunningStatistics.fold`."""
        first, *others = self.statistics
        with on(0, carrying=True):
            for other in others:
                first.take(other)
        first.fold(calls)

    def train(self, mode: bool) -> None:
        """Every replica in training mode, or in evaluation mode with the values of now."""
        for replica in self.replicas:
            replica.called.train(mode)
        if mode:
            self.gradients.rest()
        else:
            self.replicas.refresh()

    def close(self) -> None:
        """Leaves the model as it would be without a plan."""
        for part in (self.gradients, *self.statistics, *self.forwards, *self.calls, *filter(None, [self.tensor])):
            part.close()


def compose(
    modules: Sequence[nn.Module], plan: Plan, world: World, splits: Mapping[str, ParameterSplit] | None = None
) -> Composed:
    """Applies `plan` (fitted to the world and resolved) to `modules`, one on each of `devices_of` this rank.

    They are changed in place; the first is the model. splits: of its parameters, where the plan has a tensor axis.
    """
    model, group, wide = modules[0], world.group("data"), plan.exact == "bitwise"
    tensor = parts_of = None
    if splits is not None:
        tensor = _split(model, splits, world.group("tensor"), plan)
        if plan.stage < 3:
            model.to(world.device)
        parts_of = Parts(tensor.layouts, world.group("tensor"))
    replicas = Replicas(modules, devices_of(plan, world), gather=plan.gather)
    statistics = [RunningStatistics(r.module, group=group, alone=plan.devices == 1) for r in replicas]
    parts: dict[str, Any] = {
        "replicas": replicas,
        "statistics": statistics,
        "forwards": _change_blocks(replicas, plan),
        "calls": [BlockCalls(replica.module, replica.device) for replica in replicas],
    }
    if tensor is not None:
        parts |= {"tensor": tensor, "sharded": tensor.share}
    if plan.stage:
        assert plan.shard != "auto"  # the plan is fitted
        settings: dict[str, Any] = {"world": world, "shard": plan.shard or group.size, "wide": wide, "parts": parts_of}
        if plan.stage == 3:
            from evenly.parallel.shards import ShardedGradients  # takes seconds to import

            sharded = ShardedGradients(model, offload=plan.offload == "parameters", **settings)
        else:
            from evenly.parallel.partition import PartitionedGradients

            sharded = PartitionedGradients(model, zero=plan.stage, **settings)
        parts |= {"cuts": sharded.cuts, "sharded": max(sharded.share, tensor.share if tensor else 0.0)}
        return Composed(model, gradients=sharded, in_step=plan.stage == 3, **parts)
    if plan.offload == "optimizer":
        from evenly.parallel.optimizer import Cut

        parts["cuts"] = [Cut(name, p, p, slice(None)) for name, p in trainable(model)[0]]
    if len(replicas) > 1:
        return Composed(model, gradients=ReplicaGradients(replicas, group=group, wide=wide), **parts)
    return Composed(model, gradients=GradientSum(model, group=group, wide=wide, parts=parts_of), **parts)


def _split(model: nn.Module, splits: Mapping[str, ParameterSplit], group: Group, plan: Plan) -> SplitModel:
    """Splits the parameters of `model` over the tensor axis."""
    from evenly.parallel.tensor.layout import Layout
    from evenly.parallel.tensor.model import SplitModel

    layouts = {name: Layout.of(s.dim, s.outer, s.units, s.inner, group.size) for name, s in splits.items()}
    keeping = plan.recompute == "selective"
    return SplitModel(model, layouts, group, sequence=plan.sequence == "split", recomputed=keeping)


def _change_blocks(replicas: Replicas, plan: Plan) -> list[BlockForwards | CachesOff]:
    """Recomputation inside, compilation around it."""
    changes: dict[str, Callable[[Forward], Forward]] = {}
    if plan.recompute in ("selective", "full"):
        changes[f"recompute={plan.recompute}"] = recomputing(selective=plan.recompute == "selective")
    if plan.compile == "blocks":
        from evenly.parallel.compiled import check_compilable, compiling

        for replica in replicas:
            check_compilable(replica.module, replica.device)
        changes["compile=blocks"] = compiling
    if not changes:
        return []
    forwards = [BlockForwards(r.module, [*changes.values()], asked=" ".join(changes)) for r in replicas]
    return [*forwards, *(CachesOff(r.module) for r in replicas if plan.recompute in ("selective", "full"))]


def devices_of(plan: Plan, world: World) -> list[str]:
    """The devices of this rank: its own, or as many as the plan has replicas. `PlanError` beyond this machine's."""
    assert plan.replicas != "auto"  # the plan is fitted
    count = plan.replicas or 1
    if world.device == "cpu" or count == 1:
        return [world.device] * count
    found = torch.cuda.device_count()
    if count > found:
        raise PlanError(f"plan {plan}", f"this machine has {found} GPUs", f"give replicas={found}")
    return [f"cuda:{number}" for number in range(count)]
