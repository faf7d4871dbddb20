"""Memory of a plan from the parts of a model alone: what every rank of a pipeline holds when it holds most. Pure.

Weights, gradients and the state of the optimizer by bytes per parameter, as far as zero does not cut them; activations
of as many microbatches as the schedule has in flight; what zero=3 gathers; logits; what a pass needs for itself. How
many bytes each of these is depends on the library (`Holdings`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice

from evenly.model.parts import BlockCost, ModelCosts
from evenly.plan.orders import Pass, passes
from evenly.plan.schedule import SCHEDULES, Schedule, rank_of_stage, runnable
from evenly.planner.prediction import MemoryByCause
from evenly.planner.training_config import TrainingConfig


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """Bytes that a library holds.

    weights, gradients, optimizer: per parameter, before zero cuts; a copy of the weights in a wider type is the
              optimizer's.
    gathered: per parameter, of a unit that is whole for a while under zero=3. units: how many are so at once; the part
              outside of blocks is besides. reduced: per parameter, of the gradients of one unit before they are cut.
    live:     parameters that are gathered at once at most; 0 where units are gathered whole.
    logit:    per logit, when the loss is computed. logit_split: the same where the tensor axis splits them, 0 if alike.
    update:   per parameter, as far as the optimizer's state is cut, while it is updated and no activations are held.
    cached:   whether the allocator's cache counts, in which what the update has taken stays besides.
    buffers:  inputs of a stage that a pipeline keeps of every microbatch in flight, besides what its blocks save.
    casts:    per parameter of a block, of a copy in a narrower type that is saved from its forward pass to its backward
              pass, unless it is computed again.
    rest:     of a rank, besides: context of the driver, communicators, what the allocator cannot use.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float = 2.0
    units: int = 2
    reduced: float = 2.0
    live: float = 0.0
    logit: float = 16.0
    logit_split: float = 0.0
    update: float = 0.0
    cached: bool = False
    buffers: float = 0.0
    casts: float = 0.0
    rest: float = 0.0


def footprints(
    parts: ModelCosts, layers: Sequence[int], config: TrainingConfig, holdings: Holdings, ranks: Sequence[int] = ()
) -> list[MemoryByCause]:
    """What every rank of the pipeline holds at most, or some `ranks`; stage i has `layers[i]` blocks."""
    places: Sequence[int] = (0,)
    if config.pipeline > 1:
        places = rank_of_stage(config.schedule, config.pipeline, config.stages_per_rank)
    saved = saved_by_stages(parts, layers, config, holdings.buffers)
    found: list[MemoryByCause] = []
    for rank in ranks or range(config.pipeline):
        stages = [stage for stage, holder in enumerate(places) if holder == rank]
        found.append(_of_rank(stages, _most_saved(rank, stages, saved, config), parts, layers, config, holdings))
    return found


def saved_by_stages(
    parts: ModelCosts, layers: Sequence[int], config: TrainingConfig, buffers: float = 0.0
) -> list[int]:
    """Bytes that one microbatch leaves in every stage for its backward pass, `buffers` of its inputs besides."""
    each = iter(block.saved_bytes[config.recompute] for block in parts.blocks)
    besides = int(buffers * parts.after.input_bytes) if config.pipeline > 1 else 0
    return [sum(islice(each, count)) + besides for count in layers]


def _most_saved(rank: int, stages: Sequence[int], saved: Sequence[int], config: TrainingConfig) -> int:
    """The most bytes of activations that the rank holds at once, of all its stages and microbatches."""
    p, v = config.pipeline, config.stages_per_rank
    if p == 1:
        return saved[0]
    schedule = config.schedule
    most = runnable(schedule, p, v, config.microbatches)
    if SCHEDULES[schedule].steady:
        # What is in flight no longer changes once a step has a few rounds.
        most = min(most, runnable(schedule, p, v, 4 * p))
    weights = [saved[stage] for stage in stages]
    in_flight = _in_flight(schedule, p, v, most, rank)
    if len(weights) == 1:
        return max(in_flight)[0] * weights[0]
    return max(sum(count * weight for count, weight in zip(counts, weights, strict=True)) for counts in in_flight)


