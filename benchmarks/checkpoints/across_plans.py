"""Runs that are saved under one plan and go on under another, held against one device; every pair of eight plans.

    python benchmarks/checkpoints/across_plans.py        up to 8 ranks on the CPU; some minutes

GPT-2 of examples/gpt2.py (tied embedding, dropout, AdamW, clipping; four small blocks) trains in float64. It is saved
after three steps under each plan and goes on for three more under each. The losses and gradient norms of the later
steps, all parameters and the optimizer's state are held against six steps on one device; a run under its own plan also
against its own six steps, bit by bit.

The difference of a tensor is its largest, over the largest number in the tensor; that of a pair is the largest of all
its tensors. Printed as a table, and kept in benchmarks/results/checkpoints.json.
"""

from __future__ import annotations

import json
import platform
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

import evenly
from evenly.checkpoint.state import parameter_of, read_state
from evenly.jobfile import load_job
from evenly.launcher.agent import Launch, start_ranks
from evenly.train.run import Run

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "checkpoints.json"
PLANS = {
    "single": ("single", 1),
    "ddp": ("ddp", 2),
    "zero3": ("zero3", 2),
    "hsdp": ("hsdp", 4),
    "tp": ("tp", 2),
    "pp": ("pp", 2),
    "2d": ("data=2 pipeline=2 zero=3", 4),
    "3d": ("3d", 8),
}
SAVED_AT, STEPS = 3, 6
PRELOAD = ["transformers.models.gpt2.modeling_gpt2", "evenly.train.run", "evenly.train.resume"]

Numbers = dict[str, torch.Tensor]


def train(plan: str, steps: int, out: Path | None, resume: bool) -> Numbers:
    """Trains to `steps`, saves if the run has just begun; what this rank has of the whole state, and its figures."""
    job = replace(load_job(ROOT / "examples" / "gpt2.py", {"width": 16, "layers": 4}), precision="float64")
    found: Numbers = {}
    with evenly.start(job, plan=plan, out=out, steps=steps, resume=resume) as run:
        for batch in run.batches():
            report = run.step(batch)
            found[f"loss {report.step}"] = torch.tensor(report.loss, dtype=torch.float64)
            found[f"grad_norm {report.step}"] = torch.tensor(report.grad_norm, dtype=torch.float64)
        if out is not None and not resume:
            run.save()
        return found | state_of(run)


def state_of(run: Run) -> Numbers:
    """The tensors of model and optimizer, whole; those that other stages hold are not among them."""
    with run.state_as_saved():
        tensors, _ = read_state(run.model, run.optimizer)
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        return {n: run.composed.full_view(parameter_of(n), t).cpu() if t.dim() else t for n, t in copies.items()}


def train_on_ranks(name: str, steps: int, out: Path | None = None, resume: bool = False) -> Numbers:
    """`train` under the plan of that name; what its ranks have, together."""
    plan, ranks = PLANS[name]
    results = start_ranks(train, (plan, steps, out, resume), Launch(devices=ranks, preload=PRELOAD))
    return {what: tensor for numbers in results.values() for what, tensor in numbers.items()}


def difference(found: Numbers, expected: Numbers) -> tuple[float, str]:
    """The largest of all tensors, and where."""
    past = {f"{what} {step}" for what in ("loss", "grad_norm") for step in range(1, SAVED_AT + 1)}
    assert found.keys() == expected.keys() - past
    return max((relative(tensor, expected[name]), name) for name, tensor in found.items())


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    apart, largest = float((found - expected).abs().max()), float(expected.abs().max())
    return apart / largest if largest else apart


def table(rows: list[dict[str, object]]) -> str:
    """As markdown."""
    differences = {(row["saved"], row["resumed"]): row["difference"] for row in rows}
    lines = [f"| saved under | {' | '.join(PLANS)} |", "|---" * (len(PLANS) + 1) + "|"]
    for saved in PLANS:
        cells = [differences[saved, then] for then in PLANS]
        lines.append(f"| {saved} | {' | '.join(f'{cell:.0e}' if cell else '0' for cell in cells)} |")
    return "\n".join(lines)


def main() -> None:
    expected = train_on_ranks("single", STEPS)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for saved in PLANS:
            out = Path(scratch) / saved
            train_on_ranks(saved, SAVED_AT, out)
            for then in PLANS:
                copy = Path(shutil.copytree(out, Path(scratch) / f"{saved}-{then}"))  # a run saves where it ends
                found = train_on_ranks(then, STEPS, copy, resume=True)
                shutil.rmtree(copy)
                largest, where = difference(found, expected)
                row = {"saved": saved, "resumed": then, "difference": largest, "where": where}
                if saved == then:
                    own = train_on_ranks(then, STEPS)
                    row["own_bits"] = all(torch.equal(tensor, own[name]) for name, tensor in found.items())
                rows.append(row)
                print(*row.values(), flush=True)
    machine = {"python": platform.python_version(), "torch": torch.__version__, "backend": "gloo"}
    document = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "machine": machine, "plans": PLANS,
        "saved_at": SAVED_AT, "steps": STEPS, "rows": rows,
    }  # fmt: skip
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
