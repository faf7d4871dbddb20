"""What a run's folder records: losses and times by step, and where the memory of every device went."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from evenly.errors import UserError
from evenly.observe.attempts import ended_attempts
from evenly.observe.run_folder import RunFolder, whole_number
from evenly.report.comm import size_in_words
from evenly.report.page import document, heading, table
from evenly.report.pictures import StackedBar, curves, stacked

Row = Mapping[str, Any]

CATEGORIES = ("parameters", "gradients", "sums", "optimizer", "activations", "temporaries")
MEMORY_HEADS = ("device", *CATEGORIES, "all, MiB", "of the mean")


@dataclass(frozen=True)
class RunSummary:
    """A run as its folder records it.

    plan:   what is in plan.json.
    steps:  a record per step, without those that a resumed run did again.
    evaluations: records with an evaluation loss, of each evaluation set in turn.
    memory: bytes by category of each device, rank by rank, at its peak; empty where they were not
            counted.
    slow:   ranks whose own computing was steadily slower than that of the others, in words.
    no_room: plans that had no room, or could not run the job in their place, in words.
    """

    plan: Row
    steps: Sequence[Row]
    evaluations: Sequence[Row]
    memory: Sequence[Mapping[str, int]]
    slow: Sequence[str] = ()
    no_room: Sequence[str] = ()


def read_run(folder: Path) -> RunSummary:
    """The run in `folder`; raises `UserError` where there is none, or its files are not a run's."""
    try:
        plan = _object(RunFolder(folder).plan.read_text(encoding="utf-8"))
        lines = RunFolder(folder).metrics.read_text(encoding="utf-8").splitlines()
        records = [_object(line) for line in lines if line.endswith("}")]  # the last may be half written
        steps = {record["step"]: record for record in records if _is_step(record)}
        evaluations = {_set_and_step(record): record for record in records if _is_number(record.get("eval_loss", ""))}
    except FileNotFoundError as problem:
        missing = Path(problem.filename).name
        raise UserError(
            f"report on {folder}", f"it has no {missing}", "name the folder of a run: runs/NAME-N"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise UserError(f"report on {folder}", f"its files are not a run's: {problem}", "name another folder") from None
    counted = [record["memory"] for record in records if _is_memory(record.get("memory"))]
    slow = [
        f"rank {record['slow_rank']}: {record['ratio']:.1f} x as long as the others, since step {record.get('step')} "
        f"({record.get('processor')})"
        for record in records
        if isinstance(record.get("slow_rank"), int) and isinstance(record.get("ratio"), float)
    ]
    sets = [*dict.fromkeys(name for name, _ in evaluations)]
    by_set = sorted(evaluations.items(), key=lambda one: sets.index(one[0][0]))
    return RunSummary(
        plan,
        [*steps.values()],
        [record for _, record in by_set],
        counted[-1] if counted else [],
        slow,
        _no_room(folder),
    )


def _no_room(folder: Path) -> list[str]:
    found: list[str] = []
    for one in ended_attempts(RunFolder(folder)):
        where = "" if one.rank is None else f"rank {one.rank}"
        where += "" if one.step is None else f" at step {one.step}"
        then = "the beginning" if one.from_step is None else f"step {one.from_step}"
        found.append(f"{one.plan}: {where or 'a rank'}: {one.found}; went on from {then}")
    return found


def _set_and_step(record: Row) -> tuple[str, Any]:
    return str(record.get("eval_set", "")), record["step"]


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text, parse_int=whole_number)
    if not isinstance(value, dict):
        raise ValueError(f"{text[:40]!r} is no JSON object")
    return value  # pyright: ignore[reportUnknownVariableType]


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float)  # null is a number that is not finite


def _is_step(record: Row) -> bool:
    memory = record.get("memory_bytes")
    return (
        all(_is_number(record.get(name, "")) for name in ("step", "loss"))
        and all(isinstance(record.get(name), float) for name in ("step_s", "samples_per_s"))
        and isinstance(memory, list)
        and len(memory) > 0  # pyright: ignore[reportUnknownArgumentType]
        and all(isinstance(size, int) for size in memory)  # pyright: ignore[reportUnknownVariableType]
    )


def _is_memory(value: Any) -> bool:
    return isinstance(value, list) and all(  # pyright: ignore[reportUnknownVariableType]
        isinstance(device, dict) and all(isinstance(size, int) for size in device.values())  # pyright: ignore[reportUnknownVariableType]
        for device in value  # pyright: ignore[reportUnknownVariableType]
    )


def course_rows(run: RunSummary) -> list[tuple[str, str]]:
    """What was run, and what came of it."""
    plan, steps = run.plan, run.steps
    rows = [
        ("job", str(plan.get("job"))),
        ("plan", str(plan.get("plan"))),
        ("ranks", str(plan.get("world"))),
        ("parameters", f"{count:,}" if isinstance(count := plan.get("parameters"), int) else str(count)),
        ("steps", f"{steps[-1]['step'] if steps else 0} of {plan.get('steps')}"),
    ]
    if steps:
        rows += [
            ("loss", _first_to_last([row["loss"] for row in steps])),
            ("seconds per step", f"{median(row['step_s'] for row in steps):.4g} (median)"),
            ("samples per second", f"{median(row['samples_per_s'] for row in steps):,.0f} (median)"),
            ("memory per rank", f"{max(max(row['memory_bytes']) for row in steps) / 2**20:,.0f} MiB (largest peak)"),
        ]
        rows += _metric_rows("", steps, "metrics")
    for name, records in _by_set(run).items():
        what = f"evaluation of {name}, " if name else "evaluation "
        averaged = " (averaged weights)" if records[-1].get("eval_averaged") is True else ""
        rows.append((f"{what}loss{averaged}", _first_to_last([row["eval_loss"] for row in records])))
        rows += _metric_rows(what, records, "eval_metrics")
    if run.memory:
        rows.append(("tensors at the peak", memory_in_a_line(run.memory)))
    rows += [("slow rank", text) for text in run.slow]
    rows += [("no room", text) for text in run.no_room]
    left_out = sum(row.get("skipped") == "not finite" for row in steps)
    if skipped := sum(bool(row.get("skipped")) for row in steps) - left_out:
        rows.append(("skipped steps", f"{skipped} (float16 overflowed)"))
    if left_out:
        rows.append(("batches left out", f"{left_out} (not finite)"))
    return rows


