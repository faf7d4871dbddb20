"""The pipeline axis of a run: the stages of this rank, and the parameters that several ranks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    stage_plans:  of the model, by phase of the job; all with the same owners.
    names:        of all parameters of the model, in its order.
    tensors:      names of all its parameters and buffers; of tied ones every name.
    placeholders: name -> a meta tensor, for each parameter and buffer that only other ranks hold.
    blocks:       the blocks that this rank runs.
    """

    model: StagedModel
    stage_plans: Mapping[str, StagePlan]
    ties: Ties
    group: Group
    names: Sequence[str]
    tensors: Sequence[str]
    placeholders: dict[str, Any]
    blocks: list[Block]

    @classmethod
    def of(cls, model: StagedModel, stage_plans: Mapping[str, StagePlan], plan: Plan, group: Group) -> Pipeline:
        """Reduces `model`, in place, to the stages of this rank of `group`."""
        stage_plan = next(iter(stage_plans.values()))
        ranks = rank_of_stage(plan.pipeline.schedule, group.size, plan.pipeline.stages_per_rank)
        own = [stage for stage, rank in enumerate(ranks) if rank == group.position]
        names = [name for name, _ in model.model.named_parameters()]
        named = model.model.named_parameters(remove_duplicate=False), model.model.named_buffers(remove_duplicate=False)
        tensors = [name for name, _ in chain(*named)]
        placeholders = model.keep_stages(stage_plan, own)
        holders = {name: sorted({ranks[stage] for stage in stages}) for name, stages in stage_plan.owners.items()}
        stages_of = [item for one in stage_plans.values() for item in one.stage_of.items()]
        called = {call[0] for call, stage in stages_of if stage in own}
        return cls(
            model=model,
            stage_plans=stage_plans,
            ties=Ties({name: holders[name] for name in names}, group),
            group=group,
            names=names,
            tensors=tensors,
            placeholders=placeholders,
            blocks=[block for block in model.blocks if block.name in called],
        )

    @property
    def looks_inside(self) -> str:
        """Why a stage has to see what blocks compute inside; "" where none has to."""
        found = any(one.runs_through for one in self.stage_plans.values())
        return "there are hooks on blocks, or a later stage needs what a block does not return" if found else ""

    def begin(self, phase: str) -> None:
        """From here on stages run the loss of `phase` of the job; without such a loss those of the first."""
        self.model.set_stage_plan(self.stage_plans.get(phase) or next(iter(self.stage_plans.values())))

    def parameters(self) -> list[nn.Parameter]:
        """All parameters of the model, in its order; placeholders for those of other ranks."""
        local = dict(self.model.model.named_parameters())
        return [local[name] if name in local else self.placeholders[name] for name in self.names]

    @property
    def share(self) -> float:
        elements = dict(zip(self.names, (one.numel() for one in self.parameters()), strict=True))
        everywhere = sum(elements[name] for name in self.ties.everywhere)
        return 1 - everywhere / sum(elements.values())
