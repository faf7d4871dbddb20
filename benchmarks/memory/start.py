"""What a rank takes to start a model that it does not hold: 1 B parameters, float32, 4 GB, cut over four ranks.

    python benchmarks/memory/start.py [PLAN] [RANKS]        needs about 12 GB of memory

Every rank's peak (resident set, torch itself included) after the start, and whether sampled tensors have the bits of
the model that one process builds. Kept in benchmarks/results/start.json, by plan and ranks.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path

import torch
from torch import nn

import evenly
from evenly.data.generators import seeded
from evenly.data.stream import stream_key
from evenly.engine.executor import peak_bytes
from evenly.launcher.agent import Launch, start_ranks

RESULTS = Path(__file__).parents[1] / "results" / "start.json"
WIDTH, BLOCKS, VOCABULARY = 2048, 19, 16_000
SAMPLED = (
    "embed.weight",
    "blocks.0.linear1.weight",
    "blocks.9.self_attn.in_proj_weight",
    "blocks.18.linear2.weight",
    "head.weight",
)


class Model(nn.Module):
    """Blocks of 50 M parameters between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, batch_first=True) for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # never called with numbers
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def job() -> evenly.Job:
    return evenly.Job(
        model=Model,
        loss=lambda model, batch: model(batch).sum(),  # never called with numbers
        data=torch.zeros(2, 8, dtype=torch.int64),  # pyright: ignore[reportArgumentType]
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        global_batch=1,
        steps=1,
    )


def sums(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Of the bits of each sampled tensor, so that tensors need not travel."""
    bits = {name: tensors[name].detach().view(torch.int32).to(torch.int64) for name in SAMPLED}
    return {name: int((b * torch.arange(1, b.numel() + 1).view(b.shape)).sum()) for name, b in bits.items()}


def alone() -> tuple[int, int, dict[str, int]]:
    with seeded(stream_key(job().seed, "model")):
        built = Model()
    peak = peak_bytes("cpu")
    return sum(p.numel() for p in built.parameters()), peak, sums(dict(built.named_parameters()))


def cut(plan: str) -> tuple[int, float, dict[str, int]]:
    began_s = time.perf_counter()
    with evenly.start(job(), plan=plan) as run:
        peak, took_s = peak_bytes("cpu"), time.perf_counter() - began_s
        held = {name: p.detach() for name, p in run.model.named_parameters() if name in SAMPLED}
        whole = {name: run.composed.full_view(name, tensor) for name, tensor in held.items()}
        return peak, took_s, sums(whole)


def main() -> None:
    plan = sys.argv[1] if sys.argv[1:] else "zero3"
    ranks = int(sys.argv[2]) if sys.argv[2:] else 4
    count, alone_bytes, expected = start_ranks(alone, (), Launch(devices=1))[0]
    results = start_ranks(cut, (plan,), Launch(devices=ranks))
    peaks = [results[rank][0] for rank in sorted(results)]
    same = all(results[rank][2] == expected for rank in results)
    print(f"{count / 1e9:.3f} B parameters, {4 * count / 1e9:.2f} GB; alone: peak {alone_bytes / 1e9:.2f} GB")
    print(f"{plan} on {ranks} ranks: peaks", *(f"{peak / 1e9:.2f}" for peak in peaks), "GB")
    print(f"bits of {len(SAMPLED)} sampled tensors {'the same' if same else 'DIFFER'}; start {results[0][1]:.0f} s")
    row = {"plan": plan, "ranks": ranks, "parameters": count, "alone_peak_bytes": alone_bytes, "peak_bytes": peaks}
    machine = {"python": platform.python_version(), "torch": torch.__version__}
    date = time.strftime("%Y-%m-%d", time.gmtime())
    document = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    document[f"{plan} {ranks}"] = {"date": date, "machine": machine, **row, "start_s": results[0][1], "same_bits": same}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
