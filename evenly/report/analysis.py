"""What a run's records say: where its time went, which steps were slow, who waited, whose memory grew. Pure.

Times of ranks are those of their own forwards and backwards (`busy_s` of a step's record), which are known on CPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from statistics import fmean, median
from typing import Any, Literal

from evenly.report.comm import time_in_words
from evenly.report.events import starts
from evenly.report.run import LONGEST_S, Row, RunSummary, amount, first_steps, is_count, usual_steps

SMOOTHED = 60  # a smoothed value is a mean over about so many of all steps
RECENT_STEPS = 20  # of which a speed is taken, while a run goes on
MOST_SLOW = 12
SLOWER, SPREADS = 1.5, 5.0  # of a slow step's time: times the median, and quartiles above it
SILENT_S, SILENT_STEPS = 60.0, 10.0  # a run that writes nothing for so long is silent; at least so many steps
GROWN = 0.01  # of a peak, that is worth saying


# --- the state of a run --------------------------------------------------------------------------------

State = Literal["running", "ended", "stopped", "failed", "silent", "not begun"]


def state_of(run: RunSummary, now_s: float) -> State:
    """How the run stands at `now_s` (of `time.time()`): "stopped" has ended before its last step."""
    last = next(
        (one.event for one in reversed(run.events) if one.rank == 0 and one.event not in ("evaluated", "saved")), None
    )
    done, steps = run.steps[-1]["step"] if run.steps else 0, run.plan.get("steps")
    if last == "failed":
        return "failed"
    if last == "ended":
        return "stopped" if is_count(steps) and done < steps else "ended"
    if last is None:
        return "not begun" if not run.steps else "ended" if done == steps else "silent"
    longest = max((row["step_s"] for row in run.steps[-RECENT_STEPS:]), default=0.0)
    return "running" if now_s - run.changed_s < max(SILENT_S, SILENT_STEPS * longest) else "silent"


@dataclass(frozen=True)
class Speed:
    """step_s: seconds of a step in the median; rates are of what that takes, and None where that is not recorded."""

    step_s: float
    samples_per_s: float
    tokens_per_s: float | None


def speed_of(run: RunSummary, *, recent: bool = False) -> Speed | None:
    """Of the usual steps, or the last of them; None without a step. Tokens where steps weigh more than samples."""
    rows = usual_steps(run)[-RECENT_STEPS if recent else 0 :] or run.steps
    if not rows:
        return None
    counts_tokens = all((amount(row.get("weight")) or 0) > (amount(row.get("samples")) or 0) for row in rows)
    tokens = [rate for row in rows if (rate := amount(row.get("tokens_per_s"))) is not None]
    return Speed(
        median(row["step_s"] for row in rows),
        median(row["samples_per_s"] for row in rows),
        median(tokens) if counts_tokens and tokens else None,
    )


def left_s(run: RunSummary) -> float | None:
    """Seconds that the steps to come will take at the pace of the last ones."""
    speed, steps = speed_of(run, recent=True), run.plan.get("steps")
    if speed is None or not is_count(steps):
        return None
    return max(0, steps - run.steps[-1]["step"]) * speed.step_s


def total_s(run: RunSummary) -> float:
    """Seconds from each start to its last word, with evaluations and checkpoints; those of steps, without events."""
    own = [one for one in run.events if one.rank == 0]
    begun = [number for number, one in enumerate(own) if one.event == "started"]
    spans = [own[at:end] for at, end in pairwise([*begun, len(own)])]
    of_steps = float(sum(row["step_s"] for row in run.steps))
    if not spans:
        return of_steps
    goes_on = spans[-1][-1].event not in ("ended", "failed")
    until = [max(one[-1].time_s, run.changed_s if goes_on and one is spans[-1] else 0.0) for one in spans]
    return max(of_steps, sum(end - one[0].time_s for one, end in zip(spans, until, strict=True)))


# --- curves --------------------------------------------------------------------------------------------


def smoothed(values: Sequence[Any]) -> list[float | None]:
    """Exponential means over about 1/60 of all values, each without the pull of the beginning; gaps stay."""
    keep = 1 - 1 / max(1.0, len(values) / SMOOTHED)
    total = weight = 0.0
    found: list[float | None] = []
    for value in values:
        if isinstance(value, int | float) and isfinite(value):
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
            found.append(total / weight)
        else:
            found.append(None)
    return found


def numbers_of(rows: Sequence[Row], key: str) -> list[float | None]:
    """The value of `key` in each row, None where it is no finite number."""
    found: list[float | None] = []
    for row in rows:
        value = row.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
            value = None
        found.append(None if value is None else float(value))
    return found


# --- steps ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlowStep:
    """A step that took long, and why as far as the record tells; rank: that was slow, None where it was none."""

    step: int
    step_s: float
    ratio: float
    rank: int | None
    why: str


@dataclass(frozen=True)
class StepTimes:
    """The usual steps' seconds: median, 5 and 95 of 100; and the slowest of the `outliers` that were far above."""

    median_s: float
    low_s: float
    high_s: float
    outliers: int
    slowest: Sequence[SlowStep]


