"""A step for which memory lacks: evenly goes on under a plan that needs less, with the same numbers."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.commands import command
from evenly.observe.attempts import plans_started
from evenly.observe.run_folder import RunFolder

JOB = """
from pathlib import Path

import torch

from benchmarks.gpu.models import case_of


def job(out="", lacks=True, cpu=True):
    one, starts = case_of("host", cpu=cpu).job(4), Path(out) / "attempts.jsonl"
    loss, seen = one.loss, []

    def short_of_memory(model, batch):
        seen.append(batch)
        if lacks and len(seen) == 6 and starts.read_text().count("plan") == 1:
            torch.empty(2**46, dtype=torch.uint8, device=batch.device)
        return loss(model, batch)

    from dataclasses import replace

    return replace(one, loss=short_of_memory, precision="float64")
"""


def no_room(*, cpu: bool) -> dict[str, Any]:
    """Runs a job in which memory lacks once, and the same undisturbed; raises where they do not end alike."""
    with tempfile.TemporaryDirectory(prefix="no-room-") as name:
        folder = Path(name)
        (folder / "job.py").write_text(JOB)
        losses = [_losses(folder, lacks=lacks, cpu=cpu) for lacks in (True, False)]
        plans = plans_started(RunFolder(folder / "True"))
    apart = max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True))
    if len(plans) < 2 or apart > 1e-9:
        raise RuntimeError(f"plans {plans}, losses {losses}")
    return {"plans": plans, "largest_difference": apart}


def _losses(folder: Path, *, lacks: bool, cpu: bool) -> list[float]:
    out = folder / str(lacks)
    sets = [word for one in (f"out={out}", f"lacks={lacks}", f"cpu={cpu}") for word in ("--set", one)]
    words = ("run", str(folder / "job.py"), "--plan", "single", "--devices", "1", "--out", str(out), *sets)
    done = command(*words, cpu=cpu)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    by_step = {row["step"]: row["loss"] for row in rows if "loss" in row}
    return [by_step[step] for step in sorted(by_step)]
