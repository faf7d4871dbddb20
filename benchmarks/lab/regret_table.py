"""The table of `regret.py`: how much `--plan auto` loses on each pair, and how far predictions are off. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

AUTO = "auto"
HEAD = "| pair | fastest measured | s | auto | s | regret | predicted / measured |"

Row = Mapping[str, Any]
Predicted = Mapping[str, Mapping[str, Any]]
"""By what was asked: plan and predicted_s; neither where it is refused."""


def measured(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Plan -> turn -> seconds of a step (the fewest, where a turn has it twice), of one pair."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if "step_s" in row and "taken" not in row:
            times = found.setdefault(row["plan"], {})
            times[row["turn"]] = min(row["step_s"], times.get(row["turn"], row["step_s"]))
    return found


def typical(rows: Sequence[Row]) -> dict[str, float]:
    """Plan -> the median over turns of a step's seconds."""
    return {plan: median(times.values()) for plan, times in measured(rows).items()}


def regret(auto: str, rows: Sequence[Row]) -> float | None:
    """How many times as long as the fastest plan `auto` takes: median over turns, each against the same plan.

    The fastest is of all that were run. None where `auto` was not run, or never in a turn with it.
    """
    times = measured(rows)
    if auto not in times:
        return None
    fastest = min(typical(rows), key=typical(rows).__getitem__)
    both = times[auto].keys() & times[fastest].keys()
    return median(times[auto][turn] / times[fastest][turn] for turn in both) if both else None


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
