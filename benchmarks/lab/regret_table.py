"""The table of `regret.py`: how much `--plan auto` loses on each pair, and how far predictions are off. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

AUTO = "auto"
HEAD = "| pair | fastest measured | s | auto | s | regret | predicted / measured |"

Row = Mapping[str, Any]


def measured(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """What was asked -> turn -> seconds of a step, of one pair."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if "step_s" in row:
            found.setdefault(row["asked"], {})[row["turn"]] = row["step_s"]
    return found


def typical(rows: Sequence[Row]) -> dict[str, float]:
    """What was asked -> the median over turns of a step's seconds."""
    return {asked: median(times.values()) for asked, times in measured(rows).items()}


def regret(rows: Sequence[Row]) -> float | None:
    """How many times as long as the fastest plan `auto` takes: median over turns, each against the same plan.

    None where either was not run. The fastest is of all that were run, `auto` included.
    """
    times = measured(rows)
    if AUTO not in times:
        return None
    fastest = min(typical(rows), key=typical(rows).__getitem__)
    if plan_of(rows, AUTO) == plan_of(rows, fastest):
        return 1.0
    both = times[AUTO].keys() & times[fastest].keys()
    return median(times[AUTO][turn] / times[fastest][turn] for turn in both) if both else None


def plan_of(rows: Sequence[Row], asked: str) -> str:
    """The plan in full that was run for what was asked."""
    return next((row["plan"] for row in rows if row["asked"] == asked and "step_s" in row), "")


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """What was asked -> predicted over measured."""
    predicted = {row["asked"]: row["predicted_s"] for row in rows if "step_s" in row}
    return {asked: predicted[asked] / taken for asked, taken in typical(rows).items()}


def table(rows: Sequence[Row]) -> str:
    """Markdown: a row for each pair, and what all of them come to."""
    lines = [HEAD, "|---|---|---:|---|---:|---:|---|"]
    regrets: list[float] = []
    off: list[float] = []
    for pair in dict.fromkeys(row["pair"] for row in rows):
        mine = [row for row in rows if row["pair"] == pair]
        if not (taken := typical(mine)):
            continue
        lost, found = regret(mine), ratios(mine)
        off += [abs(ratio - 1) for asked, ratio in found.items() if asked != AUTO]
        regrets += [] if lost is None else [lost]
        lines.append(_line(pair, mine, taken, lost, found))
    return "\n".join([*lines, "", *_summary(regrets, off)])


def _line(
    pair: str, rows: Sequence[Row], taken: Mapping[str, float], lost: float | None, found: Mapping[str, float]
) -> str:
    fastest = min(taken, key=taken.__getitem__)
    auto = f"{plan_of(rows, AUTO)} | {taken[AUTO]:.3f}" if AUTO in taken else "- | -"
    each = ", ".join(f"{asked} {ratio:.2f}" for asked, ratio in found.items() if asked != AUTO)
    shown = "-" if lost is None else f"{lost:.2f}"
    return f"| {pair} | {plan_of(rows, fastest)} | {taken[fastest]:.3f} | {auto} | {shown} | {each} |"


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
