"""The pipeline axis of a run: the stages of this rank, and the parameters that several ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import nn

from evenly.comm.groups import Group
from evenly.model.blocks import Block
from evenly.parallel.pipeline.model import StagedModel
from evenly.parallel.pipeline.stages import StagePlan
from evenly.parallel.pipeline.ties import Ties
from evenly.plan import Plan
from evenly.plan.schedule import rank_of_stage


@dataclass(frozen=True)
class Pipeline:
    """This rank's part of the pipeline.

    names:        of all parameters of the model, in its order.
    tensors:      names of all its parameters and buffers; of tied ones every name.
    placeholders: name -> a meta tensor, for each parameter and buffer that only other ranks hold.
    blocks:       the blocks that this rank runs.
    """

    model: StagedModel
    ties: Ties
    group: Group
    names: Sequence[str]
    tensors: Sequence[str]
    placeholders: dict[str, Any]
    blocks: list[Block]

    @classmethod
    def of(cls, model: StagedModel, stage_plan: StagePlan, plan: Plan, group: Group) -> Pipeline:
        """Reduces `model`, in place, to the stages of this rank of `group`."""
        ranks = rank_of_stage(plan.pipeline.schedule, group.size, plan.pipeline.stages_per_rank)
        own = [stage for stage, rank in enumerate(ranks) if rank == group.position]
        names = [name for name, _ in model.model.named_parameters()]
        named = model.model.named_parameters(remove_duplicate=False), model.model.named_buffers(remove_duplicate=False)
        tensors = [name for name, _ in chain(*named)]
        placeholders = model.keep_stages(stage_plan, own)
        holders = {name: sorted({ranks[stage] for stage in stages}) for name, stages in stage_plan.owners.items()}
        called = {call[0] for call, stage in stage_plan.stage_of.items() if stage in own}
        return cls(
            model=model,
            ties=Ties({name: holders[name] for name in names}, group),
            group=group,
            names=names,
            tensors=tensors,
            placeholders=placeholders,
            blocks=[block for block in model.blocks if block.name in called],
        )

    def parameters(self) -> list[nn.Parameter]:
        """All parameters of the model, in its order; placeholders for those of other ranks."""
        local = dict(self.model.model.named_parameters())
        return [local[name] if name in local else self.placeholders[name] for name in self.names]

    @property
    def share(self) -> float:
        """The share of the parameters' elements that not all ranks hold."""
        elements = dict(zip(self.names, (one.numel() for one in self.parameters()), strict=True))
        everywhere = sum(elements[name] for name in self.ties.everywhere)
        return 1 - everywhere / sum(elements.values())