def step_times(run: RunSummary) -> StepTimes | None:
    """None without a step."""
    usual = usual_steps(run) or run.steps
    if not usual:
        return None
    seconds = sorted(row["step_s"] for row in usual)
    middle, upper = median(seconds), seconds[int(0.75 * (len(seconds) - 1))]
    limit = max(SLOWER * middle, middle + SPREADS * (upper - middle))
    first, typical = first_steps(run), _typical(usual)
    slow = sorted((row for row in run.steps if row["step_s"] > limit), key=lambda row: -row["step_s"])
    found = [_slow_step(row, middle, first, typical) for row in slow[:MOST_SLOW]]
    low, high = (seconds[round(share * (len(seconds) - 1))] for share in (0.05, 0.95))
    return StepTimes(middle, low, high, len(slow), found)


def _typical(rows: Sequence[Row]) -> tuple[list[float], float]:
    """Of each rank the seconds that it computes in a step, in the median; and those that rank 0 waits."""
    busy = _busy_of(rows)
    waited = [seconds for row in rows if (seconds := amount(row.get("waited_s"))) is not None]
    return [median(of_rank) for of_rank in zip(*busy, strict=True)], median(waited) if waited else 0.0


def _busy_of(rows: Sequence[Row]) -> list[list[float]]:
    found = [busy for row in rows if (busy := busy_of(row))]
    return [busy for busy in found if len(busy) == len(found[-1])]


def busy_of(row: Row) -> list[float]:
    """Of each rank the seconds of its own forwards and backwards; empty where they are not recorded."""
    busy = row.get("busy_s")
    seconds = [amount(one) for one in busy] if isinstance(busy, list) else []
    known = [one for one in seconds if one is not None and one < LONGEST_S]
    return known if len(known) == len(seconds) else []


def _slow_step(row: Row, middle: float, first: set[int], typical: tuple[list[float], float]) -> SlowStep:
    rank, why = _why(row, middle, first, typical)
    return SlowStep(row["step"], row["step_s"], row["step_s"] / middle, rank, why)


def _why(row: Row, middle: float, first: set[int], typical: tuple[list[float], float]) -> tuple[int | None, str]:
    if row["step"] in first:
        return None, "the first after a start"
    if "memory" in row:
        return None, "the memory of tensors was counted"
    busy, (usual, usual_wait) = busy_of(row), typical
    if not busy or len(busy) != len(usual):
        return None, "not known: the times of ranks are not recorded"
    excess = row["step_s"] - middle
    longer = [now - before for now, before in zip(busy, usual, strict=True)]
    rank = longer.index(max(longer))
    others = longer[:rank] + longer[rank + 1 :]
    if max(longer) >= excess / 2 and (not others or median(others) < max(longer) / 2):
        than = f", {time_in_words(usual[rank])} in other steps"
        return rank, f"rank {rank} computed for {time_in_words(busy[rank])}{than}"
    if median(longer) >= excess / 2:
        return None, "all ranks computed for longer"
    if (amount(row.get("waited_s")) or 0.0) - usual_wait >= excess / 2:
        return None, "ranks waited for messages"
    return None, "ranks did not compute: samples, the update, or the machine"


# --- where time goes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shares:
    """Shares of the usual steps' time, 0 to 1, which add up to 1, in the mean of all ranks.

    computing: own forwards and backwards. waiting: for the rank that computes longest. communication: what else is
    waited for between ranks; in a pipeline also the bubble. rest: samples, the update, and what is in neither.
    """

    computing: float
    waiting: float
    communication: float
    rest: float


def shares_of(run: RunSummary) -> Shares | None:
    """None where the times of ranks are not recorded."""
    computing = waiting = communication = whole = 0.0
    for row in usual_steps(run):
        busy, waited_s = busy_of(row), amount(row.get("waited_s"))
        if not busy or waited_s is None:
            continue
        whole += row["step_s"]
        computing += min(fmean(busy), row["step_s"])
        waits = max(busy) - fmean(busy)
        waiting += min(waits, row["step_s"] - min(fmean(busy), row["step_s"]))
        communication += max(0.0, waited_s - (max(busy) - busy[0]))
    if not whole:
        return None
    room = max(0.0, whole - computing - waiting)
    communication = min(communication, room)
    return Shares(computing / whole, waiting / whole, communication / whole, (room - communication) / whole)


