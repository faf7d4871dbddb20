"""Predictions of plans as the rows of a table, as sentences and as one JSON document. Pure.

What is drawn of them is in `planpage.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from evenly.plan import Plan
from evenly.plan.plan import in_words
from evenly.planner.prediction import MemoryByCause, Prediction, TimeByCause
from evenly.report.comm import size_in_words, time_in_words

# Causes that follow from the model and the device, which no advice asks to reduce.
GIVEN = ("matmul", "attention")
# Printed once above the table where all plans have it in common.
COMMON = ("precision", "exact", "compile", "offload")
LEAST_SHARE = 0.005  # of a whole, for a part of it to be named
MOST_LESS = 0.75  # of a cause, for it to be worth saying that so much less of it would change the order


# --- numbers in words ----------------------------------------------------------------------------------


def by_cause(parts: MemoryByCause | TimeByCause) -> dict[str, float]:
    """Cause -> how much of it, largest first."""
    return dict(sorted(asdict(parts).items(), key=lambda cause: -cause[1]))


def _main_causes(amounts: Mapping[str, float], most: int | None = None) -> list[str]:
    whole = sum(amounts.values())
    return [cause for cause, amount in amounts.items() if amount >= LEAST_SHARE * whole and amount > 0][:most]


def rate_per_device(one: Prediction) -> float:
    """Tokens per second of a device; samples where these are no sequences."""
    return (one.tokens or one.samples) / one.step_s / one.plan.devices


# --- the table -----------------------------------------------------------------------------------------


def common(plans: Sequence[Prediction]) -> dict[str, Any]:
    words = [one.plan.words for one in plans] or [{}]
    return {key: value for key in COMMON if (value := words[0].get(key)) and all(w.get(key) == value for w in words)}


def short(plan: Plan, common_words: Mapping[str, Any]) -> str:
    """The plan's text without where it is cut and without the `common_words` printed elsewhere."""
    return " ".join(
        f"{key}={in_words(value)}" for key, value in plan.words.items() if key not in {*common_words, "split_points"}
    )


def title(model: str, devices: str, plans: Sequence[Prediction], *, assumed: bool) -> str:
    """What is asked, and what all plans have in common; `assumed`: no batch was stated."""
    one = plans[0]
    batch = f"{one.samples:,} sample{'s' * (one.samples != 1)}" + (f" ({one.tokens:,} tokens)" if one.tokens else "")
    common_words = "".join(f", {key}={value}" for key, value in common(plans).items())
    return (
        f"{model} on {devices}, {size_in_words(one.limit_bytes)} per device{common_words};\n"
        f"a step of {batch}{', assumed: --global-batch sets it' if assumed else ''}"
    )


def heads(plans: Sequence[Prediction]) -> tuple[str, ...]:
    """The columns' heads. `rank` is the one of the pipeline axis that needs most memory, `full` of what a device
    has.
    """
    rate = "tokens" if plans[0].tokens else "samples"
    return ("#", "plan", "peak", "full", "rank", "step", f"{rate}/s\n/device", "MFU", "bubble", "most of it")


def plan_rows(plans: Sequence[Prediction]) -> list[tuple[str, ...]]:
    """A row per plan, in the order of `heads`."""
    common_words = common(plans)
    return [
        (
            str(number),
            short(one.plan, common_words),
            size_in_words(one.peak_bytes),
            _full(one),
            worst_rank(one),
            time_in_words(one.step_s),
            f"{rate:,.0f}" if (rate := rate_per_device(one)) >= 100 else f"{rate:.3g}",
            f"{one.mfu:.1%}",
            f"{one.bubble:.1%}",
            _largest(one.time),
        )
        for number, one in enumerate(plans, 1)
    ]


def _full(one: Prediction) -> str:
    """The share of the memory that it takes, with a word where that leaves less than the reserve."""
    return f"{one.peak_bytes / one.limit_bytes:.0%}" + ("\nfuller" if is_fuller(one) else "")


def is_fuller(one: Prediction) -> bool:
    return one.fits and not one.leaves_reserve


def worst_rank(one: Prediction) -> str:
    """The rank whose memory is meant; where there are several of them that hold the same, all."""
    return "all" if len({rank.peak for rank in one.memory}) == 1 else str(one.worst)


def _largest(time: TimeByCause) -> str:
    amounts = by_cause(time)
    return "\n".join(f"{cause} {amounts[cause] / time.step_s:.0%}" for cause in _main_causes(amounts, 2))


# --- why -----------------------------------------------------------------------------------------------


def reasons(plans: Sequence[Prediction]) -> list[str]:
    """Where the first plan's time and memory go, and of every other one which terms it loses by."""
    others = (f"{number}. {against(plans[0], one)}" for number, one in enumerate(plans[1:], 2))
    found = [*_of_the_best(plans[0]), *others]
    fuller = [str(number) for number, one in enumerate(plans, 1) if is_fuller(one)]
    if not fuller:
        return found
    return [*found, _of_the_fuller(plans[0], fuller)]


def _of_the_fuller(one: Prediction, numbers: Sequence[str]) -> str:
    """Which plans leave less than the reserve; `one`: the first of all."""
    share = f"{one.reserve_bytes / one.limit_bytes:.0%}"
    if is_fuller(one):
        return f"fuller: no plan was found that leaves {share} of the memory (--reserve)"
    which = f"plan {numbers[0]} would be faster, but leaves" if len(numbers) == 1 else ""
    which = which or f"plans {', '.join(numbers)} would be faster, but leave"
    return f"fuller: {which} less than {share} of the memory (--reserve)"


