"""Distance of final parameters from the single process, as a share of the way training went.

drift.py W1 W2 ...: over the runs that bench.py speed and equal left in out/.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from workloads import WORKLOADS

OUT = Path(__file__).with_name("out")
REFERENCE = "single1"
State = dict[str, torch.Tensor]


def newest(workload: str) -> dict[tuple[int, str], dict]:
    """By number of steps and contender: its newest run whose parameters are still there."""
    files = [*OUT.glob(f"speed*/{workload}.*.json"), *OUT.glob(f"equal/{workload}.*.json")]
    found = {}
    for file in sorted(files, key=lambda file: file.stat().st_mtime):
        if file.name.count(".") != 2:  # the parts of single ranks
            continue
        result = json.loads(file.read_text())
        if result["final_params"] and Path(result["final_params"]).exists():
            found[len(result["losses"]), file.name.split(".")[1]] = result
    return found


def length(difference: State) -> float:
    return sum(d.double().square().sum() for d in difference.values()).sqrt().item()


def minus(a: State, b: State) -> State:
    return {k: a[k] - b[k] for k in a}


def compare(result: dict, reference: dict, start: State) -> str | None:
    """One line; None for parameters of another type."""
    a, b = torch.load(reference["final_params"]), torch.load(result["final_params"])
    if {k: v.dtype for k, v in b.items()} != {k: v.dtype for k, v in a.items()}:
        return None
    share = length(minus(a, b)) / length(minus(a, start))
    top = max(d.abs().max().item() for d in minus(a, b).values())
    loss, means = (
        max(abs(x - y) for x, y in zip(result[field], reference["losses"], strict=True))
        for field in ("losses", "mean_of_means")
    )
    distance = f"max|dp| {top:.2e}  |dp|/|way| {share:.2e}  max|dloss| {loss:.2e}"
    return f"{distance}  reported loss off by up to {means:.2e}"


def main(workloads: list[str]) -> None:
    for workload in workloads:
        runs = newest(workload)
        start = WORKLOADS[workload].model().state_dict()
        for (steps, name), result in runs.items():
            reference = runs.get((steps, REFERENCE))
            if name == REFERENCE or reference is None:
                continue
            if line := compare(result, reference, start):
                print(f"{workload} {name:18s} steps {steps}  {line}")


if __name__ == "__main__":
    main(sys.argv[1:])
