"""The one place that applies a plan to a model: which strategies, in which order.

Order: the model stands on the rank's device with its final parameters before anything is split, because the
strategies hold on to the parameters that they find.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from evenly.comm.groups import Group
from evenly.comm.shared_memory import share_memory
from evenly.comm.world import World
from evenly.errors import PlanError
from evenly.model.blocks import Block, find_blocks, find_recomputed, recomputable
from evenly.model.modes import evaluating
from evenly.parallel.core.between_steps import Outside, refuse_inference, show_placeholders
from evenly.parallel.core.calls import BlockCalls, Change, WrappedForwards
from evenly.parallel.core.memory import on
from evenly.parallel.core.mutation_guard import check_memory, memory_of
from evenly.parallel.core.recompute import CachesOff, RecomputedBackward, recomputing
from evenly.parallel.core.recurrent_weights import RecurrentWeights
from evenly.parallel.core.statistics import RunningStatistics
from evenly.parallel.data.gradients import Gradients, GradientSum, trainable
from evenly.parallel.data.local_gradients import LocalGradients
from evenly.parallel.data.ownership import Ownership
from evenly.parallel.data.replicas import ReplicaGradients, Replicas
from evenly.plan import Plan
from evenly.torch_private import without_subclasses

if TYPE_CHECKING:
    from evenly.parallel.core.compiled import Compiler
    from evenly.parallel.data.optimizer import OwnedRows
    from evenly.parallel.data.partition import PartitionedGradients
    from evenly.parallel.data.shards import ShardedGradients
    from evenly.parallel.pipeline.model import StagedModel
    from evenly.parallel.pipeline.pipeline import Pipeline
    from evenly.parallel.pipeline.schedule_runner import ScheduleRunner
    from evenly.parallel.pipeline.stages import StagePlan
    from evenly.parallel.tensor.model import SplitModel
    from evenly.parallel.tensor.splits import ParameterSplit


@dataclass(frozen=True)
class Composed:
    """A model with all axes of its plan applied.

    model:      the parameters and buffers of this rank.
    replicas:   the model on each device of this rank, which run side by side; only one but for `replicas` in the plan.
    gradients:  adds gradients over microbatches, replicas and ranks.
    statistics: per replica, synchronises the buffers that change by a rule.
    forwards:   per replica, the wrapped forwards of its blocks (recomputation, compilation), and what else they change.
    calls:      per replica, the calls of its blocks, each with a random stream of its own.
    cuts:       parameters of which this rank steps only some rows, or a copy on the host.
    sharded:    fraction of the parameters' elements that this plan really splits, 0 to 1.
    tensor:     the model split over the tensor axis, if the plan has one.
    pipeline:   the model in stages, if the plan has a pipeline axis.
    runner:     runs the stages of this rank in the order of the schedule.
    in_step:    whether the model contains collectives of the data axis, so that all ranks must run equally many
                microbatches.
    backward_context: entered around every backward.
    outside:    whether code outside of a loss is the job's or the engine's.
    """

    model: nn.Module
    replicas: Replicas
    gradients: Gradients
    statistics: list[RunningStatistics]
    forwards: list[WrappedForwards | CachesOff | RecurrentWeights]
    calls: list[BlockCalls]
    cuts: Sequence[OwnedRows] = ()
    sharded: float = 0.0
    tensor: SplitModel | None = None
    pipeline: Pipeline | None = None
    runner: ScheduleRunner | None = None
    in_step: bool = False
    backward_context: AbstractContextManager[Any] = field(default_factory=nullcontext[Any])
    outside: Outside = field(default_factory=Outside)

    @property
    def layers(self) -> int:
        """Number of layers with buffers that change by a rule."""
        return self.statistics[0].layers

    @property
    def execution_context(self) -> AbstractContextManager[None]:
        return nullcontext() if self.tensor is None else self.tensor.axis

    @contextmanager
    def showing(self, shown: bool) -> Generator[None]:
        """Within, code outside of a loss finds whole parameters (the job's), or what this rank has (the engine's).

        Begins with the engine's.
        """
        with self.outside.showing(shown), nullcontext() if self.tensor is None else self.tensor.axis.showing(shown):
            yield

    def show_parameters(self) -> None:
        """Has the job's code find whole parameters outside of a loss, but within `showing(False)`."""
        self.outside.shown = True
        if self.tensor is not None:
            self.tensor.axis.shown = True

    def prepare_to_show(self) -> None:
        """Gives what this rank has of parameters the classes of which functions of torch compute wholes."""
        if self.tensor is not None:
            self.tensor.show_parameters(self.model)
            self.tensor.axis.wholes = self.outside.wholes
        if self.pipeline is not None:
            show_placeholders(self.model, self.pipeline.placeholders, self.outside)
        if self.in_step:
            from evenly.parallel.data.sharded_parameter import show_sharded  # takes seconds to import

            for cut in self.cuts:
                show_sharded(cast("Any", cut.parameter), cut.name, cut.rows, self, self.outside)
            self.model.register_forward_pre_hook(refuse_inference, prepend=True)
            self.model.register_forward_hook(self._end_forward, always_call=True)

    def _end_forward(self, *_: object) -> None:
        """After a forward of the job's own between steps, the model again has what can be changed."""
        if self.outside.shown:
            self.gradients.reshard()

    def full_shape(self, name: str, tensor: torch.Tensor) -> torch.Size:
        """The shape of `full_view`."""
        return tensor.shape if self.tensor is None else self.tensor.full_shape(name, tensor.shape)

    def as_parts(self, optimizer: torch.optim.Optimizer) -> None:
        """What the job has made for whole parameters as it built `optimizer`, as the tensor axis leaves it here."""
        if self.tensor is not None:
            for name, parameter in self.model.named_parameters():
                if parameter in optimizer.state:
                    state: dict[str, Any] = optimizer.state[parameter]
                    state |= {key: self.tensor.as_part(name, parameter, value) for key, value in state.items()}

    @property
    def cut(self) -> bool:
        """Whether this rank has not all of the model's parameters as one device has them."""
        return bool(self.cuts) or self.tensor is not None or self.pipeline is not None

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """All parameters of the model by name, in its order; meta tensors for those of other ranks."""
        if self.pipeline is None:
            return [*self.model.named_parameters()]
        return [*zip(self.pipeline.names, self.pipeline.parameters(), strict=True)]

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.named_parameters()]

    @property
    def elements(self) -> int:
        layouts = {} if self.tensor is None else self.tensor.layouts
        split = [(p, layouts[name]) for name, p in self.model.named_parameters() if name in layouts]
        elsewhere = sum(math.prod(layout.full_shape(p.shape)) - p.numel() for p, layout in split)
        return sum(p.numel() for p in self.parameters()) + elsewhere

    def full_view(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The full tensor of a parameter or buffer, or of its gradient; a collective if it is sharded or split."""
        full_tensor = getattr(tensor, "full_tensor", None)
        with without_subclasses():  # of what it is, however it is shown
            mine = tensor if full_tensor is None else full_tensor()
        return mine if self.tensor is None else self.tensor.full_view(name, mine)

    def local_part(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """What the tensor axis leaves on this rank of the full tensor of a parameter."""
        return full if self.tensor is None else self.tensor.local_part(name, full)

    def sync_statistics(self, calls: Sequence[Sequence[int]]) -> None:
        """Ends a step; `calls` as of `RunningStatistics.sync`."""
        first, *others = self.statistics
        with on(0, carrying=True):
            for other in others:
                first.merge(other)
        first.sync(calls)

    def drop_statistics(self) -> None:
        """Ends a step that is not to count: what its forwards have recorded of buffers is gone."""
        for statistics in self.statistics:
            statistics.drop()

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Put every replica into evaluation mode, with current parameters; on exit each module has its mode again.

        `train()` and `eval()` of the job's modules find whole parameters, and what they change of them stays.
        """
        self.gradients.reshard()  # a block that the job has called may be gathered still
        before = memory_of(self.model)
        with ExitStack() as modes:
            with self.showing(True):
                for replica in self.replicas:
                    modes.enter_context(evaluating(replica.called))
            try:
                check_memory(self.model, before)
                self.replicas.refresh()
                self.gradients.gather()
                yield
            finally:
                self.gradients.reshard()  # what is gathered is a copy: writing to it would be lost
                with self.showing(True):
                    modes.close()
        check_memory(self.model, before)

    def close(self) -> None:
        """Removes all hooks and wrappers from the model."""
        self.outside.closed = True
        for part in (self.gradients, *self.statistics, *self.forwards, *self.calls, *filter(None, [self.tensor])):
            part.close()


def compose(
    modules: Sequence[nn.Module],
    plan: Plan,
    world: World,
    splits: Mapping[str, ParameterSplit] | None = None,
    stages: tuple[StagedModel, Mapping[str, StagePlan]] | None = None,
) -> Composed:
    """Applies `plan` to `modules`, one on each of `devices_of` this rank.

    They are changed in place; the first is the model. splits: of its parameters, if the plan has a tensor axis.
    stages: of the model in each phase of the job, if it has a pipeline.

    Order: first the pipeline axis removes the other stages, then the tensor axis splits, then the data axis shards.
    """
    model = modules[0]
    pipeline = _pipeline(*stages, plan, world) if stages is not None else None
    blocks = [find_blocks(module) for module in modules] if pipeline is None else [pipeline.blocks]
    tensor = None if splits is None else _split(model, splits, _tensor_group(world), plan, world.backend)
    if plan.data.zero_stage < 3 and (pipeline or tensor):
        model.to(world.device)
    replicas = Replicas(modules, devices_of(plan, world), output_device=plan.replicas.output_device)
    statistics = _statistics(replicas, plan, world, pipeline, tensor)
    compilers = _compilers(replicas, statistics, plan, world, pipeline)
    forwards = [*_change_blocks(replicas, blocks, plan, compilers), *map(RecurrentWeights, modules)]
    calls = _wrap_calls(replicas, blocks, pipeline)
    gradients = _gradients(replicas, plan, world, blocks[0], _ownership(pipeline, tensor, world))
    sharded = None if isinstance(gradients, GradientSum | LocalGradients | ReplicaGradients) else gradients
    composed = Composed(
        model=model,
        replicas=replicas,
        gradients=gradients,
        statistics=statistics,
        forwards=forwards,
        calls=calls,
        cuts=sharded.cuts if sharded is not None else _offloaded(model, plan),
        sharded=max(part.share if part is not None else 0.0 for part in (pipeline, tensor, sharded)),
        tensor=tensor,
        pipeline=pipeline,
        runner=None if pipeline is None else _runner(pipeline, plan, tensor, gradients),
        backward_context=_backward_context(plan, tensor),
        in_step=plan.data.zero_stage == 3,
    )
    composed.prepare_to_show()
    return composed


def _statistics(
    replicas: Replicas, plan: Plan, world: World, pipeline: Pipeline | None, tensor: SplitModel | None
) -> list[RunningStatistics]:
    placeholders = pipeline.placeholders if pipeline is not None else ()
    whole = plan.data.zero_stage < 3 and tensor is None and pipeline is None
    group = world.group("data")
    found = [
        RunningStatistics(
            r.module,
            group=group,
            alone=plan.devices == 1,
            whole=whole,
            elsewhere=placeholders,
            exact=plan.exact == "bitwise",
        )
        for r in replicas
    ]
    for other in found[1:]:
        other.share_with(found[0])
    return found


def _gradients(
    replicas: Replicas, plan: Plan, world: World, blocks: Sequence[Block], ownership: Ownership | None
) -> GradientSum | LocalGradients | ReplicaGradients | PartitionedGradients | ShardedGradients:
    model, group, float64 = replicas[0].module, world.group("data"), plan.exact == "bitwise"
    if plan.data.zero_stage == 3:
        from evenly.parallel.data.shards import ShardedGradients  # takes seconds to import

        kept = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}  # the job's attributes
        sharded = ShardedGradients(
            model,
            world=world,
            shard=plan.data.shard,
            accumulate_float64=float64,
            ownership=ownership,
            offload=plan.offload == "parameters",
            blocks=blocks,
            split_backward=plan.splits_backward,
        )
        for name, parameter in model.named_parameters():
            vars(parameter).update({key: one for key, one in kept[name].items() if key not in vars(parameter)})
        return sharded
    if plan.data.zero_stage:
        from evenly.parallel.data.partition import PartitionedGradients

        return PartitionedGradients(
            model,
            zero=plan.data.zero_stage,
            world=world,
            shard=plan.data.shard,
            accumulate_float64=float64,
            ownership=ownership,
        )
    if len(replicas) > 1:
        return ReplicaGradients(replicas, group=group, accumulate_float64=float64)
    if plan.sums_locally:
        return LocalGradients(model, ownership=ownership)
    return GradientSum(model, group=group, accumulate_float64=float64, ownership=ownership)


