"""The time of a step: operations by the rates of the device, messages by those of the network, a schedule simulated.

A pass through a block takes the device the sum of its operations, and the host as long as it needs to start them;
whichever is slower is waited for. Collectives of the tensor axis stand between the operations, save the share that the
library hides; those of zero=3 overlap with them. A pipeline's passes are simulated in the order of its schedule. Then
comes what the last backward pass does not hide of the gradients' reduction, and the update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from evenly.hardware.cluster import Cluster
from evenly.hardware.network import LinkedRanks, all_reduce_seconds, place, seconds, send_seconds, share_of_slowest
from evenly.model.parts import BlockCost, Collective, ModelCosts, OpCost
from evenly.plan.schedule import SCHEDULES, rank_of_stage, runnable
from evenly.planner.prediction import TimeByCause
from evenly.planner.speeds import Library, Speeds, host_bandwidth
from evenly.planner.timeline import Costs, step_seconds, unevenness
from evenly.planner.training_config import TrainingConfig

COPIES = 3  # of a value or a gradient over the host's link, in an update there
HOST_SHARE = 0.76  # of the peak of that link: 24 of 31.5 and 48 of 63 GB/s, as links.toml has it of PCIe
NUMBERS_BYTES = 64  # of the few numbers that are added up in a step
SHARPNESS = 6  # of the change between two that overlap: the slower counts, and a little of the other


@dataclass(frozen=True)
class Machine:
    """What a model runs on."""

    cluster: Cluster
    speeds: Speeds
    library: Library


@dataclass(slots=True)
class Pass:
    """Seconds of one pass through a part, by cause; `weights` is what of it computes gradients of parameters alone."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    recompute: float = 0.0
    host: float = 0.0
    tensor: float = 0.0
    data: float = 0.0
    weights: float = 0.0

    @property
    def seconds(self) -> float:
        return self.matmul + self.attention + self.memory + self.recompute + self.host + self.tensor + self.data

    def add(self, other: Pass, times: float = 1.0) -> None:
        """Adds `other`, done `times` times."""
        self.matmul += times * other.matmul
        self.attention += times * other.attention
        self.memory += times * other.memory
        self.recompute += times * other.recompute
        self.host += times * other.host
        self.tensor += times * other.tensor
        self.data += times * other.data
        self.weights += times * other.weights


@dataclass
class StageTime:
    """One stage's passes on one microbatch; `parameters`: elements that it has of the model."""

    forward: Pass = field(default_factory=Pass)
    backward: Pass = field(default_factory=Pass)
    parameters: int = 0

    @property
    def both(self) -> Pass:
        found = Pass()
        found.add(self.forward)
        found.add(self.backward)
        return found


def overlapped(one: float, other: float) -> float:
    larger, smaller = (one, other) if one > other else (other, one)
    return larger * (1 + (smaller / larger) ** SHARPNESS) ** (1 / SHARPNESS) if larger else 0.0


def forward_pass(part: BlockCost, config: TrainingConfig, machine: Machine, *, host: float = 1.0) -> Pass:
    """The forward pass of `part`; `host`: how much its host works for it, in forward passes of a block."""
    found = _computed(part.forward, machine)
    found.tensor = _tensor_seconds(part.collectives, config, machine)
    return _with_host(found, host, config, machine)


def backward_pass(part: BlockCost, config: TrainingConfig, machine: Machine, *, host: float = 1.0) -> Pass:
    found = _computed(part.backward, machine)
    own_share = config.shards if config.zero == 3 else 1
    found.memory += part.parameters / own_share * machine.library.sum_bytes / machine.speeds.bandwidth
    own = part.collectives if part.collectives_backward is None else part.collectives_backward
    found.tensor = _tensor_seconds(own, config, machine)
    found = _with_host(found, 1.5 * host, config, machine)
    if config.recompute == "full" and host:
        found.recompute += forward_pass(part, config, machine, host=host).seconds
    elif config.recompute == "selective":
        again = _computed([work for work in part.forward if work.recomputed], machine)
        found.recompute += again.seconds + _tensor_seconds(part.collectives_again, config, machine)
    return found


