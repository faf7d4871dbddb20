"""A checkpoint: what it takes to write, and that a run goes on from it as if nothing had been."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import evenly
from benchmarks.gpu.models import case_of

PLAN = "single precision=bfloat16"


def checkpoint(*, cpu: bool) -> dict[str, Any]:
    """Saves after two steps of GPT-2, goes on in a second run, and compares the third step's loss."""
    job = case_of("gpt2", cpu=cpu).job(3)
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as name:
        began_s = time.perf_counter()
        with evenly.start(job, plan=PLAN, out=name) as run:
            batches = run.batches()
            run.step(next(batches))
            run.step(next(batches))
            began_s = time.perf_counter()
            run.save()
            returned_s = time.perf_counter() - began_s
            expected = run.step(next(batches)).loss
        written = sum(file.stat().st_size for file in Path(name).rglob("checkpoints/*2/*") if file.is_file())
        _forget_last(Path(name))
        began_s = time.perf_counter()
        with evenly.start(job, plan=PLAN, out=name, resume=True) as run:
            resumed_s, done = time.perf_counter() - began_s, run.steps_done
            found = run.step(next(run.batches())).loss
    if done != 2 or abs(found - expected) > 1e-5 * abs(expected):
        raise RuntimeError(f"went on after {done} steps, with the loss {found} in place of {expected}")
    return {"bytes": written, "save_returned_s": returned_s, "resumed_s": resumed_s, "loss": [expected, found]}


def _forget_last(out: Path) -> None:
    """Removes the checkpoint of the last step."""
    for folder in (out / "checkpoints").glob("step-*3"):
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