def _offloaded(model: nn.Module, plan: Plan) -> Sequence[OwnedRows]:
    """The parameters whose copy on the host is stepped."""
    if plan.offload != "optimizer":
        return ()
    from evenly.parallel.data.optimizer import OwnedRows

    return [OwnedRows(name, p, p, slice(None)) for name, p in trainable(model, required=not plan.pipeline.active)[0]]


def _runner(pipeline: Pipeline, plan: Plan, tensor: SplitModel | None, gradients: Gradients) -> ScheduleRunner:
    from evenly.parallel.pipeline.backward import StageBackward
    from evenly.parallel.pipeline.schedule_runner import ScheduleRunner

    hooks = cast("ShardedGradients", gradients) if plan.data.zero_stage == 3 else None
    return ScheduleRunner(
        pipeline.model,
        plan.pipeline,
        pipeline.group,
        backward_context=StageBackward(
            plan.pipeline.size, pipeline.model.device, pipeline.model.model, _backward_context(plan, tensor)
        ),
        split_backward=plan.splits_backward,
        before_pass=None if hooks is None else hooks.prepare,
        output_transforms=[
            *([] if tensor is None else [tensor.gathered]),
            *([] if hooks is None else [hooks.end_stage_forward]),
        ],
    )


def _backward_context(plan: Plan, tensor: SplitModel | None) -> AbstractContextManager[object]:
    context: AbstractContextManager[object] = nullcontext() if tensor is None else tensor.axis
    return context if plan.recompute not in ("selective", "full") else RecomputedBackward(plan.recompute, context)


