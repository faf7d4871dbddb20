"""Folders of runs as a run would have written them, for the tests of pages."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

NOON = 1_700_000_000.0
MIB = 2**20


def plan(**more: Any) -> dict[str, Any]:
    found = {
        "job": "tower", "plan": "data=2 zero=0 precision=float32", "world": 2, "steps": 40, "global_batch": 8,
        "parameters": 1234, "memory_limit_bytes": 4096 * MIB, "settings": {"layers": 2},
    }  # fmt: skip
    return found | more


def record(step: int, **more: Any) -> dict[str, Any]:
    """Rank 1 computes for 50 ms longer than rank 0, in a step of 0.2 s."""
    found = {
        "step": step, "loss": 4.0 / (1 + 0.1 * step), "weight": 64.0, "grad_norm": 1.0 + 0.1 * math.sin(step),
        "lr": 0.1, "samples": 8, "step_s": 0.2, "samples_per_s": 40.0, "tokens_per_s": 320.0,
        "memory_bytes": [500 * MIB, 600 * MIB], "left_out": 0, "busy_s": [0.1, 0.15], "waited_s": 0.07,
    }  # fmt: skip
    return found | more


def lines(records: Any) -> str:
    return "".join(json.dumps(one) + "\n" for one in records)


def write_run(
    folder: Path, records: Any, *, events: Any = (), of_plan: dict[str, Any] | None = None, timeline: bool = False
) -> Path:
    (folder / "events").mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(plan() if of_plan is None else of_plan))
    (folder / "metrics.jsonl").write_text(lines(records))
    (folder / "events" / "rank0.jsonl").write_text(lines(events))
    if timeline:
        write_timeline(folder)
    return folder


def event(name: str, step: int, seconds: float) -> dict[str, Any]:
    return {"time": NOON + seconds, "event": name, "step": step, **({"size": 2} if name == "started" else {})}


def write_timeline(folder: Path, *, ranks: int = 2, microbatches: int = 4) -> None:
    (folder / "timeline").mkdir(exist_ok=True)
    for rank in range(ranks):
        rows: list[dict[str, Any]] = []
        at = NOON + 0.02
        for microbatch in range(microbatches):
            for kind, length in (("forward", 0.01), ("backward", 0.02 + 0.004 * rank)):
                rows.append({"kind": kind, "stage": 0, "microbatch": microbatch, "begin_s": at, "end_s": at + length})
                at += length
        end = NOON + 0.02 + microbatches * 0.036
        rows.append({"kind": "loading", "name": "", "begin_s": NOON, "end_s": NOON + 0.02})
        rows.append({"kind": "update", "name": "", "begin_s": at, "end_s": end + 0.01})
        rows.append({"kind": "operation", "name": "all_reduce (gradients)", "axis": "data"})
        rows[-1] |= {"begin_s": at - 0.02, "end_s": end, "waited_s": 0.01}
        place = {"step": 4, "rank": rank, "position": 0}
        (folder / "timeline" / f"rank{rank}.jsonl").write_text(lines({**place, **row} for row in rows))


PREDICTED = {
    "step_s": 0.15,
    "samples_per_s": 53.0,
    "time_s": {"matmul": 0.1, "data": 0.05},
    "memory_bytes": [{"parameters": 100.0 * MIB, "activations": 300.0 * MIB, "peak": 400.0 * MIB}],
}


def write_full_run(folder: Path) -> Path:
    """With all that a page can show."""
    counted = [{"parameters": 100 * MIB, "activations": 250 * MIB, "optimizer": 90 * MIB} for _ in range(2)]
    records: list[dict[str, Any]] = []
    for step in range(1, 41):
        more: dict[str, Any] = {"metrics": {"accuracy": step / 50}, "memory_bytes": [500 * MIB, (600 + 2 * step) * MIB]}
        more |= {"memory": counted} if step == 2 else {}
        if 3 <= step <= 7:
            more["communication"] = {
                "data": {"under_way_s": 0.06 + 0.01 * step, "waited_s": 0.01 * step, "hidden": 0.5}
            }
        more |= {"step_s": 0.9, "busy_s": [0.1, 0.8], "waited_s": 0.7} if step == 25 else {}
        records.append(record(step, **more))
        if step % 10 == 0:
            records.append({"step": step, "eval_loss": 4.2 / (1 + 0.1 * step), "eval_metrics": {"accuracy": step / 60}})
    records.append({"step": 30, "slow_rank": 1, "ratio": 1.5, "processor": "2.1 GHz"})
    events = [event("started", 0, 0), event("failed", 20, 6), event("started", 20, 9), event("ended", 40, 20)]
    of_plan = plan(predicted=PREDICTED, job="tower <script>alert(1)</script>")
    return write_run(folder, records, events=events, of_plan=of_plan, timeline=True)