@dataclass(frozen=True)
class RankWaits:
    """How long `rank` computes in a step and waits for slower ranks, in the mean of usual steps, and for whom mostly.

    of_that: the share of its waiting that was for `rank_waited_for`.
    """

    rank: int
    busy_s: float
    waits_s: float
    waited_for: int | None
    of_that: float


def waits_of(run: RunSummary) -> list[RankWaits]:
    """Of every rank; in each step all others wait for the one that computes longest. Empty for one rank."""
    steps = _busy_of(usual_steps(run))
    if not steps or len(steps[0]) < 2:
        return []
    ranks = range(len(steps[0]))
    waits: list[dict[int, float]] = [{} for _ in ranks]
    for busy in steps:
        slowest = busy.index(max(busy))
        for rank in ranks:
            if rank != slowest:
                waits[rank][slowest] = waits[rank].get(slowest, 0.0) + busy[slowest] - busy[rank]
    return [_waits(rank, fmean(busy[rank] for busy in steps), waits[rank], len(steps)) for rank in ranks]


def _waits(rank: int, busy_s: float, waits: Mapping[int, float], steps: int) -> RankWaits:
    total = sum(waits.values())
    most = max(waits, key=lambda other: waits[other]) if total else None
    return RankWaits(rank, busy_s, total / steps, most, waits[most] / total if most is not None else 0.0)


# --- communication -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AxisSeconds:
    """Seconds of a step in which something was under way along an axis, and those in which ranks waited for it, in the
    mean of all ranks and of the steps in which that was recorded.
    """

    axis: str
    under_way_s: float
    waited_s: float

    @property
    def hidden(self) -> float:
        return 1 - self.waited_s / self.under_way_s if self.under_way_s else 0.0


def communication_of(run: RunSummary) -> list[AxisSeconds]:
    """By axis; empty where it is not recorded."""
    found: dict[str, list[tuple[float, float]]] = {}
    rows = [row["communication"] for row in run.steps if isinstance(row.get("communication"), dict)]
    for axis, of_axis in [one for row in rows for one in row.items()]:
        seconds = [amount(of_axis.get(key)) for key in ("under_way_s", "waited_s")] if isinstance(of_axis, dict) else []
        known = [min(one, LONGEST_S) for one in seconds if one is not None]
        if len(known) == 2:
            found.setdefault(str(axis), []).append((known[0], min(known)))
    return [
        AxisSeconds(axis, sum(one for one, _ in of_axis) / len(rows), sum(one for _, one in of_axis) / len(rows))
        for axis, of_axis in found.items()
    ]


def hidden_of(found: Sequence[AxisSeconds]) -> float | None:
    """The share of all communication that nobody waits for; None where nothing is under way."""
    whole = sum(one.under_way_s for one in found)
    return 1 - sum(one.waited_s for one in found) / whole if whole else None


COMMUNICATION_HEADS = ("axis", "under way between ranks", "waited for", "hidden")


def communication_rows(run: RunSummary) -> list[tuple[str, ...]]:
    return [
        (one.axis, time_in_words(one.under_way_s), time_in_words(one.waited_s), f"{one.hidden:.0%}")
        for one in communication_of(run)
    ]


# --- memory --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Growth:
    """The peak of a device at the end, and by how much it rose in the second half of the steps since the last start."""

    device: int
    peak_bytes: int
    rose_bytes: int


def growth_of(run: RunSummary) -> list[Growth]:
    rows = since_last_start(run)
    if not rows:
        return []
    last, half = rows[-1]["memory_bytes"], rows[len(rows) // 2]["memory_bytes"]
    before = half if len(half) == len(last) else last
    return [Growth(at, now, max(0, now - then)) for at, (now, then) in enumerate(zip(last, before, strict=True))]


def since_last_start(run: RunSummary) -> Sequence[Row]:
    begun = [one.step for one in starts(run.events)]
    rows = [row for row in run.steps if not begun or row["step"] > begun[-1]]
    return rows or run.steps


def grows(one: Growth) -> bool:
    return one.rose_bytes > GROWN * one.peak_bytes


def peak_bytes(run: RunSummary) -> int | None:
    return max((max(row["memory_bytes"]) for row in run.steps), default=None)
