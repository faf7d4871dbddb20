"""Step time of pipeline=2 schedule=1f1b beside torch's Schedule1F1B on the same model cut by hand: 2 ranks, bound.

    python benchmarks/pipeline/by_hand.py [--steps 30]        some minutes

Both train a tower of eight equal blocks from the same weights in the same two processes, on the same batches of eight
microbatches, to the same losses, and take turns step by step, the first of a pair in turn. A step is all of it: batch,
forward, backward, gradient norm, update. `evenly` also sets random streams. The ratio is the median over pairs of steps
in which no other process had the ranks' cores; a step takes as long as its slower rank. Kept in
benchmarks/results/pipeline.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F
from tower import DISTURBED, SAMPLES, bind, enough, keep, load, tower_job, waited_s

import evenly
from evenly.launcher.agent import Launch, start_ranks

RANKS, MICROBATCHES, WARM, TOLERANCE = 2, 8, 3, 1e-5
PLANS = ("rounding",)


class Part(nn.Module):
    """A rank's half of the tower, cut by hand."""

    def __init__(self, tower: Any, rank: int) -> None:
        super().__init__()
        half = len(tower.blocks) // 2
        self.place = tower.place if rank == 0 else None
        self.blocks = nn.Sequential(*tower.blocks[:half] if rank == 0 else tower.blocks[half:])
        self.head = tower.head if rank else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(x if self.place is None else x + self.place)
        return x if self.head is None else self.head(x)


class ByHand:
    """What somebody would write with torch's pipelining; starts with the weights of `whole`."""

    def __init__(self, job: evenly.Job, whole: nn.Module) -> None:
        self.rank = dist.get_rank()
        self.part = Part(tower := job.model(), self.rank)
        tower.load_state_dict(whole.state_dict())
        self.optimizer = job.optimizer(self.part.parameters())
        stage = PipelineStage(self.part, self.rank, RANKS, torch.device("cpu"))
        self.schedule = Schedule1F1B(
            stage, MICROBATCHES, lambda y, to: F.cross_entropy(y, to, reduction="sum"), scale_grads=False
        )
        self.batches = self.read(job)

    def read(self, job: evenly.Job) -> Iterator[list[torch.Tensor]]:
        """Batches in the dataset's order: which samples they have does not change their cost."""
        data: Any = job.data
        while True:
            yield [torch.stack(parts) for parts in zip(*(data[n] for n in range(job.global_batch)), strict=True)]

    def step(self) -> float:
        x, y = next(self.batches)
        self.optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        self.schedule.step(*(() if self.rank else (x,)), target=y if self.rank else None, losses=losses)
        total = torch.stack(losses).sum() if self.rank else torch.zeros(())
        numbers = torch.tensor([float(total), 0.0], dtype=torch.float64)
        gradients = [p.grad for p in self.part.parameters() if p.grad is not None]
        torch._foreach_div_(gradients, float(len(y)))
        numbers[1] = nn.utils.get_total_norm(gradients) ** 2
        dist.all_reduce(numbers)
        self.optimizer.step()
        return float(numbers[0]) / len(y)


Seconds = list[tuple[float, float]]  # of each step, and those of them in which others had the core


def train(exact: str, steps: int) -> tuple[Seconds, Seconds, list[float]]:
    """Of `evenly`'s steps and of torch's, in this rank, and the last losses."""
    bind()
    job = tower_job(MICROBATCHES, steps=WARM + steps)
    with evenly.start(job, plan=f"pipeline={RANKS} schedule=1f1b exact={exact}") as run:
        with run.whole_model() as whole:
            by_hand = ByHand(job, whole)
        batches, losses = run.batches(), [0.0, 0.0]

        def ours() -> None:
            losses[0] = run.step(next(batches)).loss

        def theirs() -> None:
            losses[1] = by_hand.step()

        seconds: dict[Callable[[], None], Seconds] = {ours: [], theirs: []}
        for number in range(WARM + steps):
            for step in (ours, theirs) if number % 2 else (theirs, ours):
                dist.barrier()
                begin, waited = time.perf_counter(), waited_s()
                step()
                seconds[step].append((time.perf_counter() - begin, waited_s() - waited))
    return seconds[ours][WARM:], seconds[theirs][WARM:], losses


def _of_pair(*ranks: tuple[float, float]) -> float | None:
    """Seconds of the slower rank; None where one was disturbed."""
    undisturbed = all(waited < DISTURBED * whole for whole, waited in ranks)
    return max(whole for whole, _ in ranks) if undisturbed else None


def row(exact: str, steps: int) -> dict[str, Any]:
    ranks = start_ranks(train, (exact, steps), Launch(devices=RANKS, environment={"OMP_NUM_THREADS": "1"})).values()
    ours, theirs = ([_of_pair(*pair) for pair in zip(*(rank[n] for rank in ranks), strict=True)] for n in (0, 1))
    kept = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    enough(kept, f"exact={exact}")
    ratios = [a / b for a, b in kept]
    low, _, high = statistics.quantiles(ratios, n=4)
    losses = next(iter(ranks))[2]
    if abs(losses[0] - losses[1]) > TOLERANCE * losses[1]:
        raise SystemExit(f"the losses differ: {losses}")
    return {
        "step_s": statistics.median(a for a, _ in kept), "by_hand_step_s": statistics.median(b for _, b in kept),
        "steps": len(kept),
        "ratio": statistics.median(ratios), "quartiles": [low, high],
        "losses": losses, "load": load(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    rows = {f"exact={exact}": row(exact, args.steps) for exact in PLANS}
    for name, found in rows.items():
        print(
            f"{name:15} {found['step_s']:.3f} s, by hand {found['by_hand_step_s']:.3f} s, ratio {found['ratio']:.3f} "
            f"[{found['quartiles'][0]:.3f}..{found['quartiles'][1]:.3f}]  {found['steps']} steps, losses"
            f" {found['losses']}"
        )
    keep("by_hand", {"samples": SAMPLES, "microbatches": MICROBATCHES, "plans": rows})


if __name__ == "__main__":
    main()
