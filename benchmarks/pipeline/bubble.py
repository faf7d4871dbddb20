"""The bubble of every schedule as run, beside theory and simulation: 2 ranks, each bound to a core.

    python benchmarks/pipeline/bubble.py [SCHEDULE ...] [--steps 10] [--rounds 8]        some minutes on a quiet machine

The stages of a tower of eight equal blocks cost the same. A run records the spans of five steps; schedules take turns,
in rounds, until each has enough steps in which no other process had the ranks' cores. As run is the median over these
steps, of the mean bubble of both ranks. Simulated is the same order, step by step, with the mean seconds of each kind
of pass of each stage and of the messages of that step; *free* with one mean per kind of pass over all stages, and
messages that take none: what the schedule itself leaves idle. Kept in benchmarks/results/pipeline.json, schedule by
schedule.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tower import BLOCKS, DISTURBED, WIDTH, bind, keep, kept, load, tower_job, waited_s

import evenly
from evenly.launcher.agent import Launch, start_ranks
from evenly.parallel.pipeline.orders import orders
from evenly.plan.schedule import SCHEDULES, Schedule, stages_per_rank
from evenly.planner.timeline import Costs, Timeline, costs_of, ideal_bubble, simulate
from evenly.report.spans import read_recorded

Case = tuple[Schedule, int]
RANKS, MICROBATCHES, STEPS = 2, (4, 8), 7  # of which the last five are recorded


def train(cases: Sequence[Case], folder: str) -> None:
    """A run of each case, in a rank."""
    bind()
    for schedule, microbatches in cases:
        # Passes that take long beside a message of 512 KiB.
        job = tower_job(microbatches, steps=STEPS, samples=256, inners=(16 * WIDTH,) * BLOCKS)
        plan = f"pipeline={RANKS} schedule={schedule}"
        out = Path(folder) / f"{schedule}-{microbatches}"
        waited: list[float] = []
        with evenly.start(job, plan=plan, out=out) as run:
            for batch in run.batches():
                before = waited_s()
                run.step(batch)
                waited.append(waited_s() - before)
        (out / f"waited{run.world.rank}.json").write_text(json.dumps(waited))


def recorded_steps(cases: Sequence[Case]) -> dict[Case, list[Timeline]]:
    """The recorded and undisturbed steps of one round."""
    with tempfile.TemporaryDirectory() as folder:
        start_ranks(train, (cases, folder), Launch(devices=RANKS, environment={"OMP_NUM_THREADS": "1"}))
        return {case: _steps_in(Path(folder) / f"{case[0]}-{case[1]}") for case in cases}


def _steps_in(folder: Path) -> list[Timeline]:
    recorded = read_recorded(folder)
    assert recorded is not None
    steps = sorted(set.intersection(*({*steps} for steps in recorded.steps.values())))
    runs = {step: Timeline(RANKS, [span for of in recorded.steps.values() for span in of[step]]) for step in steps}
    waited = [json.loads((folder / f"waited{rank}.json").read_text()) for rank in range(RANKS)]
    return [run for step, run in runs.items() if max(w[step - 1] for w in waited) < DISTURBED * run.makespan_s]


def equal_costs(costs: Costs) -> Costs:
    """With one mean per kind of pass, and messages that take no time."""
    names = ("forward", "backward", "backward_input", "backward_weight")
    stages = len(costs.forward)
    return replace(
        costs, **{name: [statistics.fmean(getattr(costs, name))] * stages for name in names}, transfer_s=0.0, send_s=0.0
    )


def figures(step: Timeline, schedule: Schedule, microbatches: int) -> dict[str, float]:
    """Of one step, bubbles as mean over the ranks."""
    planned = orders(schedule, RANKS, stages_per_rank(schedule, None), microbatches)
    costs = costs_of(step)
    forwards = [span.seconds for span in step.spans if span.kind == "forward"]
    return {
        "measured": statistics.fmean(step.bubble),
        "simulated": statistics.fmean(simulate(planned, costs).bubble),
        "simulated_free": statistics.fmean(simulate(planned, equal_costs(costs)).bubble),
        "step_s": step.makespan_s,
        "forward_s": statistics.fmean(forwards),
        "transfer_s": costs.transfer_s,
        "send_s": costs.send_s,
        "uneven": max(step.busy_s) / (sum(step.busy_s) / RANKS) - 1,
    }


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def row(steps: Sequence[Timeline], schedule: Schedule, microbatches: int) -> dict[str, Any]:
    """The medians over `steps`, and how far they are from what they are held against."""
    each = [figures(step, schedule, microbatches) for step in steps]
    found: dict[str, Any] = medians(each)
    found["theory"] = ideal_bubble(schedule, RANKS, stages_per_rank(schedule, None), microbatches)
    found["spread"] = statistics.quantiles([one["measured"] for one in each], n=4)[::2]
    found["measured_over_simulated"] = found["measured"] / found["simulated"]
    found["measured_over_simulated_free"] = found["measured"] / found["simulated_free"]
    found["measured_over_theory"] = found["measured"] / found["theory"] if found["theory"] else None
    return {**found, "steps": len(each)}


def show(schedule: str, microbatches: int, found: dict[str, Any]) -> None:
    theory = (
        "     -      -" if found["theory"] is None else f"{found['theory']:6.2%} {found['measured_over_theory']:6.3f}"
    )
    simulated = "  ".join(
        f"{name} {found[key]:6.2%} {found[f'measured_over_{key}']:6.3f}"
        for name, key in (("simulated", "simulated"), ("free", "simulated_free"))
    )
    print(
        f"{schedule:12} m={microbatches}  {found['measured']:6.2%} [{found['spread'][0]:.2%}..{found['spread'][1]:.2%}]"
        f"  theory {theory}  {simulated}  forward {found['forward_s'] * 1e3:5.1f} ms"
        f"  message {found['transfer_s'] * 1e3:.2f} ms  uneven {found['uneven']:.2%}  {found['steps']} steps",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedules", nargs="*", choices=[[], *(*SCHEDULES,)])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    cases: list[Case] = [(s, m) for s in args.schedules or (*SCHEDULES,) for m in MICROBATCHES]
    steps: dict[Case, list[Timeline]] = {case: [] for case in cases}
    loads = [load()]
    for _ in range(args.rounds):
        left = [case for case, found in steps.items() if len(found) < args.steps]
        for case, found in recorded_steps(left).items() if left else ():
            steps[case] += found
        loads.append(load())
    for (schedule, microbatches), found in steps.items():
        if len(found) < args.steps:
            print(f"{schedule} m={microbatches}: {len(found)} of {args.steps} undisturbed steps")
    rows = {case: row(found, *case) for case, found in steps.items() if len(found) > 1}
    for case, found in rows.items():
        show(*case, found)
    print(f"load {min(loads):.2f} to {max(loads):.2f}")
    by_name: dict[str, dict[str, Any]] = kept("bubble").get("schedules", {})
    for (schedule, microbatches), found in rows.items():
        by_name.setdefault(schedule, {})[f"m={microbatches}"] = {**found, "load": max(loads)}
    if rows:
        keep("bubble", {"ranks": RANKS, "schedules": by_name})


if __name__ == "__main__":
    main()
