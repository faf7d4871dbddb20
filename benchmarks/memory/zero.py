"""What each rank holds of parameters, gradients and optimizer state under ZeRO 0 to 3, beside the formulas.

    python benchmarks/memory/zero.py        2, 4 and 8 ranks on the CPU; a minute

A language model trains two steps of two microbatches per rank with AdamW in float32; the bytes of live tensors are
counted in the second. The formulas are those of arXiv 1910.02054, section 5, with the bytes of float32 training (4 per
parameter, 4 per gradient, 8 of AdamW's moments, P parameters, N ranks):

    zero 0   16 P          zero 1   8 P + 8 P / N          zero 2   4 P + 12 P / N          zero 3   16 P / N

With exact=rounding, as the formulas have it; exact=bitwise adds gradients in float64, 8 bytes more each.
`held` is the most of these three kinds together at the moments that the formulas speak of: when a microbatch begins,
with the gradients of those before it, and when the optimizer steps. `step` is the latter alone, `peak` what they take
at the rank's own peak, activations and all.
Kept in benchmarks/results/zero.json.
"""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

import evenly
from evenly.engine.updater import Updater
from evenly.launcher.agent import Launch, start_ranks
from evenly.train.step import counting_memory

RESULTS = Path(__file__).parents[1] / "results" / "zero.json"
RANKS = (2, 4, 8)
KINDS = ("parameters", "gradients", "optimizer")
VOCABULARY, WIDTH, BLOCKS, LENGTH = 512, 128, 2, 8


class Tokens(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, batch_first=True) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model: nn.Module, batch: Any) -> evenly.Loss:
    labels = batch[:, 1:].flatten()
    return evenly.Loss(F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), labels, reduction="sum"), len(labels))


def held(zero: int, ranks: int) -> tuple[int, list[dict[str, int]], dict[str, int]]:
    """Number of parameters; bytes by category when each microbatch begins and when the optimizer steps; at the peak."""
    job = evenly.Job(
        model=Model,
        loss=loss,
        data=Tokens(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=2 * ranks,
        microbatch=1,
        steps=2,
    )
    with evenly.start(job, plan=f"zero={zero} exact=rounding") as run:
        count = sum(p.numel() for p in run.model.parameters())
        batches = run.batches()
        run.step(next(batches))  # from now on the optimizer has its state
        moments: list[dict[str, int]] = []
        with counting_memory(run) as counter:

            def look(*_: Any) -> None:
                moments.append({category: size for (_, category), size in counter.now.items()})

            def apply(updater: Updater, *given: Any) -> bool:
                look()
                return applied(updater, *given)

            run.model.register_forward_pre_hook(look, prepend=True)
            applied = Updater.apply  # a hook of the optimizer's would have every rank step whole parameters
            with mock.patch.object(Updater, "apply", apply):
                run.step(next(batches))
    assert len(moments) == 3  # two microbatches and the step
    return count, moments, dict(counter.peaks[0])


def every_stage(ranks: int) -> list[tuple[int, list[dict[str, int]], dict[str, int]]]:
    """`held` for zero 0 to 3."""
    return [held(zero, ranks) for zero in range(4)]


def of_state(categories: dict[str, int]) -> int:
    """Bytes of the three kinds together."""
    return sum(categories.get(kind, 0) for kind in KINDS)


def formula(zero: int, count: int, ranks: int) -> float:
    """Bytes per rank."""
    whole, cut = {0: (16, 0), 1: (8, 8), 2: (4, 12), 3: (0, 16)}[zero]
    return count * (whole + cut / ranks)


def main() -> None:
    rows = []
    for ranks in RANKS:
        stages = zip(*start_ranks(every_stage, (ranks,), Launch(devices=ranks)).values(), strict=True)
        for zero, results in enumerate(stages):  # of all ranks
            count = results[0][0]
            expected = formula(zero, count, ranks)
            most = [max(map(of_state, moments)) for _, moments, _ in results]
            step = [of_state(moments[-1]) for _, moments, _ in results]
            peak = [of_state(at_peak) for _, _, at_peak in results]
            rows.append({
                "ranks": ranks, "zero": zero, "formula_bytes": expected, "held_bytes": most, "step_bytes": step,
                "peak_bytes": peak, "rank_0_at_peak": results[0][2],
            })  # fmt: skip
            print(
                f"{ranks} ranks  zero {zero}  formula {expected / 2**20:7.2f} MiB  held {max(most) / expected:.3f}  "
                f"step {max(step) / expected:.3f}  peak {max(peak) / expected:.3f}",
                flush=True,
            )
    machine = {"python": platform.python_version(), "torch": torch.__version__, "backend": "gloo"}
    date = time.strftime("%Y-%m-%d", time.gmtime())
    document = {"date": date, "machine": machine, "parameters": count, "rows": rows}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