def _computed(works: Sequence[OpCost], machine: Machine) -> Pass:
    found = Pass()
    for work in works:
        spent = machine.speeds.seconds(work, machine.library)
        cause = "matmul" if work.kind == "convolution" else work.kind
        setattr(found, cause, getattr(found, cause) + spent)
        found.weights += spent if work.of_weights else 0.0
    return found


def _tensor_seconds(collectives: Sequence[Collective], config: TrainingConfig, machine: Machine) -> float:
    library = machine.library
    exposed, cluster = 1 - library.tensor_hidden, machine.cluster
    group = place(config.tensor, 1, cluster)

    def talk_s(one: Collective) -> float:
        if one.operation == "all_reduce":
            return all_reduce_seconds(one.bytes, config.dtype, group, cluster, at_once=True)
        return seconds(one.operation, one.bytes, group, cluster)

    return exposed * sum(talk_s(one) + library.tensor_s for one in collectives)


def _with_host(found: Pass, host: float, config: TrainingConfig, machine: Machine) -> Pass:
    library = machine.library
    starting = host * (library.host_s + (library.tensor_host_s if config.tensor > 1 else 0.0))
    device = found.seconds
    found.host += overlapped(device, starting) - device
    return found


def _gathered(
    found: Pass, part: BlockCost, config: TrainingConfig, machine: Machine, *, backward: bool, kept: bool = False
) -> Pass:
    """Adds what zero=3 gathers for a pass and reduces after it, as far as it shows; kept: from the forward pass."""
    library, ranks = machine.library, config.shards
    if config.zero < 3 or ranks == 1:
        return found
    group = place(ranks, config.tensor, machine.cluster)
    size = part.parameters * library.weight_bytes
    talk = 0.0 if backward and kept else seconds("all_gather", size, group, machine.cluster)
    if backward:
        talk += seconds("reduce_scatter", part.parameters * library.gradient_bytes, group, machine.cluster)
    talk /= library.gather_share
    copy = part.parameters * library.gather_copy_bytes / machine.speeds.bandwidth * (2 if backward else 1)
    computing = found.seconds
    if library.gather == "serial":
        found.data += talk + copy
    else:
        found.data += overlapped(_slowed(computing, talk, machine) + copy, talk) - computing
    return found


def stage_times(parts: ModelCosts, layers: Sequence[int], config: TrainingConfig, machine: Machine) -> list[StageTime]:
    """The passes of every stage, of which stage i has `layers[i]` blocks."""
    cache: dict[tuple[int, bool], tuple[Pass, Pass]] = {}

    def passes(part: BlockCost, kept: bool) -> tuple[Pass, Pass]:
        if (id(part), kept) not in cache:
            cache[id(part), kept] = part_passes(part, config, machine, block_host(part), kept=kept)
        return cache[id(part), kept]

    stages: list[StageTime] = []
    first = 0
    for number, count in enumerate(layers):
        stage = StageTime()
        own = [*parts.blocks[first : first + count]]
        if number == 0:
            own.insert(0, parts.before)
        if number == len(layers) - 1:
            own.append(parts.after)
            stage.parameters += parts.tied_parameters if number else 0
        for part, kept in zip(own, _kept(own, machine.library), strict=True):
            forward, back = passes(part, kept)
            stage.forward.add(forward)
            stage.backward.add(back)
            stage.parameters += part.parameters
        first += count
        stages.append(stage)
    return stages


def _kept(parts: Sequence[BlockCost], library: Library) -> Sequence[bool]:
    """Of which parts of a stage zero=3 keeps the weights until the backward pass: of the last blocks, as far as there
    is room, and of what is around blocks.
    """
    room, found = library.whole_bytes, [False] * len(parts)
    for number in reversed(range(len(parts)) if room else ()):
        around = not block_host(parts[number])
        room -= 0 if around else parts[number].parameters * library.weight_bytes
        found[number] = around or room >= 0
    return found