def _tensor_group(world: World) -> Group:
    """The group of the tensor axis, whose ranks share memory where they are on one machine."""
    group: Group = world.group("tensor")
    if world.nodes == 1 and group.shared is None:
        group.shared = share_memory(group)
    return group


def _split(
    model: nn.Module, splits: Mapping[str, ParameterSplit], group: Group, plan: Plan, backend: str
) -> SplitModel:
    """Splits the parameters of `model` over the tensor axis; it may hold only some of `splits`."""
    from evenly.parallel.tensor.layout import Layout
    from evenly.parallel.tensor.model import SplitModel

    local = {name for name, _ in model.named_parameters()}
    layouts = {
        name: Layout.of(s.dim, s.outer, s.units, s.inner, group.size) for name, s in splits.items() if name in local
    }
    turned = [name for name, p in model.named_parameters() if name in layouts and not p.is_contiguous()]
    if turned and plan.data.zero_stage == 3:
        raise PlanError(
            f"plan {plan}",
            f"parameter {turned[0]} is not in memory in the order of its dims (channels last, or transposed), which is "
            "lost where it is split over the tensor axis and sharded too",
            "make it contiguous in the model's builder, or use zero=2",
        )
    how = {"recomputed": plan.recompute == "selective", "overlapped": sums_under_products(plan, backend)}
    return SplitModel(model, layouts, group, sequence=plan.tensor.sequence_parallel, **how)


