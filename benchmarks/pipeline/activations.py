"""Activations that each rank of a pipeline holds at most, beside the known counts of microbatches.

    python benchmarks/pipeline/activations.py        2 and 4 ranks on the CPU; a minute on a quiet machine

A tower of sixteen equal blocks trains two steps of eight microbatches; in the second the bytes of live tensors are
counted. Their unit is what autograd keeps of one microbatch in a rank's part of the model, as told by torch's hooks in
one process: the blocks of all ranks are equal. The counts follow from the schedule's orders: the most passes through
its stages that a rank has begun and not ended, over its number of stages. Kept in benchmarks/results/pipeline.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tower import Tower, keep, tower_job

import evenly
from evenly.launcher.agent import Launch, start_ranks
from evenly.parallel.core.memory import MemoryCounter
from evenly.parallel.pipeline.orders import orders
from evenly.plan.schedule import SCHEDULES, Action, Kind, Schedule, stages_per_rank
from evenly.train.step import counting_memory

RANKS, MICROBATCHES, BLOCKS, WIDTH, SAMPLES = (2, 4), 8, 16, 64, 128
INNERS = (4 * WIDTH,) * BLOCKS
SCHEDULES: tuple[Schedule, ...] = (*SCHEDULES,)
CHANGES: dict[Kind, int] = {"forward": 1, "backward": -1, "backward_weight": -1}


class Most(TorchDispatchMode):
    """The most bytes of activations that `counter` had counted after any operation."""

    def __init__(self, counter: MemoryCounter) -> None:
        super().__init__()
        self.counter, self.bytes = counter, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.bytes = max(self.bytes, self.counter.now[0, "activations"])
        return result


def kept_of_one() -> int:
    """Bytes that autograd keeps of a microbatch in all blocks."""
    tower, kept = Tower(INNERS, width=WIDTH), dict[int, int]()
    parameters = {parameter.data_ptr() for parameter in tower.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (key := tensor.untyped_storage().data_ptr()) not in parameters:
            kept[key] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(SAMPLES, WIDTH) + tower.place
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for block in tower.blocks:
            x = block(x)
    return sum(kept.values())


def held(schedule: Schedule, ranks: int) -> tuple[int, int]:
    """Of this rank: the most bytes of activations, and the most bytes of all."""
    job = tower_job(MICROBATCHES, steps=2, inners=INNERS, width=WIDTH, samples=SAMPLES)
    with evenly.start(job, plan=f"pipeline={ranks} schedule={schedule}") as run:
        batches = run.batches()
        run.step(next(batches))
        batch = next(batches)
        with counting_memory(run) as counter, Most(counter) as most:
            run.step(batch)
    return most.bytes, counter.peak_bytes(0)


def all_schedules(ranks: int) -> list[tuple[int, int]]:
    return [held(schedule, ranks) for schedule in SCHEDULES]


def count(order: Sequence[Action], stages: int) -> float:
    """Microbatches that a rank holds at most, as multiples of its whole part of the model."""
    return max(accumulate(CHANGES.get(action.kind, 0) for action in order)) / stages


def rows(ranks: int) -> list[dict[str, Any]]:
    of_ranks = start_ranks(all_schedules, (ranks,), Launch(devices=ranks, environment={"OMP_NUM_THREADS": "1"}))
    measured = {s: [of_ranks[rank][n] for rank in range(ranks)] for n, s in enumerate(SCHEDULES)}
    unit = kept_of_one() / ranks
    found: list[dict[str, Any]] = []
    for schedule in SCHEDULES:
        per_rank = stages_per_rank(schedule, None)
        planned = orders(schedule, ranks, per_rank, MICROBATCHES)
        found.append({
            "ranks": ranks, "schedule": schedule, "stages_per_rank": per_rank,
            "counted": [count(order, per_rank) for order in planned],
            "measured": [held / unit for held, _ in measured[schedule]],
            "unit_bytes": unit, "activation_bytes": [held for held, _ in measured[schedule]],
            "peak_bytes": [peak for _, peak in measured[schedule]],
        })  # fmt: skip
    return found


def main() -> None:
    found = [row for ranks in RANKS for row in rows(ranks)]
    for row in found:
        counted, measured = (" ".join(f"{one:5.2f}" for one in row[name]) for name in ("counted", "measured"))
        print(f"{row['ranks']} ranks  {row['schedule']:12}  counted {counted}   measured {measured}", flush=True)
    shape = {"blocks": BLOCKS, "width": WIDTH, "samples": SAMPLES, "microbatches": MICROBATCHES}
    keep("activations", {"model": shape, "rows": found})


if __name__ == "__main__":
    main()