@lru_cache(maxsize=16384)
def _in_flight(
    schedule: Schedule, ranks: int, stages_per_rank: int, microbatches: int, rank: int
) -> tuple[tuple[int, ...], ...]:
    """Microbatches in flight in each of a rank's stages, at those moments of a step that others do not outdo."""
    places = rank_of_stage(schedule, ranks, stages_per_rank)
    own = {stage: number for number, stage in enumerate(stage for stage, at in enumerate(places) if at == rank)}
    flying = [0] * len(own)
    found: dict[tuple[int, ...], None] = {}
    for kind, stage, _ in _passes(schedule, ranks, stages_per_rank, microbatches)[rank]:
        change = {"forward": 1, "backward": -1, "backward_weight": -1}.get(kind, 0)
        flying[own[stage]] += change
        if change > 0:
            found[tuple(flying)] = None
    most = max(map(sum, found))
    # Stages of one rank weigh nearly alike: moments with far less in flight hold less.
    return tuple(counts for counts in found if sum(counts) >= most - len(own))


@lru_cache(maxsize=256)
def _passes(schedule: Schedule, ranks: int, stages_per_rank: int, microbatches: int) -> list[list[Pass]]:
    return passes(schedule, ranks, stages_per_rank, microbatches)


def _of_rank(
    stages: Sequence[int],
    saved: int,
    parts: ModelCosts,
    layers: Sequence[int],
    config: TrainingConfig,
    holdings: Holdings,
) -> MemoryByCause:
    last = len(layers) - 1
    firsts = [0, *accumulate(layers)]
    blocks = [block for stage in stages for block in parts.blocks[firsts[stage] : firsts[stage] + layers[stage]]]
    every = [*{id(block): block for block in blocks}.values()]  # equal ones once: for what is largest in any
    outside = ([parts.before] if 0 in stages else []) + ([parts.after] if last in stages else [])
    in_blocks = sum([block.parameters for block in blocks])
    elements = in_blocks + sum(part.parameters for part in outside)
    elements += parts.tied_parameters if last in stages and 0 not in stages else 0
    # A block that is computed again is whole while its backward pass runs.
    again = max((block.saved_bytes["none"] - block.saved_bytes[config.recompute] for block in every), default=0)
    working = max((block.backward_peak_bytes for block in every), default=0)
    # The logits of one microbatch with what the loss makes of them, and what the head keeps.
    per_logit = holdings.logit_split if config.tensor > 1 and holdings.logit_split else holdings.logit
    loss = parts.after.logits * per_logit + parts.after.saved_bytes["none"] if last in stages else 0.0
    activations = saved + holdings.casts * (0 if config.recompute == "full" else in_blocks)
    gathered = _gathered(every, len(blocks), outside, config, holdings)
    update = elements * holdings.update / config.shards
    passes = max(again + working, loss)
    return MemoryByCause(
        parameters=elements * holdings.weights / (config.shards if config.zero >= 3 else 1),
        gradients=elements * holdings.gradients / (config.shards if config.zero >= 2 else 1),
        optimizer=elements * holdings.optimizer / config.shards if config.offload == "none" else 0.0,
        activations=activations,
        gathered=gathered,
        temporaries=passes + update if holdings.cached else max(passes, update - activations - gathered),
        context=holdings.rest,
    )


def _gathered(
    blocks: Sequence[BlockCost], count: int, outside: Sequence[BlockCost], config: TrainingConfig, holdings: Holdings
) -> float:
    if config.zero < 3 or config.shards == 1:
        return 0.0
    largest = max((block.parameters for block in blocks), default=0)
    whole = min(count, holdings.units) * largest + sum(part.parameters for part in outside)
    most = holdings.live or whole
    return min(whole, most) * holdings.gathered + min(largest, most) * holdings.reduced