def sums_under_products(plan: Plan, backend: str) -> bool:
    """Whether sums of the tensor axis are to be under way while gradients of weights are computed.

    NCCL's take no core from them. A split backward computes none meanwhile.
    """
    return backend == "nccl" and not plan.splits_backward


def _pipeline(model: StagedModel, stage_plans: Mapping[str, StagePlan], plan: Plan, world: World) -> Pipeline:
    """Reduces `model` to the stages of this rank."""
    from evenly.parallel.pipeline.pipeline import Pipeline

    model.move(world.device)
    return Pipeline.of(model, stage_plans, plan, world.group("pipeline"))


def _ownership(pipeline: Pipeline | None, tensor: SplitModel | None, world: World) -> Ownership | None:
    """What this rank has of the model's parameters; None for all."""
    if pipeline is None and tensor is None:
        return None
    return Ownership(
        split_names=tensor.layouts if tensor is not None else (),
        tensor_group=world.group("tensor") if tensor is not None else None,
        pipeline_group=pipeline.group if pipeline is not None else None,
        counted_elsewhere=pipeline.ties.counted_elsewhere if pipeline is not None else (),
    )


def _wrap_calls(replicas: Replicas, blocks: Sequence[Sequence[Block]], pipeline: Pipeline | None) -> list[BlockCalls]:
    if pipeline is not None:
        return [BlockCalls(pipeline.model.blocks, replicas[0].device, pipeline.model.call)]
    return [BlockCalls(mine, replica.device) for mine, replica in zip(blocks, replicas, strict=True)]


