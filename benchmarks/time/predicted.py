"""The time of a step as it is predicted for this machine, beside that of a run.

    python benchmarks/time/predicted.py        1 and 2 ranks on the CPU; a quarter of an hour on two quiet cores

First `evenly bench device` and `evenly bench comm` measure the machine. Every job of examples/ that can be read then
runs under every plan, as a user would start it, the plans of a job in turns; of a run counts the median step after
the first ten. Kept in benchmarks/results/time_predicted.json, with how much is lost where the plan that is predicted
fastest is not the fastest that was run.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "time_predicted.json"
JOBS = ("stdlib_lm", "digits", "bert", "gpt2", "vit", "resnet")
PLANS = {
    1: ("data=1", "data=1 recompute=full"),
    2: (
        "data=2 zero=0",
        "data=2 zero=1",
        "data=2 zero=3",
        "tensor=2",
        "pipeline=2 schedule=1f1b",
        "pipeline=2 schedule=naive",
    ),
}
STEPS, WARM_UP, TURNS = 40, 10, 2


def evenly(*arguments: object, folder: Path) -> str | None:
    """What `evenly` prints with --json; None where it refuses."""
    done = subprocess.run(
        [sys.executable, "-m", "evenly", *map(str, arguments), "--json"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    return done.stdout if done.returncode == 0 else None


def predicted(job: Path, asked: str, cluster: Path) -> tuple[str, float] | None:
    """The fastest plan with what is asked, in full, and seconds of a step; None where the job cannot be planned so."""
    found = evenly("plan", job, "--cluster", cluster, "--only", asked, folder=cluster.parent)
    plans = json.loads(found)["plans"] if found else []
    return (plans[0]["plan"], plans[0]["step_s"]) if plans else None


def measured(job: Path, plan: str, ranks: int, folder: Path) -> float | None:
    """Seconds of the median step; None where the plan is refused."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        asked = ("--plan", plan, "--devices", ranks, "--steps", STEPS, "--out", f"{out}/run")
        if evenly("run", job, *asked, folder=folder) is None:
            return None
        lines = Path(out, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    times = [row["step_s"] for row in map(json.loads, lines) if "step_s" in row]
    return median(times[WARM_UP:])


def rows_of(name: str, ranks: int, cluster: Path) -> list[dict[str, Any]]:
    """The pairs of a job on so many ranks."""
    job = ROOT / "examples" / f"{name}.py"
    expected = dict(filter(None, (predicted(job, asked, cluster) for asked in PLANS[ranks])))
    found: dict[str, list[float]] = {}
    for _ in range(TURNS):
        for plan in expected:
            if (taken := measured(job, plan, ranks, cluster.parent)) is not None:
                found.setdefault(plan, []).append(taken)
    rows: list[dict[str, Any]] = []
    for plan, times in found.items():
        taken, ratio = min(times), expected[plan] / min(times)
        row = {"job": name, "plan": plan, "ranks": ranks, "measured_s": taken, "predicted_s": expected[plan]}
        rows.append({**row, "ratio": ratio})
        print(f"{name:10} {plan:90} {taken * 1e3:7.1f} ms, predicted x {ratio:.2f}", flush=True)
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How far off predictions are, and what following them costs."""
    ratios = sorted(row["ratio"] for row in rows)
    lost: dict[str, float] = {}
    for name in dict.fromkeys(row["job"] for row in rows):
        of_two = [row for row in rows if row["job"] == name and row["ranks"] == 2]
        chosen = min(of_two, key=lambda row: row["predicted_s"])
        lost[name] = chosen["measured_s"] / min(row["measured_s"] for row in of_two) - 1
    off = sorted(max(ratio, 1 / ratio) - 1 for ratio in ratios)
    return {
        "pairs": len(rows),
        "median_off": median(off),
        "p90_off": off[int(0.9 * (len(off) - 1))],
        "least_ratio": ratios[0],
        "largest_ratio": ratios[-1],
        "lost_by_choice": lost,
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder, "here.toml")
        for what in (("device",), ("comm", "--devices", 2)):
            assert evenly("bench", *what, "--save", cluster, folder=cluster.parent) is not None, what
        rows = [row for ranks in PLANS for name in JOBS for row in rows_of(name, ranks, cluster)]
        machine = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
        date = time.strftime("%Y-%m-%d", time.gmtime())
        document = {"date": date, "machine": machine, "summary": summary(rows), "rows": rows}
        RESULTS.write_text(json.dumps({**document, "cluster": cluster.read_text(encoding="utf-8")}, indent=1) + "\n")
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
