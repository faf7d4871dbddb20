"""Memory as it is predicted of a plan, and as it is allocated in a step."""

from __future__ import annotations

from typing import Any

import torch

import evenly
from benchmarks.gpu.models import Case, case_of
from benchmarks.gpu.speed import release
from evenly.plan import parse_plan
from evenly.planner.job_memory import memory_of_ranks
from evenly.planner.job_profile import JobProfiler
from evenly.train.step import counting_memory

PLANS = (
    "single",
    "single precision=bfloat16",
    "single recompute=full",
    "single precision=bfloat16 recompute=selective",
)


def memory(*, cpu: bool) -> dict[str, Any]:
    """GPT-2 under each plan: bytes predicted, counted as live, and on a GPU allocated."""
    case, rows = case_of("gpt2", cpu=cpu), list[dict[str, Any]]()
    for plan in PLANS:
        row = {"plan": plan, "predicted_bytes": predicted(case, plan, cpu=cpu), **measured(case, plan, cpu=cpu)}
        row["error"] = row["predicted_bytes"] / (row["allocated_bytes"] or row["counted_bytes"]) - 1
        rows.append(row)
        release("cpu" if cpu else "cuda:0")
    return {"plans": rows}


def predicted(case: Case, plan: str, *, cpu: bool) -> int:
    job = case.job(3)
    profiler = JobProfiler(job, step=1, device="cpu" if cpu else "cuda")
    [meter] = memory_of_ranks(profiler, parse_plan(plan).fit(1).complete(job.precision))
    return meter.peak


def measured(case: Case, plan: str, *, cpu: bool) -> dict[str, int | None]:
    """In the third step: the second has already the state of the optimizer, and is counted."""
    with evenly.start(case.job(3), plan=plan) as run:
        batches = run.batches()
        run.step(next(batches))
        with counting_memory(run) as counter:
            run.step(next(batches))
        counted = sum(counter.peaks[0].values())
        if cpu:
            return {"counted_bytes": counted, "allocated_bytes": None}
        torch.cuda.reset_peak_memory_stats()
        run.step(next(batches))
        return {"counted_bytes": counted, "allocated_bytes": torch.cuda.max_memory_allocated()}
