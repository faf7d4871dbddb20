"""What saving in the background takes from training, next to torch's own asynchronous saving of the same tensors.

    python benchmarks/checkpoints/while_training.py [--rounds 7] [--rows 512] [--plans ddp,zero3]       two ranks

Each rank trains sixteen linear layers with AdamW (a state of 200 MB in all). A block is ten steps; a block that saves
begins with the save, and ends when the files are complete. Blocks without saving, with `Run.save` and with
`torch.distributed.checkpoint.async_save` (threads; no digests) follow each other in the same processes, in an order
that rotates. The figures are medians over the rounds of the ratio to the block without saving of the same round, and
the processor seconds of all ranks. Each finished plan is kept in benchmarks/results/checkpoints_while_training.json;
plans that are there are not measured again unless --again is given.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import evenly
from evenly.checkpoint.state import read_state
from evenly.launcher.agent import Launch, start_ranks
from evenly.train.run import Run

RESULTS = Path(__file__).parents[1] / "results" / "checkpoints_while_training.json"
WIDTH, LAYERS, STEPS = 1024, 16, 10
WAYS = ("none", "evenly", "torch")


def loss(model: torch.nn.Module, x: torch.Tensor) -> evenly.Loss:
    return evenly.Loss(model(x).square().mean(1).sum(), len(x))


def model() -> torch.nn.Module:
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.ReLU())))


def measure(plan: str, rows: int, rounds: int, out: Path) -> list[dict[str, Any]]:
    """Seconds and processor seconds of this rank, by way of saving, a dict each round."""
    torch.manual_seed(0)
    job = evenly.Job(
        model=model,
        loss=loss,
        data=[torch.randn(WIDTH) for _ in range(4096)],
        optimizer=partial(torch.optim.AdamW, lr=1e-4),
        global_batch=rows,
        microbatch=rows // 2,
        steps=STEPS * len(WAYS) * (rounds + 1),
    )
    found: list[dict[str, Any]] = []
    with evenly.start(job, plan=plan, out=out) as run:
        batches = run.batches()
        for number in range(rounds + 1):
            turn = number % len(WAYS)
            found.append({way: block(run, batches, way, out) for way in WAYS[turn:] + WAYS[:turn]})
    return found[1:]


def block(run: Run, batches: Any, way: str, out: Path) -> tuple[float, float, float]:
    """(seconds, of which the save call held the loop, processor seconds) of ten steps."""
    torch.distributed.barrier()
    begin, busy = time.perf_counter(), sum(os.times()[:2])
    wait = None
    if way == "evenly":
        run.save()
        wait = run.store.finish  # type: ignore[union-attr]
    elif way == "torch":
        with run.state_as_saved():
            tensors, _ = read_state(run.model, run.optimizer)
            tensors = {name: tensor.detach() for name, tensor in tensors.items()}
            writer = dcp.FileSystemWriter(out / "by-torch", overwrite=True)
            group = run.world.group("files").handle
            wait = dcp.async_save(tensors, storage_writer=writer, process_group=group).result
    held = time.perf_counter() - begin
    for _ in range(STEPS):
        run.step(next(batches))
    if wait is not None:
        wait()
    torch.distributed.barrier()
    return time.perf_counter() - begin, held, sum(os.times()[:2]) - busy


def figures(ranks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Of all rounds: seconds of rank 0, processor seconds of all ranks."""
    first = ranks[0]
    result: dict[str, Any] = {"none_s": statistics.median(one["none"][0] for one in first)}
    for way in WAYS[1:]:
        ratios = [one[way][0] / one["none"][0] - 1 for one in first]
        extra = [sum(rank[n][way][2] - rank[n]["none"][2] for rank in ranks) for n in range(len(first))]
        result[way] = {
            "slower": statistics.median(ratios),
            "spread": [min(ratios), max(ratios)],
            "held_s": statistics.median(one[way][1] for one in first),
            "processor_s": statistics.median(extra),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--plans", default="ddp,zero3")
    parser.add_argument("--again", action="store_true")
    asked = parser.parse_args()
    document = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for plan in asked.plans.split(","):
        key = f"{plan} {asked.rows} rows"
        if key not in document or asked.again:
            out = Path(tempfile.mkdtemp(dir=Path.cwd()))
            try:
                ranks = start_ranks(measure, (plan, asked.rows, asked.rounds, out), Launch(devices=2))
            finally:
                shutil.rmtree(out)
            document[key] = {"torch": torch.__version__, "rounds": asked.rounds, **figures([ranks[0], ranks[1]])}
            RESULTS.write_text(json.dumps(document, indent=1) + "\n")
        print(key, json.dumps(document[key]))


if __name__ == "__main__":
    main()
