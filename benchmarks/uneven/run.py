"""Two ranks of which the second has half the speed: throughput with shares by measured speed over that of even shares.

    python benchmarks/uneven/run.py [--rounds 5]

The second rank is slowed where it computes: after each forward and backward of a microbatch, and in what the start of a
run measures, it waits for as long as that took of its core. Rounds are interleaved, medians compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import nn

import evenly
from evenly.launcher.agent import launch

STEPS = 8


def _product(slow: bool) -> Any:
    plain = torch.Tensor.__matmul__

    def slowed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        begin = time.thread_time()
        result = plain(a, b)
        time.sleep(time.thread_time() - begin)
        return result

    return slowed if slow else plain


def rank(plan: str) -> tuple[str, float]:
    """(plan as decided, samples per second) of a run."""
    import os

    slow = os.environ["RANK"] == "1"
    torch.set_num_threads(1)
    torch.Tensor.__matmul__ = _product(slow)  # type: ignore[method-assign]
    begun = [0.0]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        begun[0] = time.thread_time()
        total = model(batch).square().mean()
        if slow:
            total.register_hook(lambda _: None)
        return total

    job = evenly.Job(
        name="uneven",
        model=lambda: nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)]),
        loss=loss,
        data=torch.randn(4096, 512),
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-3),
        global_batch=2304,
        microbatch=192,
        steps=STEPS,
    )
    with evenly.start(job, plan=plan) as run:
        if slow:
            collect = run.composed.gradients.finish_backward

            def finish() -> None:
                time.sleep(time.thread_time() - begun[0])
                collect()

            run.composed.gradients.finish_backward = finish  # type: ignore[method-assign]
        reports = [run.step(batch) for batch in run.batches()]
        decided = str(run.plan)
    return decided, reports[0].samples / statistics.median(one.step_s for one in reports[2:])


def main() -> None:
    """Prints a line per round, and the ratio of medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rates: dict[str, list[float]] = {"data=2": [], "data=2 speeds=measured": []}
    for _ in range(parser.parse_args().rounds):
        for plan, found in rates.items():
            decided, rate = launch(rank, plan, devices=2)[0]
            found.append(rate)
            print(f"{decided}: {rate:.0f} samples/s", flush=True)
    even, measured = (statistics.median(found) for found in rates.values())
    print(f"shares by measured speed: {measured / even:.2f} x the throughput of even shares")


if __name__ == "__main__":
    main()
