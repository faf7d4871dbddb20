"""Where memory goes on four devices that share a batch: DataParallel, its balanced variant, one process per device.

    python benchmarks/memory/balance.py        four virtual devices on the CPU; a minute

A language model with a vocabulary much larger than its width trains two steps under each plan; bytes of live tensors
are counted per device (`train.step.counting_memory`), each device at its own peak. Kept in
benchmarks/results/balance.json, which docs/pictures/balance.py draws.
"""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import evenly
from evenly.launcher.agent import Launch, start_ranks
from evenly.train.step import counting_memory

RESULTS = Path(__file__).parents[1] / "results" / "balance.json"
DEVICES = 4
PLANS = {
    "dp": "replicas=4 output_device=0",
    "dp, outputs on device 1": "replicas=4 output_device=1",
    "balanced-dp": "replicas=4",
    "ddp": "ddp",
}
VOCABULARY, WIDTH, LENGTH, SAMPLES = 20_000, 32, 64, 16  # SAMPLES: of a microbatch


class Tokens(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 2 * DEVICES * SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))


def model() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
    blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), blocks, nn.Linear(WIDTH, VOCABULARY))


def loss(model: nn.Module, batch: Any) -> evenly.Loss:
    labels = batch[:, 1:].flatten()
    return evenly.Loss(F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), labels, reduction="sum"), len(labels))


def job() -> evenly.Job:
    return evenly.Job(
        model=model,
        loss=loss,
        data=Tokens(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        global_batch=DEVICES * SAMPLES,
        microbatch=SAMPLES,
        steps=2,
    )


def peaks(plan: str) -> list[dict[str, int]]:
    """Bytes by category at the peak of each device of this process."""
    with evenly.start(job(), plan=plan) as run, counting_memory(run) as counter:
        for batch in run.batches():
            run.step(batch)
    return [dict(counter.peaks[number]) for number in range(run.plan.replicas.count)]  # pyright: ignore[reportArgumentType]


def main() -> None:
    rows = {}
    for name, plan in PLANS.items():
        results = start_ranks(peaks, (plan,), Launch(devices=DEVICES if plan == "ddp" else 1))
        devices = [device for rank in sorted(results) for device in results[rank]]
        totals = [sum(device.values()) for device in devices]
        imbalance = max(totals) / (sum(totals) / len(totals))
        rows[name] = {"plan": plan, "devices": devices, "peak_bytes": totals, "imbalance": imbalance}
        print(f"{name:24}", *(f"{total / 2**20:7.1f}" for total in totals), f"MiB   largest / mean {imbalance:.3f}")
    machine = {"python": platform.python_version(), "torch": torch.__version__, "devices": f"{DEVICES} virtual, CPU"}
    date = time.strftime("%Y-%m-%d", time.gmtime())
    RESULTS.write_text(json.dumps({"date": date, "machine": machine, "plans": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
