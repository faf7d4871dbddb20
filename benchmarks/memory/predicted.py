"""Memory as it is predicted of plans, beside the bytes of live tensors that are counted when they run.

    python benchmarks/memory/predicted.py        1, 2, 4 and 8 ranks on the CPU; about half an hour on two cores

Every job of examples/ trains two steps under every plan; in the second, when the optimizer has its state, tensors are
counted. A pair is a job under a plan on so many ranks; its error is that of the peak of the rank (or device) that holds
most, `rank_error` that of the rank that is predicted worst. Kept in benchmarks/results/memory_predicted.json.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import evenly
from evenly.errors import UserError
from evenly.launcher.agent import Launch, start_ranks
from evenly.plan import parse_plan
from evenly.planner.job_memory import memory_of_ranks
from evenly.planner.job_profile import JobProfiler
from evenly.train.step import counting_memory

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "memory_predicted.json"
WITHIN = 0.05
SETTINGS: dict[str, dict[str, Any]] = {
    "stdlib_lm": {"layers": 4},
    "bert": {"layers": 4},
    "gpt2": {"layers": 4},
    "resnet": {},
}
ALONE = (
    "single",
    "single exact=bitwise",
    "single precision=bfloat16",
    "single precision=float64",
    "single recompute=selective",
    "single recompute=full",
    "single offload=optimizer",
    "single offload=parameters zero=3",
    "dp replicas=2",
    "balanced-dp replicas=2",
    "balanced-dp replicas=4 recompute=full",
)
DATA = (
    "ddp",
    "ddp exact=bitwise",
    "ddp recompute=full",
    "zero1",
    "zero1 exact=bitwise",
    "zero2",
    "zero2 exact=bitwise",
    "zero2 precision=bfloat16",
    "zero3",
    "zero3 exact=bitwise",
    "zero3 recompute=selective",
    "zero3 recompute=full",
    "zero3 offload=parameters",
)
TENSOR = ("tp", "tp recompute=selective", "tp recompute=full", "tp sequence_parallel=on", "tp precision=bfloat16")
PIPELINE = (
    "mp",
    "pp",
    "pp schedule=gpipe",
    "pp schedule=interleaved",
    "pp schedule=looped-bfs",
    "pp schedule=zero-bubble",
    "pp schedule=zbv",
    "pp schedule=dualpipev",
    "pp recompute=full",
)
FOUR = (
    "hsdp",
    "zero2 shard=2",
    "2d",
    "2d zero=1",
    "2d zero=2",
    "2d zero=3",
    "dp=2 tp=2",
    "dp=2 tp=2 zero=1",
    "dp=2 tp=2 zero=3",
    "tp=2 pp=2",
)
PLANS = {
    1: ALONE,
    2: (*DATA, *TENSOR, *PIPELINE),
    4: ("ddp", "zero1", "zero2", "zero3", "zero3 recompute=full", *TENSOR[:2], *PIPELINE, *FOUR),
    8: ("ddp", "zero1", "zero2", "zero3", "hsdp", "3d", "3d zero=1", "dp=4 pp=2", "dp=4 pp=2 zero=2", "dp=4 tp=2"),
}


def load(name: str) -> evenly.Job:
    """The job of an example, small."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.job(**SETTINGS[name])


def tracked(name: str, plans: Sequence[str]) -> list[list[dict[str, int]] | str]:
    """For every plan, of each device of this rank the bytes by category at its peak; or why it did not run."""
    warnings.simplefilter("ignore")
    job, found = load(name), []
    for plan in plans:
        try:
            with evenly.start(job, plan=plan, steps=3) as run:
                batches = run.batches()
                run.step(next(batches))
                batch = next(batches)
                with counting_memory(run) as counter:
                    run.step(batch)
                found.append([dict(counter.peaks.get(one.number, {})) for one in run.composed.replicas])
        except UserError as problem:  # raised by all ranks alike
            found.append(str(problem).partition("found: ")[2].partition("\n")[0])
    return found


def groups(categories: dict[str, int]) -> dict[str, int]:
    """What the tracker and the prediction call alike, put together."""
    alike = {
        "weights": ("parameters", "gathered"),
        "gradients": ("gradients", "sums"),
        "optimizer": ("optimizer",),
        "rest": ("activations", "temporaries", "buffers"),
    }
    return {name: sum(categories.get(one, 0) for one in ones) for name, ones in alike.items()}


def pair(reader: JobProfiler, name: str, plan: str, ranks: int, counted: list[dict[str, int]]) -> dict[str, Any]:
    """One row."""
    parsed = parse_plan(plan)
    begun = time.perf_counter()
    meters = memory_of_ranks(
        reader, parsed.fit(ranks if parsed.replicas is None else parsed.devices or 1).complete(reader.job.precision)
    )
    took = time.perf_counter() - begun
    totals = [sum(one.values()) for one in counted]
    errors = [meter.peak / total - 1 for meter, total in zip(meters, totals, strict=True)]
    most, predicted = totals.index(max(totals)), max(meters, key=lambda meter: meter.peak)
    return {
        "job": name, "plan": plan, "ranks": ranks, "tracked_bytes": max(totals), "predicted_bytes": predicted.peak,
        "error": predicted.peak / max(totals) - 1, "rank_error": max(errors, key=abs), "predicting_s": round(took, 3),
        "tracked": groups(counted[most]), "predicted": groups({**predicted.at_peak}),
    }  # fmt: skip


def rows_of(name: str, ranks: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The pairs of a job on so many ranks, and the plans that it does not run."""
    plans = PLANS[ranks]
    launch = Launch(devices=ranks, environment={"OMP_NUM_THREADS": "1"})
    of_ranks = [tracked(name, plans)] if ranks == 1 else [*start_ranks(tracked, (name, plans), launch).values()]
    reader = JobProfiler(load(name), step=1)
    rows: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    for number, plan in enumerate(plans):
        found = [one[number] for one in of_ranks]
        if isinstance(found[0], str):
            refused.append({"job": name, "plan": plan, "ranks": ranks, "reason": found[0]})
            continue
        rows.append(pair(reader, name, plan, ranks, [device for one in found for device in one]))
        row = rows[-1]
        print(f"{name:10} {ranks} ranks  {plan:40} {row['error']:+7.2%}   rank {row['rank_error']:+7.2%}", flush=True)
    return rows, refused


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shares within the bound, and the worst."""
    worst = max(rows, key=lambda row: abs(row["error"]))
    ordered = sorted(abs(row["error"]) for row in rows)
    return {
        "pairs": len(rows),
        "within": sum(error <= WITHIN for error in ordered) / len(rows),
        "every_rank_within": sum(abs(row["rank_error"]) <= WITHIN for row in rows) / len(rows),
        "median": ordered[len(rows) // 2],
        "p90": ordered[int(0.9 * (len(rows) - 1))],
        "worst": {key: worst[key] for key in ("job", "plan", "ranks", "error")},
    }


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # on all ranks alike
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    for ranks in PLANS:
        for name in SETTINGS:
            found, not_run = rows_of(name, ranks)
            rows, refused = rows + found, refused + not_run
            machine = {"python": platform.python_version(), "torch": torch.__version__, "backend": "gloo"}
            date = time.strftime("%Y-%m-%d", time.gmtime())
            document = {"date": date, "machine": machine, "summary": summary(rows), "rows": rows, "refused": refused}
            RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
