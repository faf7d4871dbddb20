"""The bubble of every schedule as run, beside theory and simulation: 2 ranks, each bound to a core.

    python benchmarks/pipeline/bubble.py [SCHEDULE ...] [--steps 10] [--rounds 8]        some minutes on a quiet machine

The stages of a tower of eight equal blocks cost the same. A run records the spans of five steps; schedules take turns,
in rounds, until each has enough steps in which no other process had the ranks' cores. As run is the median over these
steps, of the mean bubble of both ranks. Simulated is the same order with the mean seconds of each kind of pass, over
both ranks and all stages of a step, and messages that take none; *by stage* with those of each stage as they were: the
cores of a machine are not equally fast at every moment. `start` is the share of the step before the first pass. Kept in
benchmarks/results/pipeline.json, schedule by schedule.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from tower import BLOCKS, DISTURBED, WIDTH, bind, keep, kept, load, tower_job, waited_s

import evenly
from evenly.cluster.launch import Launch, start_ranks
from evenly.parallel.pipeline.orders import orders
from evenly.plan.schedule import COMPUTE, Kind, Schedule, stages_per_rank
from evenly.predict.timeline import Costs, Span, Timeline, ideal_bubble, simulate
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


def mean_costs(spans: Iterable[Span], stages: int, *, by_stage: bool) -> Costs:
    """Mean seconds of each kind of pass, of each stage or over all of them."""
    found: dict[tuple[Kind, int], list[float]] = {}
    for span in spans:
        if span.kind in COMPUTE:
            for stage in [span.stage] if by_stage else range(stages):
                found.setdefault((span.kind, stage), []).append(span.seconds)
    means = {kind: [statistics.fmean(found.get((kind, s), [0.0])) for s in range(stages)] for kind in COMPUTE}
    return Costs(**{str(kind): of_stage for kind, of_stage in means.items()})  # pyright: ignore


def figures(step: Timeline, schedule: Schedule, microbatches: int) -> dict[str, float]:
    """Of one step, bubbles as mean over the ranks."""
    per_rank = stages_per_rank(schedule, None)
    planned = orders(schedule, RANKS, per_rank, microbatches)
    bubbles = {
        name: statistics.fmean(simulate(planned, mean_costs(step.spans, RANKS * per_rank, by_stage=by)).bubble)
        for name, by in (("simulated", False), ("simulated_by_stage", True))
    }
    first_s = min(span.begin_s for span in step.spans if span.kind in COMPUTE)
    forwards = [span.seconds for span in step.spans if span.kind == "forward"]
    busy, whole = sum(step.busy_s), step.makespan_s
    return {
        "measured": statistics.fmean(step.bubble),
        **bubbles,
        "step_s": whole,
        "forward_s": statistics.fmean(forwards),
        "start": (first_s - step.begin_s) / whole,
        "uneven": max(step.busy_s) / (busy / RANKS) - 1,
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
    found["measured_over_simulated_by_stage"] = found["measured"] / found["simulated_by_stage"]
    found["measured_over_theory"] = found["measured"] / found["theory"] if found["theory"] else None
    return {**found, "steps": len(each)}


def show(schedule: str, microbatches: int, found: dict[str, Any]) -> None:
    theory = (
        "     -      -" if found["theory"] is None else f"{found['theory']:6.2%} {found['measured_over_theory']:6.3f}"
    )
    simulated = "  ".join(
        f"{name} {found[key]:6.2%} {found[f'measured_over_{key}']:6.3f}"
        for name, key in (("simulated", "simulated"), ("by stage", "simulated_by_stage"))
    )
    print(
        f"{schedule:12} m={microbatches}  {found['measured']:6.2%} [{found['spread'][0]:.2%}..{found['spread'][1]:.2%}]"
        f"  theory {theory}  {simulated}  forward {found['forward_s'] * 1e3:5.1f} ms  uneven {found['uneven']:.2%}"
        f"  start {found['start']:.2%}  {found['steps']} steps",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedules", nargs="*", choices=[[], *get_args(Schedule)])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    cases: list[Case] = [(s, m) for s in args.schedules or get_args(Schedule) for m in MICROBATCHES]
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
