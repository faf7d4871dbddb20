"""Memory of a job's step under a plan of evenly's own, of every rank: readings and engines put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from evenly.parallel.data.grouping import unit_members
from evenly.parallel.pipeline.orders import acknowledgements, orders, receives_ahead
from evenly.plan import Plan
from evenly.plan.axes import DeviceReplicas
from evenly.plan.schedule import Action, rank_of_stage, runnable, splits_backward
from evenly.planner.job_profile import JobProfiler, Stages
from evenly.planner.memory import FullSums, Meter, ShardedSums, Sums, norm_bytes, own_elements, play, state_bytes
from evenly.planner.optimizer_costs import OptimizerCosts
from evenly.planner.profile import MODEL, Bytes, Event, Interval, Parameter, Pass, Profile, stage_of_reading
from evenly.planner.shard_sums import ShardSums, Unit


def memory_of_ranks(reader: JobProfiler, plan: Plan) -> list[Meter]:
    """The bytes that every device of `plan` holds in a step, in the order of ranks.

    Raises `UserError` where the model cannot be read.
    """
    if plan.replicas.count > 1 or plan.replicas.output_device is not None:
        return _replicas(reader, plan)
    ranks = range(plan.data.size)
    if plan.pipeline.active:
        stages = reader.stages(plan, None)
        positions = range(plan.pipeline.size)
        steps = [_PipelineReplay(reader, plan, rank, stages, at).step() for at in positions for rank in ranks]
    else:
        steps = [_DataReplay(reader, plan, rank).step() for rank in ranks]
    return [meter for meter in steps for _ in range(plan.tensor.size)]


@dataclass(eq=False)
class _DataReplay:
    """A rank of the data axis that has the whole model."""

    reader: JobProfiler
    plan: Plan
    rank: int

    def __post_init__(self) -> None:
        self.meter = Meter()
        self.ranks = self.plan.axes["data"]
        self.shard = self.plan.data.shard
        share = self.reader.share(self.rank, self.ranks)
        self.share = share.filled() if self.plan.data.zero_stage == 3 else share
        numbers = [*self.share.own, *self.share.fillers]
        self.readings = [self.reader.reading(self.plan, number) for number in numbers]
        self.first = self.readings[0] if self.readings else self.reader.reading(self.plan)
        self.parameters = self.held()
        self.on_host = self.plan.offload == "parameters"
        self.layers, self.statistics = self.reader.statistics_bytes(self.plan)

    def step(self) -> Meter:
        """The meter after a step."""
        meter = self.meter
        sums = self.sums()
        shapes = self.stepped()
        if not self.on_host:
            meter.add("parameters", self.held_bytes())
        costs = self.reader.optimizer_costs(self.plan)
        if self.plan.offload in (None, "none"):
            meter.add("optimizer", state_bytes(costs, shapes))
        sums.begin(len(self.readings))
        self.passes(sums)
        self.update(sums, costs, shapes)
        return meter

    def update(self, sums: Sums, costs: OptimizerCosts, shapes: Mapping[str, Sequence[int]]) -> None:
        """From the last backward pass to the end of the step."""
        meter = self.meter
        sums.finish_reduce()
        apart = self.plan.pipeline.active or self.plan.tensor.active
        itemsize = next((one.dtype.itemsize for one in self.parameters), 8)
        meter.for_a_while("temporaries", norm_bytes(sums.norm_lengths(apart=apart), itemsize))
        if self.plan.offload in (None, "none"):
            elements = {name: _product(shape) for name, shape in shapes.items()}
            meter.for_a_while("temporaries", costs.temporary_bytes(elements))
        sums.all_gather_parameters()

    def held(self) -> list[Parameter]:
        """The parameters that this rank has, whole or cut."""
        return [*self.first.parameters.values()]

    def passes(self, sums: Sums) -> None:
        """Forward and backward of all microbatches."""
        for number, reading in enumerate(self.readings):
            self.run(reading, sums, last=number == len(self.readings) - 1)

    def run(self, reading: Profile, sums: Sums, *, last: bool) -> None:
        """Forward and backward of a microbatch."""
        play(self.meter, sums, reading.forward)
        self.meter.add("activations", self.statistics)
        if last:
            sums.expect_last()
        play(self.meter, sums, reading.backward)
        sums.finish_backward()

    def sums(self) -> Sums:
        """As the plan adds up gradients."""
        accumulate_float64 = self.plan.exact == "bitwise"
        if self.plan.data.zero_stage == 3:
            return ShardSums(
                self.meter,
                self.units(),
                ranks=self.shard,
                accumulate_float64=accumulate_float64,
                on_host=self.on_host,
                in_parts=False,
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
        numbers = len(self.share.microbatches) * (2 + self.layers) + (self.plan.ranks or 1) + 1
        return FullSums(self.meter, self.parameters, accumulate_float64=accumulate_float64, numbers=numbers)

    @property
    def rounds(self) -> int:
        """The most backwards that any rank of the data axis runs in a step."""
        return self.share.rounds

    def units(self) -> list[Unit]:
        """What is gathered together, the root first."""
        calls: dict[str, set[int]] = {}
        for number, call in enumerate(self.first.calls):
            calls.setdefault(call.block, set()).add(number)
        found = unit_members(
            [(one.names, one.bytes) for one in self.parameters], [b.name for b in self.reader.blocks(self.plan)]
        )
        units = [
            Unit([self.parameters[number] for number in one.members], frozenset(calls.get(one.block, ())), one.whole)
            for one in found
        ]
        apart = {number for one in found for number in one.members}
        return [Unit([one for number, one in enumerate(self.parameters) if number not in apart]), *units]

    def stepped(self) -> Mapping[str, Sequence[int]]:
        """Shapes of what this rank steps."""
        shapes: dict[str, Sequence[int]] = {}
        for one in self.parameters:
            if self.plan.data.zero_stage and one.shape:
                rest = _product(one.shape[1:])
                rows = own_elements(one, self.shard, self.rank % self.shard) // max(1, rest)
                shapes[one.names[0]] = (rows, *one.shape[1:])
            else:
                shapes[one.names[0]] = one.shape
        return shapes

    def held_bytes(self) -> int:
        """Parameters and buffers."""
        ranks = self.shard if self.plan.data.zero_stage == 3 else 1
        return self.first.buffer_bytes + sum(padded_bytes(one, ranks) for one in self.parameters)


def _replicas(reader: JobProfiler, plan: Plan) -> list[Meter]:
    """The devices of one process, which `parallel.data.replicas` runs."""
    alone = replace(plan, replicas=DeviceReplicas(1, None))
    return [
        _ReplicaReplay(reader, alone, number, plan.replicas.count, plan.replicas.output_device).step()
        for number in range(plan.replicas.count)
    ]


class _ReplicaReplay(_DataReplay):
    """One device of those that a process feeds; the losses of all may be computed on number `output_device`."""

    def __init__(self, reader: JobProfiler, plan: Plan, number: int, devices: int, output_device: int | None) -> None:
        super().__init__(reader, plan, 0)
        self.number, self.devices, self.output_device = number, devices, output_device

    def stepped(self) -> Mapping[str, Sequence[int]]:
        return super().stepped() if self.number == 0 else {}

    def passes(self, sums: Sums) -> None:
        for start in range(0, len(self.readings), self.devices):
            here = self.readings[start : start + self.devices]
            for number, reading in enumerate(here):
                play(self.meter, sums, self.part(number, reading, "forward"))
            for number, reading in enumerate(here):
                play(self.meter, sums, self.part(number, reading, "backward"))
        if self.number == 0 and self.devices > 1:
            added_in = 8 if self.plan.exact == "bitwise" else self.parameters[0].dtype.itemsize
            self.meter.for_a_while("buffers", added_in * max(one.elements for one in self.parameters))

    def update(self, sums: Sums, costs: OptimizerCosts, shapes: Mapping[str, Sequence[int]]) -> None:
        if self.number == 0:
            super().update(sums, costs, shapes)

    def part(self, number: int, reading: Profile, stage: Pass) -> list[Interval]:
        """What this device does for the microbatch of device `number`."""
        intervals = reading.forward if stage == "forward" else reading.backward
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
        copies = reading.output_bytes if stage == "forward" else -reading.output_bytes
        moved = Interval(Bytes(max(0, copies)), Bytes(copies), Event("", stage))
        return [moved, *of_loss] if stage == "forward" else [*of_loss, moved]


def _at_the_outputs(interval: Interval) -> bool:
    """Whether it ends where the model has returned, or where the gradient of that is there."""
    mark = interval.mark
    return mark.call == MODEL and mark.what == ("end" if mark.stage == "forward" else "begin")


class _PipelineReplay(_DataReplay):
    """A rank of a pipeline, which has some stages of the model."""

    def __init__(self, reader: JobProfiler, plan: Plan, rank: int, stages: Stages, position: int) -> None:
        self.stages, self.position = stages, position
        self.rank_of = rank_of_stage(plan.pipeline.schedule, plan.pipeline.size, plan.pipeline.stages_per_rank)
        self.own = [stage for stage, at in enumerate(self.rank_of) if at == position]
        super().__init__(reader, plan, rank)
        self.in_parts = splits_backward(plan.pipeline.schedule) and plan.recompute == "none"
        self.number = runnable(
            plan.pipeline.schedule, plan.pipeline.size, plan.pipeline.stages_per_rank, len(self.readings)
        )
        filled = [*self.readings, *self.readings[-1:] * (self.number - len(self.readings))]
        self.parts = [{stage: stage_of_reading(one, *stages.calls(stage)) for stage in self.own} for one in filled]

    def held(self) -> list[Parameter]:
        owners = self.stages.owners
        return [one for name, one in self.first.parameters.items() if set(owners.get(name, (0,))) & {*self.own}]

    @property
    def rounds(self) -> int:
        per_rank = self.plan.pipeline.stages_per_rank
        return runnable(self.plan.pipeline.schedule, self.plan.pipeline.size, per_rank, self.share.rounds) * per_rank

    def sums(self) -> Sums:
        if self.plan.data.zero_stage == 3:
            accumulate_float64 = self.plan.exact == "bitwise"
            on_host, in_parts = self.on_host, self.in_parts
            return ShardSums(
                self.meter,
                self.units(),
                ranks=self.shard,
                accumulate_float64=accumulate_float64,
                on_host=on_host,
                in_parts=in_parts,
            )
        return super().sums()

    def passes(self, sums: Sums) -> None:
        if not self.number:
            return
        how = self.plan.pipeline.schedule, self.plan.pipeline.size, self.plan.pipeline.stages_per_rank, self.number
        actions, taken = orders(*how)[self.position], acknowledgements(*how)[self.position]
        backwards = ("backward", "backward_weight") if self.in_parts else ("backward", "backward_input")
        last = max(number for number, action in enumerate(actions) if action.kind in backwards)
        run = _StageReplay(self, sums)
        for number, action in enumerate(actions):
            run.expect(receives_ahead(actions, number))
            if number == last:
                sums.expect_last()
            run.do(action)
            for sent in taken.get(action, ()):
                run.taken(sent)


class _StageReplay:
    """One step of a rank of a pipeline, as `parallel.pipeline.schedule_runner` does its actions."""

    def __init__(self, rank: _PipelineReplay, sums: Sums) -> None:
        self.rank, self.meter, self.sums = rank, rank.meter, sums
        self.arrived: dict[tuple[str, int, int], int] = {}  # received, or about to be
        self.held: dict[tuple[int, int], Bytes] = {}  # by passes under way
        self.sent: dict[tuple[int, int], int] = {}  # gradients
        self.deferred: dict[tuple[int, int], int] = {}

    def expect(self, coming: Sequence[Action]) -> None:
        """Begins to receive what comes next."""
        for action in coming:
            at = (action.stage, action.microbatch)
            if action.kind == "recv_forward" or at in self.held:
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

    def let_go(self, kind: str, at: tuple[int, int]) -> None:
        """Frees what a message was received in."""
        self.meter.add("activations", -self.arrived.pop((kind, *at), 0))

    def taken(self, sent: Action) -> None:
        """A message is known to have been received."""
        if sent.kind == "send_backward":
            self.meter.add("buffers", -self.sent.pop((sent.stage, sent.microbatch), 0))

    def do(self, action: Action) -> None:
        """What one action holds and frees."""
        at = (action.stage, action.microbatch)
        reading = self.rank.parts[action.microbatch][action.stage]
        if action.kind in ("recv_forward", "recv_backward"):
            self.receive(action)
        elif action.kind == "forward":
            self.forward(at, reading)
        elif action.kind == "send_backward":
            size = reading.calls[self.rank.stages.calls(action.stage)[0]].input_bytes
            self.meter.add("buffers", size)
            self.sent[at] = size
            self.end(at)
        elif action.kind == "backward" or (action.kind == "backward_input" and not self.rank.in_parts):
            self.backward(at, reading)
        elif action.kind == "backward_input":
            self.backward_input(at, reading)
        elif action.kind == "backward_weight" and self.rank.in_parts:
            self.backward_weight(at, reading)

    def forward(self, at: tuple[int, int], reading: Profile) -> None:
        """The forward pass of a stage."""
        self.sums.entered(MODEL)
        before = self._now()
        play(self.meter, self.sums, reading.forward)
        self._note(at, before)
        self.sums.left(MODEL)
        if at[0] == self.rank.own[0]:
            self.meter.add("activations", self.rank.statistics)

    def backward(self, at: tuple[int, int], reading: Profile) -> None:
        """The backward pass of a stage."""
        self.sums.turned(MODEL)
        before = self._now()
        play(self.meter, self.sums, reading.backward)
        self._note(at, before)
        self.sums.returned(MODEL)
        self.sums.finish_backward()
        if not self._sends_back(at):
            self.end(at)

    def backward_input(self, at: tuple[int, int], reading: Profile) -> None:
        """The half that the stage before waits for: all that the forward pass has left stays."""
        begin, end = self.rank.stages.calls(at[0])
        if at[0] == 0:  # nobody waits
            return
        size = sum(size for place, size in reading.branch_bytes.items() if begin <= place < end)
        last = len(reading.calls)
        size += reading.branch_bytes.get(last, 0) if end == last else 0
        self.deferred[at] = size
        self.meter.add("temporaries", size)
        self.meter.for_a_while("temporaries", most_temporaries(reading.backward))

    def backward_weight(self, at: tuple[int, int], reading: Profile) -> None:
        """The other half: the gradients of all parameters of the stage are there before any is added up."""
        names = [one.mark.parameter for one in reading.backward if one.mark.what == "gradient"]
        sizes = {name: reading.parameters[name].bytes for name in names}
        if at[0] == 0:
            self.meter.for_a_while("temporaries", most_temporaries(reading.backward))
        for name in names:
            self.meter.add("temporaries", sizes[name])
        self.meter.add("temporaries", -self.deferred.pop(at, 0))
        self.end(at)
        for name in names:
            self.sums.there(name)
            self.meter.add("temporaries", -sizes[name])
            self.sums.freed(name)
        self.sums.finish_backward()

    def end(self, at: tuple[int, int]) -> None:
        """Nothing of a pass is left, in two parts once the second is done."""
        if self.rank.in_parts and at in self.held and at in self.deferred:
            return
        held = self.held.pop(at, Bytes())
        self.meter.add("activations", -held.activations)
        self.meter.add("temporaries", -held.temporaries)
        self.let_go("recv_forward", at)
        self.let_go("recv_backward", at)

    def _sends_back(self, at: tuple[int, int]) -> bool:
        return at[0] > 0 and self.rank.rank_of[at[0] - 1] != self.rank.position

    def _now(self) -> Bytes:
        return Bytes(self.meter.now.get("activations", 0), self.meter.now.get("temporaries", 0))

    def _note(self, at: tuple[int, int], before: Bytes) -> None:
        now, held = self._now(), self.held.get(at, Bytes())
        more = Bytes(now.activations - before.activations, now.temporaries - before.temporaries)
        self.held[at] = held + more


def most_temporaries(intervals: Sequence[Interval]) -> int:
    """The most that a backward pass holds of what it makes."""
    now = most = 0
    for one in intervals:
        most = max(most, now + one.peak.temporaries)
        now += one.left.temporaries
    return most


def padded_bytes(parameter: Parameter, ranks: int) -> int:
    """A rank's piece, padded to the length of the others'."""
    if not parameter.shape or ranks == 1:
        return parameter.bytes
    return -(-parameter.shape[0] // ranks) * _product(parameter.shape[1:]) * parameter.dtype.itemsize


def _product(shape: Sequence[int]) -> int:
    result = 1
    for length in shape:
        result *= length
    return result
