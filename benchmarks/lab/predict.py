"""What the planner predicts for each pair of a job and a lab: the best plan of every family, and what `auto` takes.

python -m benchmarks.lab.predict F [WORDS]   pairs with these words in their names whose lab was measured: F/LAB.toml

F/predicted.json holds, by pair and by what was asked, the plan and its step in seconds; `regret` runs what is in it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.lab.lab import ROOT
from benchmarks.lab.pairs import AUTO, JOBS, PAIRS, Pair
from evenly.errors import PlanError
from evenly.hardware.cluster_file import read_cluster
from evenly.jobfile import load_job
from evenly.plan import parse_plan
from evenly.planner.job_profile import STEPS
from evenly.planner.job_source import JobSource
from evenly.planner.request import PlanRequest
from evenly.planner.search import search

FILE = "predicted.json"
WARM_UP = 2  # steps that are run and do not count: in the second, memory is counted


def main() -> int:
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    chosen = [pair for pair in PAIRS if all(word in str(pair) for word in words)]
    found = read_predicted(folder)
    for pair in chosen:
        if (cluster := folder / f"{pair.lab}.toml").exists():
            found[str(pair)] = {asked: _best(pair, asked, cluster) for asked in (*pair.families, AUTO)}
    (folder / FILE).write_text(json.dumps(found, indent=1) + "\n")
    return 0


def read_predicted(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """By pair, by what was asked: plan, predicted_s and time_s, or why it is refused."""
    file = folder / FILE
    return json.loads(file.read_text()) if file.exists() else {}


@cache
def _source(job: str, step: int, steps: int) -> JobSource:
    name, settings = JOBS[job]
    return JobSource(load_job(ROOT / "examples" / f"{name}.py", settings), step=step, steps=steps)


def _best(pair: Pair, asked: str, cluster: Path) -> dict[str, Any]:
    """By the steps that are measured; `auto` by those that it looks at."""
    source = _source(pair.job, 0, STEPS) if asked == AUTO else _source(pair.job, WARM_UP, pair.steps)
    request = PlanRequest(
        source=source, cluster=read_cluster(cluster), batch=source.job.global_batch, only=parse_plan(asked), top=1
    )
    try:
        best = search(request).plans[0]
    except PlanError as refused:
        return {"refused": str(refused)}
    time_s = asdict(best.time)
    return {"plan": str(best.plan), "predicted_s": best.step_s, "time_s": time_s}


if __name__ == "__main__":
    sys.exit(main())