def _by_set(run: RunSummary) -> dict[str, list[Row]]:
    """The evaluations of each set by its name, '' for that of a job with one."""
    found: dict[str, list[Row]] = {}
    for record in run.evaluations:
        found.setdefault(str(record.get("eval_set", "")), []).append(record)
    return found


def _metric_rows(what: str, records: Sequence[Row], key: str) -> list[tuple[str, str]]:
    """A row for each metric in the records."""
    return [(f"{what}{name}", _first_to_last(values)) for name, (_, values) in _metrics(records, key).items()]


def _metrics(records: Sequence[Row], key: str) -> dict[str, tuple[list[Any], list[Any]]]:
    """The metrics of records by name, in each the steps and the values."""
    found: dict[str, tuple[list[Any], list[Any]]] = {}
    for record in records:
        metrics = record.get(key)
        for name, value in metrics.items() if isinstance(metrics, dict) else ():
            if _is_number(value):
                steps, values = found.setdefault(str(name), ([], []))
                steps.append(record["step"])
                values.append(value)
    return found


def _first_to_last(values: Sequence[float | None]) -> str:
    return f"{_number(values[0])} -> {_number(values[-1])}"


def memory_rows(memory: Sequence[Mapping[str, int]]) -> list[tuple[str, ...]]:
    """Per device: MiB of each category, their sum, and the sum over the mean of all."""
    totals = [sum(device.values()) for device in memory]
    mean = sum(totals) / len(totals) if any(totals) else 1.0
    return [
        (
            str(number),
            *(_mib_of_column(device.get(category, 0)) for category in CATEGORIES),
            _mib_of_column(total),
            f"{total / mean:.3f}",
        )
        for number, (device, total) in enumerate(zip(memory, totals, strict=True))
    ]


def memory_in_a_line(memory: Sequence[Mapping[str, int]]) -> str:
    """Peak memory of tensors on the fullest device, by category."""
    totals = [sum(device.values()) for device in memory]
    fullest = totals.index(max(totals))
    parts = sorted(memory[fullest].items(), key=lambda item: -item[1])
    text = " + ".join(f"{category} {_mib(size)}" for category, size in parts if size)
    where = "" if len(memory) == 1 else f" on device {fullest}, {imbalance(memory):.2f} x the mean"
    return f"{text} = {_mib(totals[fullest])} MiB{where}"


def _mib(count_bytes: int) -> str:
    mib = count_bytes / 2**20
    return f"{mib:,.0f}" if mib >= 100 else f"{mib:.2g}"


def imbalance(memory: Sequence[Mapping[str, int]]) -> float:
    """Bytes of the fullest device over the mean."""
    totals = [sum(device.values()) for device in memory]
    return max(totals) * len(totals) / sum(totals) if sum(totals) else 1.0


def _mib_of_column(count_bytes: int) -> str:
    mib = count_bytes / 2**20
    return f"{mib:,.0f}" if mib >= 1000 else f"{mib:.2f}"


def balance(memory: Sequence[Mapping[str, int]]) -> str:
    """How evenly memory is shared, in words."""
    return f"largest / mean {imbalance(memory):.3f}"


def page(run: RunSummary, *sections: Any) -> str:
    """One self-contained HTML file: losses and times as curves, the memory of every device, and further `sections`."""
    parts: list[Any] = [table((), course_rows(run))]
    if run.steps:
        seconds = curves(
            {"seconds": ([r["step"] for r in run.steps], [r["step_s"] for r in run.steps])}, x="step", mode="markers"
        )
        seconds.update_yaxes(rangemode="tozero")
        parts += [heading("Loss"), _losses(run)]
        for name, lines in _metric_curves(run).items():
            parts += [heading(name), curves(lines, x="step")]
        parts += [heading("Seconds per step"), seconds]
    if run.memory:
        bars = [StackedBar(f"device {number}", device) for number, device in enumerate(run.memory)]
        parts += [heading(f"What tensors take at the peak of each device: {balance(run.memory)}")]
        parts += [stacked(bars, size_in_words), table(MEMORY_HEADS, memory_rows(run.memory))]
    return document(f"{run.plan.get('job')}, {run.plan.get('plan')}", *parts, *sections)


def _losses(run: RunSummary) -> Any:
    lines = {"training": ([r["step"] for r in run.steps], [r["loss"] for r in run.steps])}
    for name, records in _by_set(run).items():
        lines[name or "evaluation"] = [r["step"] for r in records], [r["eval_loss"] for r in records]
    return curves(lines, x="step")


def _metric_curves(run: RunSummary) -> dict[str, dict[str, tuple[list[Any], list[Any]]]]:
    """By the name of a metric, its lines: of training and of each evaluation set."""
    found: dict[str, dict[str, tuple[list[Any], list[Any]]]] = {}
    for metric, line in _metrics(run.steps, "metrics").items():
        found.setdefault(metric, {})["training"] = line
    for name, records in _by_set(run).items():
        for metric, line in _metrics(records, "eval_metrics").items():
            found.setdefault(metric, {})[name or "evaluation"] = line
    return found


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
