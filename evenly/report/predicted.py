"""What was predicted of a run's plan next to what was measured: memory of every device by category, and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeGuard, cast

from evenly.report.comm import size_in_words, time_in_words
from evenly.report.draw import StackedBar, stacked
from evenly.report.page import Section, as_table, table, text
from evenly.report.run import RunSummary, amount, usual_steps

# A column of the table -> what is predicted of it, and what of the counted tensors is compared with that. Whole
# parameters that zero=3 gathers are counted as parameters, and the wider sums of gradients with these.
COLUMNS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "parameters, gathered": (("parameters", "gathered"), ("parameters",)),
    "gradients": (("gradients",), ("gradients", "sums")),
    "optimizer": (("optimizer",), ("optimizer",)),
    "activations": (("activations",), ("activations",)),
    "temporaries, buffers": (("temporaries", "buffers"), ("temporaries",)),
}
MEMORY_TITLE = "tensors at the peak, MiB: predicted and measured"
MEMORY_HEADS = ("device", "", *COLUMNS, "all")
STEP_TITLE = "a step: predicted and measured"
STEP_HEADS = ("", "predicted", "measured", "measured / predicted")


@dataclass(frozen=True)
class Predicted:
    """What plan.json has under `predicted`.

    memory: bytes by category, and their sum as `peak`, of every rank of the pipeline axis, from the first.
    time_s: seconds of a step by what takes them.
    """

    step_s: float
    samples_per_s: float
    memory: Sequence[Mapping[str, float]]
    time_s: Mapping[str, float]


def predicted_of(run: RunSummary) -> Predicted | None:
    """What was predicted of the run's plan; None where nothing was, or it has another form."""
    found = run.plan.get("predicted")
    fields = cast("Mapping[str, Any]", found) if isinstance(found, dict) else {}
    step_s, samples_per_s = fields.get("step_s"), fields.get("samples_per_s")
    memory, time_s = fields.get("memory_bytes"), fields.get("time_s")
    if not (_is_amount(step_s) and _is_amount(samples_per_s) and _are_amounts(time_s)):
        return None
    if not (isinstance(memory, list) and memory and all(map(_are_amounts, cast("list[Any]", memory)))):
        return None
    return Predicted(step_s, samples_per_s, cast("list[dict[str, float]]", memory), time_s)


def _is_amount(value: Any) -> TypeGuard[float]:
    return amount(value) is not None


def _are_amounts(value: Any) -> TypeGuard[dict[str, float]]:
    return isinstance(value, dict) and all(map(_is_amount, cast("dict[str, Any]", value).values()))


def step_rows(run: RunSummary, predicted: Predicted) -> list[tuple[str, ...]]:
    """Time of a step and memory of the fullest device, each next to what was measured; causes of the time below it."""
    # The memory of a rank is measured without what its device's driver takes.
    peak = max(rank.get("peak", 0) - rank.get("context", 0) for rank in predicted.memory) / 2**20
    step_s = samples_per_s = measured = None
    if run.steps:
        usual = usual_steps(run) or run.steps
        step_s, samples_per_s = (median(row[name] for row in usual) for name in ("step_s", "samples_per_s"))
        measured = max(max(row["memory_bytes"]) for row in run.steps) / 2**20
    causes = sorted(predicted.time_s.items(), key=lambda cause: -cause[1])
    return [
        ("seconds per step", *_compared(predicted.step_s, step_s, ".4g")),
        *((f"  {cause}", f"{seconds:.4g}", "", "") for cause, seconds in causes if seconds),
        ("samples per second", *_compared(predicted.samples_per_s, samples_per_s, ",.1f")),
        ("largest peak of a rank, MiB", *_compared(peak, measured, ",.0f")),
    ]


def _compared(predicted: float, measured: float | None, form: str) -> tuple[str, str, str]:
    if measured is None:
        return f"{predicted:{form}}", "", ""
    return f"{predicted:{form}}", f"{measured:{form}}", f"{measured / predicted:.3f}" if predicted else ""


def memory_rows(run: RunSummary, predicted: Predicted) -> list[tuple[str, ...]]:
    """For every device two rows, MiB by column of what was predicted of it and of what its tensors took."""
    rows: list[tuple[str, ...]] = []
    for number, device in enumerate(run.memory):
        of_rank = _of_device(run, predicted, number)
        rows.append((str(number), "predicted", *_sums(of_rank, [names for names, _ in COLUMNS.values()])))
        rows.append(("", "measured", *_sums(device, [names for _, names in COLUMNS.values()])))
    return rows


def _sums(amounts: Mapping[str, float], columns: Sequence[tuple[str, ...]]) -> list[str]:
    sums = [sum(amounts.get(name, 0) for name in names) / 2**20 for names in columns]
    return [f"{size:,.2f}" for size in (*sums, sum(sums))]


def section(run: RunSummary, predicted: Predicted) -> Section:
    """Both tables, with bars of the time and of each device's memory."""
    times = [StackedBar("predicted", predicted.time_s)]
    if run.steps:
        times.append(
            StackedBar("measured", {"measured": median(row["step_s"] for row in usual_steps(run) or run.steps)})
        )
    parts = [stacked(times, time_in_words, title="seconds of a step"), table(STEP_HEADS, step_rows(run, predicted))]
    if run.memory:
        parts += [
            text(f"{MEMORY_TITLE.capitalize()}."),
            stacked(_memory_bars(run, predicted), size_in_words, title="memory of a device"),
            as_table(MEMORY_HEADS, memory_rows(run, predicted)),
        ]
    return Section("Predicted and measured", parts)


def _memory_bars(run: RunSummary, predicted: Predicted) -> list[StackedBar]:
    bars: list[StackedBar] = []
    for number, device in enumerate(run.memory[:16]):
        for what, amounts, place in (("predicted", _of_device(run, predicted, number), 0), ("measured", device, 1)):
            parts = {name: float(sum(amounts.get(one, 0) for one in both[place])) for name, both in COLUMNS.items()}
            bars.append(StackedBar(f"device {number}, {what}", parts))
    return bars


def _of_device(run: RunSummary, predicted: Predicted, number: int) -> Mapping[str, float]:
    return predicted.memory[number * len(predicted.memory) // len(run.memory)]
