"""The table of `regret.py`: how much `--plan auto` loses on each pair, and how far predictions are off. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

AUTO = "auto"
HEAD = "| pair | fastest measured | s | auto | s | regret | predicted / measured |"

Row = Mapping[str, Any]
Predicted = Mapping[str, Mapping[str, Any]]
"""By what was asked: plan and predicted_s; neither where it is refused."""


def typical(rows: Sequence[Row]) -> dict[str, float]:
    """Plan -> seconds of a step of one pair: each step's median over all runs of the plan, the mean of these.

    Steps differ in their samples, and what disturbs a machine comes and goes.
    """
    runs: dict[str, list[Sequence[float]]] = {}
    for row in rows:
        if "steps_s" in row and "taken" not in row:
            runs.setdefault(row["plan"], []).append(row["steps_s"])
    return {plan: fmean(median(step) for step in zip(*of_plan, strict=True)) for plan, of_plan in runs.items()}


def regret(auto: str, rows: Sequence[Row]) -> float | None:
    """How many times as long as the fastest plan that was run `auto` takes; None where `auto` was not run."""
    taken = typical(rows)
    return taken[auto] / min(taken.values()) if auto in taken else None


def ratios(predicted: Predicted, rows: Sequence[Row]) -> dict[str, float]:
    """What was asked -> predicted over measured, of what was run."""
    taken = typical(rows)
    return {
        asked: one["predicted_s"] / taken[one["plan"]]
        for asked, one in predicted.items()
        if asked != AUTO and one.get("plan") in taken
    }


def table(predicted: Mapping[str, Predicted], rows: Sequence[Row]) -> str:
    """Markdown: a row for each pair, and what all of them come to."""
    lines = [HEAD, "|---|---|---:|---|---:|---:|---|"]
    regrets: list[float] = []
    off: list[float] = []
    for pair, asked in predicted.items():
        mine = [row for row in rows if row["pair"] == pair]
        if not (taken := typical(mine)):
            continue
        auto = asked[AUTO].get("plan", "none")
        lost, found = regret(auto, mine), ratios(asked, mine)
        off += [abs(ratio - 1) for ratio in found.values()]
        regrets += [] if lost is None else [lost]
        lines.append(_line(pair, auto, taken, lost, found))
    return "\n".join([*lines, "", *_summary(regrets, off)])


def _line(pair: str, auto: str, taken: Mapping[str, float], lost: float | None, found: Mapping[str, float]) -> str:
    fastest = min(taken, key=taken.__getitem__)
    of_auto = f"{brief(auto)} | {taken[auto]:.3f}" if auto in taken else f"{brief(auto)} | -"
    each = ", ".join(f"{asked} {ratio:.2f}" for asked, ratio in found.items())
    shown = "-" if lost is None else f"{lost:.2f}"
    return f"| {pair} | {brief(fastest)} | {taken[fastest]:.3f} | {of_auto} | {shown} | {each} |"


def brief(plan: str) -> str:
    """A plan without what all of the table have."""
    return " ".join(word for word in plan.split() if word not in ("precision=float32", "exact=rounding", "shard=1"))


def _summary(regrets: Sequence[float], off: Sequence[float]) -> list[str]:
    if not regrets or not off:
        return []
    ordered = sorted(off)
    p90 = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return [
        f"{len(regrets)} pairs: auto takes {median(regrets):.2f} of the fastest in the median, "
        f"{max(regrets):.2f} at worst.",
        f"{len(off)} plans: predicted over measured is off by {median(off):.1%} in the median, {p90:.1%} at the 90th "
        "percentile.",
    ]