def _change_blocks(
    replicas: Replicas, blocks: Sequence[Sequence[Block]], plan: Plan, compilers: Sequence[Compiler]
) -> list[WrappedForwards | CachesOff]:
    """Wraps the blocks' forwards: compilation inside, recomputation around it; switches key-value caches off.

    compilers: of each replica; none where blocks run as they are written.
    """
    recomputed, heads = plan.recompute in ("selective", "full"), [*_compiled_heads(replicas, blocks, plan, compilers)]
    changes: list[list[Change]] = [[one.change] for one in compilers] or [[] for _ in replicas]
    asked = ["compile=blocks"] if compilers else []
    if recomputed:
        asked.append(f"recompute={plan.recompute}")
        selective, alone = plan.recompute == "selective", plan.devices == 1
        again = [recomputing(selective=selective, device=replica.device, alone=alone) for replica in replicas]
        changes = [[*mine, change] for mine, change in zip(changes, again, strict=True)]
        if compilers or plan.pipeline.active:
            blocks = [recomputable(mine) for mine in blocks]
        else:
            blocks = [find_recomputed(r.module, mine) for r, mine in zip(replicas, blocks, strict=True)]
    off = [CachesOff(replica.module) for replica in replicas] if recomputed or plan.pipeline.active else []
    if not asked:
        return [*off]
    changed = [*zip(blocks, changes, strict=True), *heads]
    return [*(WrappedForwards(mine, own, asked=" ".join(asked)) for mine, own in changed), *off]


def _compiled_heads(
    replicas: Replicas, blocks: Sequence[Sequence[Block]], plan: Plan, compilers: Sequence[Compiler]
) -> Iterator[tuple[Sequence[Block], list[Change]]]:
    if not compilers:
        return
    from evenly.parallel.core.compiled import unaligned_products

    for replica, mine, compiler in zip(replicas, blocks, compilers, strict=True):
        if heads := unaligned_products(replica.module, mine, device=replica.device, precision=plan.precision):
            yield heads, [compiler.change]


def _compilers(
    replicas: Replicas, statistics: Sequence[RunningStatistics], plan: Plan, world: World, pipeline: Pipeline | None
) -> list[Compiler]:
    if plan.compile != "blocks":
        return []
    from evenly.parallel.core.compiled import Compiler, check_compilable  # torch's compiler takes seconds to import

    for replica in replicas:
        check_compilable(replica.device)
    return [
        Compiler(
            own,
            each_size=plan.pipeline.active and plan.recompute != "none",
            warns=world.group("data").position == 0,
            hindrance="" if pipeline is None else pipeline.looks_inside,
        )
        for own in statistics
    ]


def devices_of(plan: Plan, world: World) -> list[str]:
    """The devices of this rank: one per replica. Raises `PlanError` if this machine has too few GPUs."""
    count = plan.replicas.count
    if world.device == "cpu" or count == 1:
        return [world.device] * count
    found = torch.cuda.device_count()
    if count > found:
        raise PlanError(f"plan {plan}", f"this machine has {found} GPUs", f"give replicas={found}")
    return [f"cuda:{number}" for number in range(count)]
