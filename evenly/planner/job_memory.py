"""Memory of a job's step under a plan of evenly's own, of every rank: profiles and engines put together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from evenly.parallel.data.grouping import deal_out, unit_members
from evenly.parallel.pipeline.orders import acknowledgements, orders, receives_ahead
from evenly.plan import Plan
from evenly.plan.axes import DeviceReplicas
from evenly.plan.schedule import Action, rank_of_stage, runnable
from evenly.planner.job_profile import JobProfiler, Stages
from evenly.planner.memory import (
    FullSums,
    LocalSums,
    Meter,
    ShardedSums,
    Sums,
    norm_bytes,
    piece_elements,
    piece_shape,
    play,
)
from evenly.planner.optimizer_costs import OptimizerCosts
from evenly.planner.profile import MODEL, Bytes, Event, Interval, Parameter, Pass, Profile, stage_profile
from evenly.planner.shard_sums import ShardSums, Unit


def memory_of_ranks(profiler: JobProfiler, plan: Plan) -> list[Meter]:
    """The bytes that every device of `plan` holds in a step, in the order of ranks; those that do the same share one.

    Raises `UserError` where the model cannot be read.
    """
    if plan.replicas.count > 1 or plan.replicas.output_device is not None:
        alone, output_device = replace(plan, replicas=DeviceReplicas(1, None)), plan.replicas.output_device
        numbers = range(plan.replicas.count)
        return [_ReplicaReplay(profiler, alone, n, plan.replicas.count, output_device).step() for n in numbers]
    ranks = range(plan.data.size)
    if plan.pipeline.active:
        stages, positions = profiler.stages(plan, None), range(plan.pipeline.size)
        replays = [_PipelineReplay(profiler, plan, rank, stages, at) for at in positions for rank in ranks]
    else:
        replays = [_DataReplay(profiler, plan, rank) for rank in ranks]
    meters: dict[object, Meter] = {}
    for one in replays:
        if one.key not in meters:
            meters[one.key] = one.step()
    return [meters[one.key] for one in replays for _ in range(plan.tensor.size)]


@dataclass(eq=False)
class _DataReplay:
    """A rank of the data axis that has the whole model."""

    profiler: JobProfiler
    plan: Plan
    rank: int

    def __post_init__(self) -> None:
        self.meter = Meter()
        self.shard = self.plan.data.shard
        share = self.profiler.share(self.rank, self.plan.axes["data"])
        self.share = share.filled() if self.plan.data.zero_stage == 3 else share
        self.profiles = [self.profiler.profile(self.plan, n) for n in (*self.share.own, *self.share.fillers)]
        self.first = self.profiles[0] if self.profiles else self.profiler.profile(self.plan)
        self.parameters = self.own_parameters()
        self.on_host = self.plan.offload == "parameters"
        self.layers, self.statistics = self.profiler.statistics_bytes(self.plan)

    @cached_property
    def key(self) -> object:
        return (*map(id, self.profiles),), (*self.stepped.values(),), self.stage_key

    @property
    def stage_key(self) -> int:
        return 0

    def step(self) -> Meter:
        """The meter after a step."""
        meter = self.meter
        sums = self.sums()
        if not self.on_host:
            meter.add("parameters", self.model_bytes())
        costs = self.profiler.optimizer_costs(self.plan)
        if self.plan.offload in (None, "none"):
            meter.add("optimizer", costs.bytes(self.stepped) + self.average_bytes())
        sums.begin(len(self.profiles))
        self.passes(sums)
        self.update(sums, costs)
        return meter

    def update(self, sums: Sums, costs: OptimizerCosts) -> None:
        meter = self.meter
        sums.finish_reduce()
        apart = self.plan.pipeline.active or self.plan.tensor.active
        itemsize = next((one.dtype.itemsize for one in self.parameters), 8)
        meter.for_a_while("temporaries", norm_bytes(sums.norm_lengths(apart=apart), itemsize))
        if self.plan.offload in (None, "none"):
            elements = {name: math.prod(shape) for name, shape in self.stepped.items()}
            temporary = costs.temporary_bytes(elements)
            if self.steps_wholes:  # whole gradients, and parameters that are cut; what is dealt is packed, too
                whole = itemsize * sum(elements.values())
                cut = self.plan.data.zero_stage == 3 or self.plan.tensor.active
                temporary = (1 + cut) * whole + max(self.deals * whole, temporary)
            meter.for_a_while("temporaries", temporary)
        sums.all_gather_parameters()

    def own_parameters(self) -> list[Parameter]:
        return [*self.first.parameters.values()]

    def passes(self, sums: Sums) -> None:
        """Forward and backward of all microbatches."""
        for number, profile in enumerate(self.profiles):
            self.run(profile, sums, last=number == len(self.profiles) - 1)

    def run(self, profile: Profile, sums: Sums, *, last: bool) -> None:
        """Forward and backward of a microbatch."""
        play(self.meter, sums, profile.forward)
        self.meter.add("activations", self.statistics)
        if last:
            sums.expect_last()
        play(self.meter, sums, profile.backward)
        sums.finish_backward()

    def sums(self) -> Sums:
        accumulate_float64 = self.plan.exact == "bitwise"
        if self.plan.data.zero_stage == 3:
            return ShardSums(
                self.meter,
                self.units(),
                ranks=self.shard,
                accumulate_float64=accumulate_float64,
                on_host=self.on_host,
                split_backward=self.split_backward,
            )
        if self.plan.data.zero_stage:
            return ShardedSums(
                self.meter,
                self.parameters,
                zero=self.plan.data.zero_stage,
                ranks=self.shard,
                accumulate_float64=accumulate_float64,
                rounds=self.rounds,
            )
        if self.sums_locally:
            return LocalSums(self.meter, self.parameters, on_cpu=self.profiler.device == "cpu")
        numbers = len(self.share.microbatches) * (2 + self.layers) + (self.plan.ranks or 1) + 1
        ranks = self.plan.data.size
        return FullSums(
            self.meter, self.parameters, accumulate_float64=accumulate_float64, numbers=numbers, ranks=ranks
        )

    @property
    def sums_locally(self) -> bool:
        return self.plan.sums_locally

    @property
    def split_backward(self) -> bool:
        return self.plan.splits_backward

    @property
    def rounds(self) -> int:
        """The most backwards that any rank of the data axis runs in a step."""
        return self.share.rounds

    def units(self) -> list[Unit]:
        calls: dict[str, set[int]] = {}
        for number, call in enumerate(self.first.calls):
            calls.setdefault(call.block, set()).add(number)
        found = unit_members(
            [(one.names, one.bytes) for one in self.parameters], [b.name for b in self.profiler.blocks(self.plan)]
        )
        units = [
            Unit([self.parameters[number] for number in one.members], frozenset(calls.get(one.block, ())), one.whole)
            for one in found
        ]
        apart = {number for one in found for number in one.members}
        return [Unit([one for number, one in enumerate(self.parameters) if number not in apart]), *units]

    @property
    def steps_wholes(self) -> bool:
        """Whether a parameter that is cut is whole at the ranks that step it."""
        cut = self.plan.data.zero_stage > 0 or self.plan.tensor.active
        return cut and not self.profiler.optimizer_costs(self.plan).elementwise

    @property
    def deals(self) -> bool:
        return self.profiler.optimizer_costs(self.plan).dealt and not self.plan.tensor.active

    @cached_property
    def stepped(self) -> Mapping[str, Sequence[int]]:
        """Shapes of what this rank steps."""
        if not self.steps_wholes:
            return self.pieces
        sizes = {one.names[0]: one.bytes * one.trained for one in self.parameters if one.shape and self.deals}
        owners, own = deal_out(sizes, self.shard), self.rank % self.shard  # what has no owner, every rank steps
        model, names = self.profiler.model(self.plan.precision), [one.names[0] for one in self.parameters]
        return {name: tuple(model.get_parameter(name).shape) for name in names if owners.get(name, own) == own}

    @cached_property
    def pieces(self) -> Mapping[str, Sequence[int]]:
        """Shapes of what the data axis has this rank keep of each parameter."""
        position = self.rank % self.shard if self.plan.data.zero_stage else None
        return {one.names[0]: piece_shape(one, self.shard, position) for one in self.parameters}

    def average_bytes(self) -> int:
        if self.profiler.job.average is None:
            return 0
        shapes = self.pieces if self.steps_wholes else self.stepped
        sizes = {one.names[0]: one.dtype.itemsize for one in self.parameters if one.trained}
        return sum(math.prod(shape) * sizes.get(name, 0) for name, shape in shapes.items())

    def model_bytes(self) -> int:
        """Parameters, as cut where zero cuts them, and buffers."""
        ranks = self.shard if self.plan.data.zero_stage == 3 else 1
        sizes = (piece_elements(one, ranks) * one.dtype.itemsize if one.shape else one.bytes for one in self.parameters)
        return self.first.buffer_bytes + sum(sizes)


class _ReplicaReplay(_DataReplay):
    """One device of those that a process feeds; the losses of all may be computed on number `output_device`."""

    def __init__(self, profiler: JobProfiler, plan: Plan, number: int, devices: int, output_device: int | None) -> None:
        super().__init__(profiler, plan, 0)
        self.number, self.devices, self.output_device = number, devices, output_device

    @property
    def sums_locally(self) -> bool:
        return self.devices == 1 and super().sums_locally

    @cached_property
    def stepped(self) -> Mapping[str, Sequence[int]]:
        return super().stepped if self.number == 0 else {}

    def passes(self, sums: Sums) -> None:
        for start in range(0, len(self.profiles), self.devices):
            here = self.profiles[start : start + self.devices]
            for number, profile in enumerate(here):
                play(self.meter, sums, self.part(number, profile, "forward"))
            for number, profile in enumerate(here):
                play(self.meter, sums, self.part(number, profile, "backward"))
        if self.number == 0 and self.devices > 1:
            added_in = 8 if self.plan.exact == "bitwise" else self.parameters[0].dtype.itemsize
            self.meter.for_a_while("buffers", added_in * max(one.elements for one in self.parameters))

    def update(self, sums: Sums, costs: OptimizerCosts) -> None:
        if self.number == 0:
            super().update(sums, costs)

    def part(self, number: int, profile: Profile, stage: Pass) -> list[Interval]:
        intervals = profile.forward if stage == "forward" else profile.backward
        split = next((n for n, one in enumerate(intervals) if _at_the_outputs(one)), len(intervals)) + 1
        of_model, of_loss = intervals[:split], intervals[split:]
        if stage == "backward":
            of_model, of_loss = of_loss, of_model
        mine = number == self.number
        if self.output_device is None or self.output_device == number:
            return [*intervals] if mine else []
        if mine:
            return [*of_model]
        if self.number != self.output_device:
            return []
        copies = profile.output_bytes if stage == "forward" else -profile.output_bytes
        moved = Interval(Bytes(max(0, copies)), Bytes(copies), Event("", stage))
        return [moved, *of_loss] if stage == "forward" else [*of_loss, moved]


def _at_the_outputs(interval: Interval) -> bool:
    event = interval.event
    return event.call == MODEL and event.what == ("end" if event.stage == "forward" else "begin")


class _PipelineReplay(_DataReplay):
    """A rank of a pipeline, which has some stages of the model."""

    def __init__(self, profiler: JobProfiler, plan: Plan, rank: int, stages: Stages, position: int) -> None:
        self.stages, self.position = stages, position
        self.how = plan.pipeline.schedule, plan.pipeline.size, plan.pipeline.stages_per_rank
        self.rank_of = rank_of_stage(*self.how)
        self.own = [stage for stage, at in enumerate(self.rank_of) if at == position]
        super().__init__(profiler, plan, rank)
        self.number = runnable(*self.how, len(self.profiles))

    @property
    def stage_key(self) -> int:
        return self.position

    @cached_property
    def parts(self) -> Sequence[Mapping[int, Profile]]:
        of_profile = {
            id(one): {stage: stage_profile(one, *self.stages.calls(stage)) for stage in self.own}
            for one in {id(one): one for one in self.profiles}.values()
        }
        filled = [*self.profiles, *self.profiles[-1:] * (self.number - len(self.profiles))]
        return [of_profile[id(one)] for one in filled]

    def own_parameters(self) -> list[Parameter]:
        owners = self.stages.owners
        return [one for name, one in self.first.parameters.items() if set(owners.get(name, (0,))) & {*self.own}]

    @property
    def rounds(self) -> int:
        return runnable(*self.how, self.share.rounds) * self.plan.pipeline.stages_per_rank

    def passes(self, sums: Sums) -> None:
        if not self.number:
            return
        actions = orders(*self.how, self.number)[self.position]
        received = acknowledgements(*self.how, self.number)[self.position]
        backwards = ("backward", "backward_weight") if self.split_backward else ("backward", "backward_input")
        last = max(number for number, action in enumerate(actions) if action.kind in backwards)
        run = _StageReplay(self, sums)
        for number, action in enumerate(actions):
            run.expect(receives_ahead(actions, number))
            if number == last:
                sums.expect_last()
            run.do(action)
            for sent in received.get(action, ()):
                run.received(sent)


class _StageReplay:
    """One step of a rank of a pipeline, as `parallel.pipeline.schedule_runner` does its actions."""

    def __init__(self, rank: _PipelineReplay, sums: Sums) -> None:
        self.rank, self.meter, self.sums = rank, rank.meter, sums
        self.arrived: dict[tuple[str, int, int], int] = {}  # received, or about to be
        self.memory: dict[tuple[int, int], Bytes] = {}  # of passes under way
        self.sent: dict[tuple[int, int], int] = {}  # gradients
        self.deferred: dict[tuple[int, int], int] = {}

    def expect(self, coming: Sequence[Action]) -> None:
        """Begins to receive what comes next."""
        for action in coming:
            at = (action.stage, action.microbatch)
            if action.kind == "recv_forward" or at in self.memory:
                self.receive(action)

    def receive(self, action: Action) -> None:
        """Makes room for a message."""
        key = (action.kind, action.stage, action.microbatch)
        if key not in self.arrived:
            begin, end = self.rank.stages.calls(action.stage)
            calls = self.rank.parts[action.microbatch][action.stage].calls
            size = calls[begin].input_bytes if action.kind == "recv_forward" else calls[end].input_bytes
            self.arrived[key] = size
            self.meter.add("activations", size)

    def free_message(self, kind: str, at: tuple[int, int]) -> None:
        """Frees what a message was received in."""
        self.meter.add("activations", -self.arrived.pop((kind, *at), 0))

    def received(self, sent: Action) -> None:
        if sent.kind == "send_backward":
            self.meter.add("buffers", -self.sent.pop((sent.stage, sent.microbatch), 0))

    def do(self, action: Action) -> None:
        at = (action.stage, action.microbatch)
        profile = self.rank.parts[action.microbatch][action.stage]
        if action.kind in ("recv_forward", "recv_backward"):
            self.receive(action)
        elif action.kind == "forward":
            self.forward(at, profile)
        elif action.kind == "send_backward":
            size = profile.calls[self.rank.stages.calls(action.stage)[0]].input_bytes
            self.meter.add("buffers", size)
            self.sent[at] = size
            self.end(at)
        elif action.kind == "backward" or (action.kind == "backward_input" and not self.rank.split_backward):
            self.backward(at, profile)
        elif action.kind == "backward_input":
            self.backward_input(at, profile)
        elif action.kind == "backward_weight" and self.rank.split_backward:
            self.backward_weight(at, profile)

    def forward(self, at: tuple[int, int], profile: Profile) -> None:
        self.sums.entered(MODEL)
        before = self._now()
        play(self.meter, self.sums, profile.forward)
        self._note(at, before)
        self.sums.left(MODEL)
        if at[0] == self.rank.own[0]:
            self.meter.add("activations", self.rank.statistics)

    def backward(self, at: tuple[int, int], profile: Profile) -> None:
        self.sums.turned(MODEL)
        before = self._now()
        play(self.meter, self.sums, profile.backward)
        self._note(at, before)
        self.sums.returned(MODEL)
        self.sums.finish_backward()
        sends_back = at[0] > 0 and self.rank.rank_of[at[0] - 1] != self.rank.position
        if not sends_back:
            self.end(at)

    def backward_input(self, at: tuple[int, int], profile: Profile) -> None:
        """The half that the stage before waits for: all that the forward pass has left stays."""
        begin, end = self.rank.stages.calls(at[0])
        if at[0] == 0:  # nobody waits
            return
        size = sum(size for place, size in profile.branch_bytes.items() if begin <= place < end)
        last = len(profile.calls)
        size += profile.branch_bytes.get(last, 0) if end == last else 0
        self.deferred[at] = size
        self.meter.add("temporaries", size)
        self.meter.for_a_while("temporaries", most_temporaries(profile.backward))

    def backward_weight(self, at: tuple[int, int], profile: Profile) -> None:
        """The other half: the gradients of all parameters of the stage are there before any is added up."""
        names = [one.event.parameter for one in profile.backward if one.event.what == "gradient"]
        sizes = {name: profile.parameters[name].bytes for name in names}
        if at[0] == 0:
            self.meter.for_a_while("temporaries", most_temporaries(profile.backward))
        for name in names:
            self.meter.add("temporaries", sizes[name])
        self.meter.add("temporaries", -self.deferred.pop(at, 0))
        self.end(at)
        for name in names:
            self.sums.accumulated(name)
            self.meter.add("temporaries", -sizes[name])
            self.sums.freed(name)
        self.sums.finish_backward()

    def end(self, at: tuple[int, int]) -> None:
        """Nothing of a pass is left, in two parts once the second is done."""
        if self.rank.split_backward and at in self.memory and at in self.deferred:
            return
        rest = self.memory.pop(at, Bytes())
        self.meter.add("activations", -rest.activations)
        self.meter.add("temporaries", -rest.temporaries)
        self.free_message("recv_forward", at)
        self.free_message("recv_backward", at)

    def _now(self) -> Bytes:
        return Bytes(self.meter.now.get("activations", 0), self.meter.now.get("temporaries", 0))

    def _note(self, at: tuple[int, int], before: Bytes) -> None:
        now, earlier = self._now(), self.memory.get(at, Bytes())
        more = Bytes(now.activations - before.activations, now.temporaries - before.temporaries)
        self.memory[at] = earlier + more


def most_temporaries(intervals: Sequence[Interval]) -> int:
    now = most = 0
    for one in intervals:
        most = max(most, now + one.peak.temporaries)
        now += one.left.temporaries
    return most
