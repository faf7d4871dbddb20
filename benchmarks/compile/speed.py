"""Compiled blocks on one device, held against the same steps as they are written, and against a whole compiled model.

    python benchmarks/compile/speed.py [--rounds 12] [--json benchmarks/results/compile.json]

A GPT (`benchmarks/peers`, 6 blocks, width 128, 8 samples of 128 tokens a step in two microbatches, float32) on one
thread: a loop by hand, the same with `torch.compile` of the whole model, `evenly` under `single`, and under
`single compile=blocks`. Each in a process of its own, some steps of each in turn; ratios are medians over pairs of the
same step. The first step, which compiles, has a figure of its own: with an empty cache of kernels, and with a full one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parents[1]), str(HERE.parent / "peers")]

NAMES = ("by hand", "by hand, model compiled", "single", "single compile=blocks")
LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY, BATCH, MICROBATCHES, LR = 6, 128, 4, 128, 512, 8, 2, 1e-3
WARM, IN_TURN = 3, 3  # steps before those that count, and of each in a turn


def by_hand(*, compiled: bool) -> Callable[[], float]:
    """A step of a loop without `evenly`."""
    import torch
    from torch.nn.utils import clip_grad_norm_

    model, data = build(), samples()
    called: Any = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    at = 0

    def step() -> float:
        nonlocal at
        total = 0.0
        for _ in range(MICROBATCHES):
            few = data[at : at + BATCH // MICROBATCHES]
            at = (at + len(few)) % len(data)
            loss = summed_loss(called, few) / (BATCH * LENGTH)
            loss.backward()
            total += loss.item()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def by_evenly(plan: str, contexts: ExitStack) -> Callable[[], float]:
    """A step of the same model as a job."""
    import torch

    import evenly

    job = evenly.Job(
        model=build,
        loss=lambda model, tokens: evenly.Loss(summed_loss(model, tokens), tokens[:, 1:].numel()),
        data=torch.utils.data.TensorDataset(samples()),
        collate=lambda rows: torch.stack([row[0] for row in rows]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LR),
        global_batch=BATCH,
        microbatch=BATCH // MICROBATCHES,
        steps=10**5,
        clip_norm=1.0,
        name="compile",
    )
    run = contexts.enter_context(evenly.start(job, plan=plan))
    batches = run.batches()
    return lambda: run.step(next(batches)).loss


def build() -> Any:
    import torch
    from workloads import GPT

    torch.manual_seed(1)
    return GPT(VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH)


def samples() -> Any:
    import torch

    return torch.randint(VOCABULARY, (64, LENGTH + 1), generator=torch.Generator().manual_seed(2))


def summed_loss(model: Any, tokens: Any) -> Any:
    from torch.nn import functional as F

    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, -2), tokens[:, 1:].flatten(), reduction="sum")


def child(name: str) -> None:
    """Says how long the first step took, then takes numbers of steps from its input and says what each took."""
    import torch

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    with ExitStack() as contexts:
        plain = name.startswith("by hand")
        step = by_hand(compiled="compiled" in name) if plain else by_evenly(name, contexts)
        began = time.perf_counter()
        step()
        first_s = time.perf_counter() - began
        for _ in range(WARM):
            step()
        print(json.dumps(first_s), file=answers, flush=True)
        for line in sys.stdin:
            seconds, loss = [], 0.0
            for _ in range(int(line)):
                began = time.perf_counter()
                loss = step()
                seconds.append(time.perf_counter() - began)
            print(json.dumps({"seconds": seconds, "loss": loss}), file=answers, flush=True)


class Contender:
    """One of `NAMES` in a process of its own, whose kernels are kept in `cache`."""

    def __init__(self, name: str, cache: str) -> None:
        self.name, self.seconds, self.loss = name, list[float](), 0.0
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--child", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip
        self.first_s: float = self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with code {self.process.wait()}")
        return json.loads(line)

    def turn(self, steps: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        found = self.answer()
        self.seconds += found["seconds"]
        self.loss = found["loss"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return
    with ExitStack() as contexts:
        cache = contexts.enter_context(tempfile.TemporaryDirectory())
        found = {name: Contender(name, f"{cache}/{number}") for number, name in enumerate(NAMES)}
        for one in found.values():
            contexts.callback(one.close)
        for _ in range(args.rounds):
            for one in found.values():
                one.turn(IN_TURN)
        again = {}
        for number, name in enumerate(NAMES):
            once_more = Contender(name, f"{cache}/{number}")
            again[name] = once_more.first_s
            once_more.close()
    base = found[NAMES[0]]
    rows = [
        {
            "name": name,
            "step_ms": statistics.median(one.seconds) * 1e3,
            "to_by_hand": statistics.median(a / b for a, b in zip(one.seconds, base.seconds, strict=True)),
            "first_step_s": one.first_s,
            "first_step_again_s": again[name],
        }
        for name, one in found.items()
    ]
    print("| | ms a step | to by hand | first step, s | with its kernels kept, s |\n|---|---|---|---|---|")
    for row in rows:
        print(
            f"| `{row['name']}` | {row['step_ms']:.1f} | {row['to_by_hand']:.2f} | {row['first_step_s']:.1f} "
            f"| {row['first_step_again_s']:.1f} |"
        )
    if args.json:
        where = {"python": platform.python_version(), "torch": version("torch"), "load": os.getloadavg()}
        args.json.write_text(json.dumps({"environment": where, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