def time_in_causes(one: Prediction) -> str:
    time = by_cause(one.time)
    return f"time: {', '.join(f'{cause} {time_in_words(time[cause])}' for cause in _main_causes(time))}"


def _of_the_best(best: Prediction) -> list[str]:
    memory = by_cause(best.memory[best.worst])
    where = "every rank" if worst_rank(best) == "all" else f"rank {best.worst} of the pipeline"
    return [
        f"1. {time_in_causes(best)}",
        f"   memory of {where}: {', '.join(f'{name} {size_in_words(memory[name])}' for name in _main_causes(memory))}",
        f"   in full: {best.plan}",
    ]


def against(best: Prediction, other: Prediction) -> str:
    """How another plan compares with the first, and what would have to change for it to win."""
    more = other.step_s - best.step_s
    lost = differences(best, other)
    words = [f"{cause} {'+' if seconds > 0 else '-'}{time_in_words(abs(seconds))}" for cause, seconds in lost.items()]
    line = f"{_compared(best, other)}{': ' * bool(words)}{', '.join(words[:4])}"
    return line + (_to_win(lost, other, more) if more > 0 else "")


def differences(best: Prediction, other: Prediction) -> dict[str, float]:
    """Cause -> by how many seconds of a step `other` needs more, the largest differences first, small ones left out."""
    ours, theirs = asdict(best.time), asdict(other.time)
    found = {cause: theirs[cause] - ours[cause] for cause in ours}
    return {
        cause: seconds
        for cause, seconds in sorted(found.items(), key=lambda one: -abs(one[1]))
        if abs(seconds) >= LEAST_SHARE * best.step_s
    }


def _compared(best: Prediction, other: Prediction) -> str:
    share, room = other.step_s / best.step_s - 1, other.peak_bytes - best.peak_bytes
    if abs(share) < 0.0005:
        same = abs(room) < 0.0005 * best.peak_bytes
        return (
            "as fast" if same else f"as fast, with {size_in_words(abs(room))} {'more' if room > 0 else 'less'} memory"
        )
    return f"{abs(share):.1%} {'slower' if share > 0 else 'faster'}"


def _to_win(lost: Mapping[str, float], other: Prediction, more: float) -> str:
    """The term by which `other` loses most and that alone could make it win, and how much less it would have to be."""
    for cause, seconds in lost.items():
        total = getattr(other.time, cause)
        if seconds > 0 and more <= MOST_LESS * total and cause not in GIVEN:
            return f"; would win with {more / total:.0%} less time of {cause}"
    return ""


# --- where nothing fits --------------------------------------------------------------------------------


def shortage(nearest: Prediction) -> str:
    """What a plan that does not fit needs more than there is, and what takes it."""
    amounts = by_cause(nearest.memory[nearest.worst])
    where = "a rank" if worst_rank(nearest) == "all" else f"rank {nearest.worst} of its pipeline"
    causes = ", ".join(f"{cause} {size_in_words(amounts[cause])}" for cause in _main_causes(amounts, 4))
    return (
        f"nearest is {short(nearest.plan, common([nearest]))}: {where} needs {size_in_words(nearest.peak_bytes)} of "
        f"{size_in_words(nearest.limit_bytes)} ({causes})"
    )


# --- JSON ----------------------------------------------------------------------------------------------


def document(
    model: str,
    cluster: str,
    plans: Sequence[Prediction],
    *,
    fuller: Sequence[Prediction] = (),
    assumed: bool = False,
    change: str = "",
) -> dict[str, Any]:
    """The answer as `evenly plan --json` prints it: sizes in bytes, times in seconds, shares 0 to 1, best first.

    fuller: faster plans that do not leave the reserve.
    change: the smallest one with which a plan would fit, where none does.
    """
    return {
        "model": model,
        "cluster": cluster,
        "assumed": ["global_batch"] if assumed else [],
        "plans": [prediction_as_json(one) for one in plans],
        **({"fuller": [prediction_as_json(one) for one in fuller]} if fuller else {}),
        **({"change": change} if change else {}),
    }


def prediction_as_json(one: Prediction) -> dict[str, Any]:
    worst = one.memory[one.worst]
    return {
        "plan": str(one.plan),
        "devices": one.plan.devices,
        "fits": one.fits,
        "leaves_reserve": one.leaves_reserve,
        "memory_bytes": _memory_as_json(worst),
        "limit_bytes": one.limit_bytes,
        "reserve_bytes": one.reserve_bytes,
        "worst_rank": one.worst,
        "ranks": [_memory_as_json(rank) for rank in one.memory],
        "global_batch": one.samples,
        "step_s": one.step_s,
        "time_s": asdict(one.time),
        "samples_per_s": one.samples_per_s,
        "tokens_per_s_per_device": rate_per_device(one) if one.tokens else None,
        "mfu": one.mfu,
        "bubble": one.bubble,
        "comm_bytes": one.comm_bytes,
        "why": one.why,
    }


def _memory_as_json(memory: MemoryByCause) -> dict[str, float]:
    return {**asdict(memory), "peak": memory.peak}