def even_counts(blocks: int, stages: int) -> tuple[int, ...]:
    """Blocks of each stage where nobody weighs them: all have as many, or embedding and head count as one each.

    Where neither comes out even, the last stages have fewer. So Megatron-LM and DeepSpeed cut.
    """
    if blocks % stages and (blocks + 2) % stages == 0:
        each = (blocks + 2) // stages
        return (each - 1, *[each] * (stages - 2), each - 1)
    each = -(-blocks // stages)
    return tuple(max(0, min(each, blocks - each * stage)) for stage in range(stages))


def stage_layers(parts: ModelCosts, config: TrainingConfig) -> tuple[int, ...]:
    """Blocks of each stage: as the config says, else evenly."""
    return config.layers or even_counts(len(parts.blocks), config.pipeline * config.stages_per_rank)


def step_time(parts: ModelCosts, config: TrainingConfig, machine: Machine) -> tuple[TimeByCause, float]:
    """The time of a step by cause, and the mean bubble over the ranks of the pipeline."""
    stages = stage_times(parts, stage_layers(parts, config), config, machine)
    waits = _waits(len(stages), message_seconds(parts, config, machine))
    makespan, busy = _simulated(stages, waits, config, machine.library.split_backward)
    slowest = max(range(len(busy)), key=busy.__getitem__)
    total = Pass()
    for stage in _stages_of(slowest, config):
        total.add(stages[stage].forward, config.microbatches)
        total.add(stages[stage].backward, config.microbatches)
    messages = 2 * config.microbatches * sum(waits[stage] for stage in _stages_of(slowest, config))
    last = _stages_of(max(range(len(busy)), key=lambda rank: _parameters_of(rank, stages, config)), config)
    tail = _reduction_tail(stages, config, machine, sum(stages[stage].backward.seconds for stage in last))
    tail += _reductions_before(stages, config, machine, sum(stages[stage].both.seconds for stage in last))
    tail += _step_sums(config, machine)
    optimizer = update_seconds(_most_parameters(stages, config) / config.shards, config, machine)
    nodes = machine.cluster.nodes
    found = TimeByCause(
        matmul=total.matmul,
        attention=total.attention,
        memory=total.memory,
        recompute=total.recompute,
        host=total.host,
        tensor=total.tensor,
        data=total.data + tail,
        pipeline=messages,
        # Microbatches that do not count, with which some schedules fill up their rounds, are bubbles too.
        bubble=max(0.0, makespan - messages - total.seconds),
        optimizer=optimizer,
    )
    return _jittered(found, machine.library.jitter, nodes), 1 - sum(busy) / (len(busy) * makespan)


def _step_sums(config: TrainingConfig, machine: Machine) -> float:
    ranks = config.replicas * config.tensor * config.pipeline
    return machine.library.step_sums * seconds(
        "all_reduce", NUMBERS_BYTES, place(ranks, 1, machine.cluster), machine.cluster
    )


def update_seconds(elements: float, config: TrainingConfig, machine: Machine) -> float:
    """The update of so many elements, on the device or on its host.

    Under `offload=optimizer` values and gradients are copied to the host before, and values back after: the device
    waits for all of it. One thread of the host steps them, as fast as a CPU of devices.toml.
    """
    library, device = machine.library, machine.cluster.device
    if config.offload == "none":
        return elements * library.optimizer_bytes / machine.speeds.bandwidth
    stepping_s = elements * library.optimizer_bytes / host_bandwidth()
    if config.offload == "parameters" or not device.host_bytes_per_s:
        return stepping_s
    return stepping_s + elements * COPIES * library.weight_bytes / (HOST_SHARE * device.host_bytes_per_s)


def _most_parameters(stages: Sequence[StageTime], config: TrainingConfig) -> int:
    """Elements on the rank of the pipeline that has most."""
    return max(_parameters_of(rank, stages, config) for rank in range(config.pipeline))


def _parameters_of(rank: int, stages: Sequence[StageTime], config: TrainingConfig) -> int:
    return sum(stages[stage].parameters for stage in _stages_of(rank, config))


def _stages_of(rank: int, config: TrainingConfig) -> Sequence[int]:
    p, v = config.pipeline, config.stages_per_rank
    if SCHEDULES[config.schedule].as_v and p > 1:
        return (rank, 2 * p - 1 - rank)
    return range(rank, p * v, p)


def message_seconds(parts: ModelCosts, config: TrainingConfig, machine: Machine) -> tuple[float, ...]:
    """Of every stage but the last, sends one activation to the next, as far as it holds up either."""
    library, size = machine.library, parts.after.input_bytes
    hops = config.pipeline * config.stages_per_rank - 1
    if config.pipeline == 1 or (library.messages_overlap and config.stages_per_rank > 1):
        return (0.0,) * hops
    if library.messages_split and not config.split_sequence:
        size /= config.tensor
    cluster, stride, domain = machine.cluster, config.tensor * config.replicas, machine.cluster.domain
    by_node = bool(cluster.hops) and domain == cluster.devices  # else all that cross are alike
    through_host = size * min(stride, domain) / library.message_bytes_per_s if library.message_bytes_per_s else 0.0
    taken: dict[tuple[int, int], float] = {}

    def sent(one: int, other: int) -> float:
        ends = (one, other) if by_node else (0, int(one != other))
        if ends not in taken and one == other:
            taken[ends] = seconds("send", size, LinkedRanks(2, 2), cluster)
        elif ends not in taken:
            taken[ends] = send_seconds(size, *ends, LinkedRanks(2, 1, sharing=min(stride, domain)), cluster)
        return taken[ends] + library.message_s + through_host

    ranks = rank_of_stage(config.schedule, config.pipeline, config.stages_per_rank)
    places = range(stride) if by_node else range(1)  # of a stage's ranks, each of which sends to that of the next stage
    return tuple(
        max(sent((one * stride + place) // domain, (other * stride + place) // domain) for place in places)
        for one, other in pairwise(ranks)
    )


def _reduction_tail(
    stages: Sequence[StageTime], config: TrainingConfig, machine: Machine, last_pass_s: float = math.inf
) -> float:
    """What shows of the gradients' reduction and, where zero cuts the update, of gathering the weights.

    Where nodes were measured each by itself, stages on slow ones take longer. last_pass_s: as `_rank_tail`.
    """
    cluster, stride = machine.cluster, config.tensor * config.replicas
    if not cluster.hops or config.pipeline == 1:
        return _rank_tail(_most_parameters(stages, config), config, machine, last_pass_s)
    tails: list[float] = []
    for rank in range(config.pipeline):
        elements = _parameters_of(rank, stages, config)
        nodes = {place // cluster.devices for place in range(rank * stride, (rank + 1) * stride)}
        share = share_of_slowest(elements * machine.library.gradient_bytes, nodes, cluster)
        tails.append(share * _rank_tail(elements, config, machine, last_pass_s))
    return max(tails)


def _rank_tail(elements: float, config: TrainingConfig, machine: Machine, last_pass_s: float) -> float:
    """`_reduction_tail` of a rank of the pipeline with so many elements.

    Ranks among which zero cuts reduce to a share each, and those with equal shares add these up. last_pass_s: of the
    last backward pass, which hides no more than it takes itself.
    """
    library, cluster = machine.library, machine.cluster
    copies = place(config.replicas // config.shards, config.tensor * config.shards, cluster)
    reduced_in = config.dtype if library.gradient_bytes == 2 else "float32"
    talk = all_reduce_seconds(elements / config.shards * library.gradient_bytes, reduced_in, copies, cluster)
    gather = 0.0
    if config.zero in (1, 2):
        group = place(config.shards, config.tensor, cluster)
        reduce = "all_reduce" if library.reduces_whole else "reduce_scatter"
        talk += seconds(reduce, elements * library.gradient_bytes, group, cluster)
        gather = seconds("all_gather", elements * library.weight_bytes, group, cluster)
    shown = talk - min(talk * library.data_hidden, last_pass_s)
    return shown + gather * (1.0 if library.weights_wait else 1 - library.data_hidden)


def _reductions_before(stages: Sequence[StageTime], config: TrainingConfig, machine: Machine, passes_s: float) -> float:
    if config.zero != 2 or not machine.library.reduces_each:
        return 0.0
    group = place(config.shards, config.tensor, machine.cluster)
    size = _most_parameters(stages, config) * machine.library.gradient_bytes
    talk = seconds("reduce_scatter", size, group, machine.cluster)
    return (config.microbatches - 1) * (overlapped(_slowed(passes_s, talk, machine), talk) - passes_s)


def _slowed(computing_s: float, talk_s: float, machine: Machine) -> float:
    """Computing while others talk."""
    return computing_s + machine.library.contention * min(talk_s, computing_s)


def _jittered(found: TimeByCause, jitter: float, nodes: float) -> TimeByCause:
    """With what a step takes longer the more nodes wait for each other; counted where the data axis waits."""
    longer = jitter * math.log2(nodes) if nodes > 1 else 0.0
    return replace(found, data=found.data + longer * found.step_s)


def _simulated(
    stages: Sequence[StageTime], waits: Sequence[float], config: TrainingConfig, split: float
) -> tuple[float, Sequence[float]]:
    """Seconds of the whole schedule, and those in which each rank works; split: as `Library.split_backward`."""
    forward = [stage.forward.seconds + wait for stage, wait in zip(stages, waits, strict=True)]
    backward = [stage.backward.seconds + wait for stage, wait in zip(stages, waits, strict=True)]
    if config.pipeline == 1:
        whole = config.microbatches * (forward[0] + backward[0])
        return whole, [whole]
    # What is computed again comes with a backward pass that is whole.
    weights = [stage.backward.weights if config.recompute == "none" else 0.0 for stage in stages]
    costs = Costs(
        forward=forward,
        backward=backward,
        backward_input=[split * (whole - later) for whole, later in zip(backward, weights, strict=True)],
        backward_weight=[split * later for later in weights],
    )
    how = config.schedule, config.pipeline, config.stages_per_rank
    makespan, busy = step_seconds(*how, runnable(*how, config.microbatches), costs)
    longer = unevenness(*how, config.loads, config.microbatches) if config.loads else 1.0
    return longer * makespan, busy


def _waits(stages: int, messages: Sequence[float]) -> list[float]:
    """What a pass of every stage waits for messages, those from the stage before it and to the next: half of each."""
    around = (0.0, *messages, 0.0)
    return [(around[stage] + around[stage + 1]) / 2 for stage in range(stages)]


def block_host(part: BlockCost) -> float:
    """How much the host works for a part, in blocks: what is around them is few operations."""
    return 0.0 if part.name.startswith(("before", "after")) else 1.0


def part_passes(
    part: BlockCost, config: TrainingConfig, machine: Machine, host: float, *, kept: bool = False
) -> tuple[Pass, Pass]:
    """Both passes of a part on one microbatch, with what zero=3 gathers for them; kept: for both at once."""
    forward = _gathered(forward_pass(part, config, machine, host=host), part, config, machine, backward=False)
    back = _gathered(backward_pass(part, config, machine, host=host), part, config, machine, backward=True, kept=kept)
    return forward, back


def part_seconds(part: BlockCost, config: TrainingConfig, machine: Machine) -> float:
    """Both passes of a part on one microbatch, at least: its weights may have to be gathered twice."""
    kept = machine.library.whole_bytes > 0
    return sum(one.seconds for one in part_passes(part, config, machine, block_host(part), kept=kept))


def tail_seconds(parts: ModelCosts, config: TrainingConfig, machine: Machine) -> float:
    """The least that follows the last pass: what shows of the reduction, and the update, of equal shares.

    Where nodes were measured each by itself, the stage on the slowest may have few parameters: the update alone.
    """
    elements = sum(part.parameters for part in parts.blocks) / config.pipeline
    update = update_seconds(elements / config.shards, config, machine)
    if machine.cluster.hops and config.pipeline > 1:
        return update
    stages = [StageTime(parameters=int(elements))] * (config.pipeline * config.stages_per_rank)
    return update + _reduction_tail(stages, config, machine) / config.stages_per_rank
