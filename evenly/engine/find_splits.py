"""Which parameters the tensor axis splits: derived on rank 0 and sent to all; and the explanation without ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from evenly.comm.collectives import decided_by_first
from evenly.comm.world import World
from evenly.data.alone import looking
from evenly.data.generators import undisturbed
from evenly.data.loader import Loader, share_of_step
from evenly.engine.build import build_model
from evenly.engine.precision import place_batch
from evenly.errors import PlanError, UserError
from evenly.job import Job, Precision
from evenly.parallel.tensor.splits import Derivation, ParameterSplit, Selection, SplitGroup, derive, select
from evenly.parallel.tensor.trace import trace
from evenly.plan import Plan, PlanSpec, with_microbatch


def find_splits(job: Job, model: nn.Module, plan: Plan, world: World) -> Mapping[str, ParameterSplit] | None:
    """How to split each parameter of `model`, by name, that can be; None without a tensor axis. A collective.

    Raises `PlanError`, on all ranks, where nothing can be split or the model cannot be traced.
    """
    if not plan.tensor.active:
        return None

    def chosen() -> Selection:
        return choose_splits(plan, derivation_of(job, model, plan.precision))

    with undisturbed(world.device):  # what rank 0 draws, the others do not
        return decided_by_first(chosen, world.group("world")).splits


@looking()
def derivation_of(job: Job, model: nn.Module, precision: Precision) -> Derivation:
    """What can be split in `model`, found by tracing the job's loss on its first microbatch."""
    share = replace(share_of_step(job, 0, rank=0, ranks=1), own=[0])
    batch = place_batch(next(Loader(job).read(iter([share]))).batch, precision, "cpu")
    return derive(trace(model, job.traced_loss, batch))


def choose_splits(plan: Plan, derivation: Derivation) -> Selection:
    """The parameters that `plan` splits; raises `PlanError` where there are none."""
    choice = _selection(plan, derivation)
    if not choice.splits:
        reasons = dict.fromkeys(reason for _, reason in choice.unsplit)
        reasons |= dict.fromkeys(
            reason for forbidden in derivation.forbidden.values() for reason in forbidden if reason
        )
        raise PlanError(
            f"plan {plan}",
            f"no parameter of the model can be split over {choice.ranks} ranks: {'; '.join([*reasons][:3])}",
            "use another axis (ddp, zero3), or another number of ranks",
        )
    return choice


def _selection(plan: Plan, derivation: Derivation) -> Selection:
    return select(derivation, plan.tensor.size, plan.tensor.exclude)


@dataclass(frozen=True)
class ExplainedGroup:
    """A group of parameters that are split together or not at all; see `SplitGroup` for the first fields.

    split:  whether the plan splits it.
    reason: why not; empty if it does.
    """

    parameters: tuple[ParameterSplit, ...]
    elements: int
    forward_bytes: int
    backward_bytes: int
    sums: tuple[str, ...]
    split: bool
    reason: str


@dataclass(frozen=True)
class Explanation:
    """What a plan's tensor axis splits of a job's model, and why nothing else.

    ranks:    of the tensor axis.
    share:    fraction of the model's `elements` that is split.
    groups:   all that can be split over some number of ranks.
    unsplit:  parameters that are in no group -> the reason for each dim.
    """

    plan: str
    ranks: int
    share: float
    elements: int
    groups: tuple[ExplainedGroup, ...]
    unsplit: dict[str, tuple[str, ...]]


def explain_splits(job: Job, spec: PlanSpec) -> Explanation:
    """What the tensor axis of `spec` splits of the job's model; runs in this process alone, on fake tensors.

    Raises `PlanError` where the plan has no tensor axis, its size is open, the plan has another microbatch than the
    job, or the model cannot be traced.
    """
    if not spec.splits_tensors:
        raise PlanError(
            f"explain plan {spec}",
            "it has no tensor axis, which splits a model's tensors, and no pipeline, which cuts it into stages",
            "add its size: --only tensor=2, or --only pipeline=2",
        )
    if spec.tensor == "auto":
        raise PlanError(
            f"explain plan {spec}",
            "the tensor axis takes all devices that a run is given, and here none are",
            "give its size: --only tensor=2",
        )
    sized = PlanSpec(
        data=1,
        tensor=spec.tensor,
        tensor_exclude=spec.tensor_exclude,
        microbatch=spec.microbatch,
        precision=spec.precision,
        exact=spec.exact,
    )
    plan = sized.complete(job.precision)
    derivation = _fake_derivation(with_microbatch(job, plan), plan.precision)
    choice = _selection(plan, derivation)
    reasons = dict(choice.unsplit)
    return Explanation(
        plan=str(spec),
        ranks=choice.ranks,
        share=choice.share,
        elements=sum(derivation.elements.values()),
        groups=tuple(_explained(group, reasons.get(group, "")) for group in derivation.groups),
        unsplit={name: reasons for name, reasons in derivation.forbidden.items() if all(reasons)},
    )


def _explained(group: SplitGroup, reason: str) -> ExplainedGroup:
    return ExplainedGroup(
        parameters=group.parameters,
        elements=group.elements,
        forward_bytes=group.forward_bytes,
        backward_bytes=group.backward_bytes,
        sums=group.sums,
        split=not reason,
        reason=reason,
    )


def _fake_derivation(job: Job, precision: Precision) -> Derivation:
    """Derives on the meta device, so for a model of any size; where its code needs values, on the real model."""
    try:
        with torch.device("meta"):
            model = build_model(job, precision=precision, device=None)
        return derivation_of(job, model, precision)
    except UserError:
        return derivation_of(job, build_model(job, precision=precision, device=None), precision)
