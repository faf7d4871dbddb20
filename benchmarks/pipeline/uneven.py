"""What the cut is worth where blocks differ in cost: step time at pipeline=2 beside equal numbers of blocks.

    python benchmarks/pipeline/uneven.py [--rounds 4]        two minutes

Two towers of eight blocks: `growing`, whose blocks' inner width grows from one to the next, and `head`, whose blocks
are equal and whose head has a large vocabulary. The cuts take turns of five steps, of which those count in which no
other process had the ranks' cores. Beside them the share of each block (the last with the head) as predicted and as
measured, forward and backward in one process. Kept in benchmarks/results/pipeline.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import pairwise
from typing import Any

import torch
from tower import DISTURBED, SAMPLES, WIDTH, bind, enough, keep, load, tower_job, waited_s

import evenly
from evenly.engine.find_stages import FLOPS_PER_BYTE
from evenly.launcher.agent import Launch, start_ranks
from evenly.parallel.pipeline.model import StagedModel
from evenly.parallel.pipeline.stage_discovery import Code, find_calls

RANKS, MICROBATCHES, STEPS = 2, 8, 5  # of a turn; the first is not counted
JOBS: dict[str, dict[str, Any]] = {
    "growing": {"inners": tuple(WIDTH * n for n in range(1, 9)), "samples": SAMPLES // 2},
    "head": {"inners": (2 * WIDTH,) * 8, "classes": 16_000, "samples": SAMPLES // 4},
}
PLANS = {"ours": f"pipeline={RANKS}", "equal": f"pipeline={RANKS} split_points=4"}


def train(model: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Of every step but the first of a turn, by plan, in this rank: its seconds, and those when others had the core."""
    bind()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in PLANS}
    for _ in range(rounds):
        for name, plan in PLANS.items():
            with evenly.start(tower_job(MICROBATCHES, steps=STEPS, **JOBS[model]), plan=plan) as run:
                seconds[name] += [timed(run, batch) for batch in run.batches()][1:]
    return seconds


def timed(run: evenly.Run, batch: Any) -> tuple[float, float]:
    before = waited_s()
    return run.step(batch).step_s, waited_s() - before


def undisturbed(ranks: Any) -> list[float]:
    """Seconds of the steps in which no rank waited for its core, of the slower rank."""
    return [max(s for s, _ in of) for of in zip(*ranks, strict=True) if all(w < DISTURBED * s for s, w in of)]


def counts(model: str) -> tuple[int, ...]:
    """Blocks per stage of our cut."""
    bind()
    with evenly.start(tower_job(MICROBATCHES, steps=1, **JOBS[model]), plan=PLANS["ours"]) as run:
        assert run.composed.pipeline is not None
        return run.composed.pipeline.model.stage_plan.counts


def predicted(model: str) -> list[float]:
    """Cost of each block, as shares of all."""
    job = tower_job(1, steps=1, **JOBS[model])
    tower, batch = job.model(), torch.utils.data.default_collate([job.data[n] for n in range(job.global_batch)])
    calls = find_calls(StagedModel(tower, "cpu"), [Code(lambda: job.loss(tower, batch).total)]).costs
    costs = [call.flops + call.moved_bytes * FLOPS_PER_BYTE["cpu"] for call in calls]
    return [cost / sum(costs) for cost in costs]


def measured(model: str, repeats: int = 15) -> list[float]:
    """Seconds of each block's forward and backward, as shares of all: medians, in this process."""
    job = tower_job(1, steps=1, **JOBS[model])
    tower: Any = job.model()
    batch = torch.utils.data.default_collate([job.data[n] for n in range(job.global_batch)])
    seconds = [[_block_s(tower, number, batch) for number in range(len(tower.blocks))] for _ in range(repeats)][2:]
    medians = [statistics.median(of) for of in zip(*seconds, strict=True)]
    return [one / sum(medians) for one in medians]


def _block_s(tower: Any, number: int, batch: Any) -> float:
    x = torch.randn(batch[0].shape, requires_grad=True)
    begin = time.perf_counter()
    x = tower.blocks[number](x)
    if number == len(tower.blocks) - 1:
        torch.nn.functional.cross_entropy(tower.head(x), batch[1], reduction="sum").backward()
    else:
        x.backward(x.detach())
    return time.perf_counter() - begin


def row(model: str, rounds: int) -> dict[str, Any]:
    environment = {"OMP_NUM_THREADS": "1"}
    ranks = [*start_ranks(train, (model, rounds), Launch(devices=RANKS, environment=environment)).values()]
    steps = {name: undisturbed([rank[name] for rank in ranks]) for name in PLANS}
    for name, of in steps.items():
        enough(of, f"{model}, {name}")
    step_s = {name: statistics.median(of) for name, of in steps.items()}
    quartiles = {name: statistics.quantiles(of, n=4)[::2] for name, of in steps.items()}
    torch.set_num_threads(1)
    shares = {"predicted": predicted(model), "measured": measured(model)}
    equal = [sum(shares["measured"][a:b]) for a, b in pairwise((0, 4, 8))]
    cut = start_ranks(counts, (model,), Launch(devices=RANKS, environment=environment))[0]
    ours = [sum(shares["measured"][: cut[0]]), sum(shares["measured"][cut[0] :])]
    return {
        "counts": list(cut), "step_s": step_s, "quartiles_s": quartiles, "ratio": step_s["ours"] / step_s["equal"],
        "steps": {name: len(of) for name, of in steps.items()},
        "slowest_stage_over_that_of_equal_counts": max(ours) / max(equal), "shares": shares, "load": load(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    rows = {model: row(model, args.rounds) for model in JOBS}
    for model, found in rows.items():
        print(
            f"{model:8} cut {found['counts']}  {found['step_s']['ours']:.3f} s, "
            f"equal counts {found['step_s']['equal']:.3f} s, "
            f"ratio {found['ratio']:.3f}, steps {found['steps']}, "
            f"slowest stage {found['slowest_stage_over_that_of_equal_counts']:.3f}  load {found['load']:.2f}"
        )
        for name, shares in found["shares"].items():
            print(f"         {name:10}", " ".join(f"{share:6.1%}" for share in shares))
    keep("uneven", {"rounds": args.rounds, "microbatches": MICROBATCHES, "models": rows})


if __name__ == "__main__":
    main()
