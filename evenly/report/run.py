"""What a run's folder records: losses and times by step, and where the memory of every device went."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, TypeGuard

from evenly.errors import UserError
from evenly.observe.attempts import ended_attempts
from evenly.observe.run_folder import LONGEST_NUMBER, RunFolder, whole_number
from evenly.report.events import EventReader, RankEvent, starts
from evenly.report.growing import GrowingFile

Row = Mapping[str, Any]

CATEGORIES = ("parameters", "gradients", "sums", "optimizer", "activations", "temporaries")
LONGEST_S = 1e9  # no step takes longer
NEWEST = 40  # steps, where only these are asked for
MEMORY_HEADS = ("device", *CATEGORIES, "all, MiB", "of the mean")


@dataclass(frozen=True)
class RunSummary:
    """A run as its folder records it.

    plan:   what is in plan.json.
    steps:  a record per step, rising, without those that a resumed run did again.
    evaluations: records with an evaluation loss, of each evaluation set in turn.
    memory: bytes by category of each device, rank by rank, at its peak; empty where they were not
            counted.
    slow:   ranks whose own computing was steadily slower than that of the others, in words.
    no_room: plans that had no room, or could not run the job in their place, in words.
    events: starts, ends and failures of the ranks, by time.
    logged: records of what the job logged by `run.log`, with the number of steps done.
    changed_s: when metrics.jsonl was last written, as of `time.time()`.
    """

    plan: Row
    steps: Sequence[Row]
    evaluations: Sequence[Row]
    memory: Sequence[Mapping[str, int]]
    slow: Sequence[str] = ()
    no_room: Sequence[str] = ()
    events: Sequence[RankEvent] = ()
    changed_s: float = 0.0
    logged: Sequence[Row] = ()


def first_steps(run: RunSummary) -> set[int]:
    """The first steps after each start: torch allocates, compiles and finds out shapes in them."""
    return {1} | {one.step + 1 for one in starts(run.events)}


def usual_steps(run: RunSummary) -> list[Row]:
    """Without the first of each start, and those in which tensors were counted."""
    first = first_steps(run)
    return [row for row in run.steps if row["step"] not in first and "memory" not in row]


def read_run(folder: Path) -> RunSummary:
    """The run in `folder`; raises `UserError` where there is none, or its files are not a run's."""
    return RunReader(folder).read()


class RunReader:
    """Reads the run in `folder`, again and again while it is written, no line of it twice."""

    def __init__(self, folder: Path, *, tail_bytes: int | None = None) -> None:
        """tail_bytes: where only the newest steps are asked for, how much of metrics.jsonl is read at first."""
        self.folder = folder
        self._metrics = GrowingFile(RunFolder(folder).metrics, tail_bytes=tail_bytes)
        self._events, self._only_tail = EventReader(folder), tail_bytes is not None
        self._found = _Records()

    def read(self) -> RunSummary:
        """The run as it is; raises `UserError` as `read_run`."""
        asked = f"report on {self.folder}"
        try:
            plan = _object(RunFolder(self.folder).plan.read_text(encoding="utf-8"))
            changed_s = RunFolder(self.folder).metrics.stat().st_mtime
            lines = self._metrics.lines()
            if self._metrics.begun_again:
                self._found = _Records()
            for line in lines:
                if line.endswith("}"):
                    self._found.add(_object(line, _logged_number))
        except FileNotFoundError as problem:
            missing = Path(problem.filename).name
            raise UserError(asked, f"it has no {missing}", "name the folder of a run: runs/NAME-N") from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
            raise UserError(asked, f"its files are not a run's: {problem}", "name another folder") from None
        found = self._found
        if self._only_tail:
            del found.steps[:-NEWEST], found.logged[:]
        return RunSummary(
            plan,
            [*found.steps],
            found.evaluations_by_set(),
            found.memory,
            [*found.slow],
            _no_room(self.folder),
            self._events.read([0] if self._only_tail else None),
            changed_s,
            [*found.logged],
        )


@dataclass
class _Records:
    """The records of metrics.jsonl so far."""

    steps: list[Row] = field(default_factory=list[Row])
    evaluations: dict[tuple[str, int], Row] = field(default_factory=dict[tuple[str, int], Row])
    memory: list[dict[str, int]] = field(default_factory=list[dict[str, int]])
    slow: list[str] = field(default_factory=list[str])
    logged: list[Row] = field(default_factory=list[Row])

    def add(self, record: Row) -> None:
        """Raises `ValueError` for an evaluation after what is no step."""
        if _is_step(record):
            self._add_step(record)
        elif _is_number(record.get("eval_loss", "")):
            if not is_count(record.get("step")):
                raise ValueError(f"an evaluation after step {record.get('step')!r}")
            self.evaluations[str(record.get("eval_set", "")), record["step"]] = record
        elif is_count(record.get("step")) and "slow_rank" not in record:
            self.logged.append(record)
        if _is_memory(record.get("memory")):
            self.memory = record["memory"]
        if isinstance(record.get("slow_rank"), int) and isinstance(record.get("ratio"), float):
            self.slow.append(
                f"rank {record['slow_rank']}: {record['ratio']:.1f} x as long as the others, "
                f"since step {record.get('step')} ({record.get('processor')})"
            )

    def _add_step(self, record: Row) -> None:
        step = record["step"]
        if self.steps and self.steps[-1]["step"] >= step:
            while self.steps and self.steps[-1]["step"] >= step:
                self.steps.pop()
            self.evaluations = {key: one for key, one in self.evaluations.items() if key[1] < step}
            self.logged = [one for one in self.logged if one["step"] < step]
        self.steps.append(record)

    def evaluations_by_set(self) -> list[Row]:
        sets = [*dict.fromkeys(name for name, _ in self.evaluations)]
        return [record for (_, _), record in sorted(self.evaluations.items(), key=lambda one: sets.index(one[0][0]))]


def _no_room(folder: Path) -> list[str]:
    found: list[str] = []
    for one in ended_attempts(RunFolder(folder)):
        where = "" if one.rank is None else f"rank {one.rank}"
        where += "" if one.step is None else f" at step {one.step}"
        then = "the beginning" if one.from_step is None else f"step {one.from_step}"
        found.append(f"{one.plan}: {where or 'a rank'}: {one.found}; went on from {then}")
    return found


def _logged_number(text: str) -> int | float | None:
    """A whole number, of which a job may log any: a long one as a float, None where that overflows."""
    if len(text) <= LONGEST_NUMBER:
        return int(text)
    return value if isfinite(value := float(text)) else None


def _object(text: str, parse_int: Callable[[str], Any] = whole_number) -> dict[str, Any]:
    value = json.loads(text, parse_int=parse_int)
    if not isinstance(value, dict):
        raise ValueError(f"{text[:40]!r} is no JSON object")
    return value  # pyright: ignore[reportUnknownVariableType]


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float)  # null is a number that is not finite


def is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def amount(value: Any) -> float | None:
    """`value` as a number that is finite and not negative; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and isfinite(value) and value >= 0 else None


def _is_step(record: Row) -> bool:
    memory = record.get("memory_bytes")
    return (
        is_count(record.get("step"))
        and _is_number(record.get("loss", ""))
        and all(isinstance(record.get(name), float) and isfinite(record[name]) for name in ("step_s", "samples_per_s"))
        and 0 < record["step_s"] < LONGEST_S
        and isinstance(memory, list)
        and len(memory) > 0  # pyright: ignore[reportUnknownArgumentType]
        and all(map(is_count, memory))  # pyright: ignore[reportUnknownArgumentType]
    )


def _is_memory(value: Any) -> bool:
    return isinstance(value, list) and all(  # pyright: ignore[reportUnknownVariableType]
        isinstance(device, dict) and all(map(is_count, device.values()))  # pyright: ignore[reportUnknownArgumentType]
        for device in value  # pyright: ignore[reportUnknownVariableType]
    )


def course_rows(run: RunSummary) -> list[tuple[str, str]]:
    plan, steps = run.plan, run.steps
    rows = [
        ("job", str(plan.get("job"))),
        ("plan", str(plan.get("plan"))),
        ("ranks", str(plan.get("world"))),
        ("parameters", f"{count:,}" if isinstance(count := plan.get("parameters"), int) else str(count)),
        ("steps", f"{steps[-1]['step'] if steps else 0} of {plan.get('steps')}"),
    ]
    if steps:
        usual = usual_steps(run) or steps
        rows += [
            ("loss", _first_to_last([row["loss"] for row in steps])),
            ("seconds per step", f"{median(row['step_s'] for row in usual):.4g} (median)"),
            ("samples per second", f"{median(row['samples_per_s'] for row in usual):,.0f} (median)"),
            ("memory per rank", f"{max(max(row['memory_bytes']) for row in steps) / 2**20:,.0f} MiB (largest peak)"),
        ]
        rows += _metric_rows("", steps, "metrics")
    for name, records in by_set(run).items():
        what = f"evaluation of {name}, " if name else "evaluation "
        averaged = " (averaged weights)" if records[-1].get("eval_averaged") is True else ""
        rows.append((f"{what}loss{averaged}", _first_to_last([row["eval_loss"] for row in records])))
        rows += _metric_rows(what, records, "eval_metrics")
    if run.memory:
        rows.append(("tensors at the peak", memory_in_a_line(run.memory)))
    if plan.get("idle_ranks"):
        rows.append(("idle ranks", f"{plan['idle_ranks']} on the data axis: a batch has fewer microbatches"))
    rows += [("slow rank", text) for text in run.slow]
    rows += [("no room", text) for text in run.no_room]
    left_out = sum(row.get("skipped") == "not finite" for row in steps)
    if skipped := sum(bool(row.get("skipped")) for row in steps) - left_out:
        rows.append(("skipped steps", f"{skipped} (float16 overflowed)"))
    if left_out:
        rows.append(("batches left out", f"{left_out} (not finite)"))
    return rows


def by_set(run: RunSummary) -> dict[str, list[Row]]:
    """The evaluations of each set by its name, '' for that of a job with one."""
    found: dict[str, list[Row]] = {}
    for record in run.evaluations:
        found.setdefault(str(record.get("eval_set", "")), []).append(record)
    return found


def _metric_rows(what: str, records: Sequence[Row], key: str) -> list[tuple[str, str]]:
    return [(f"{what}{name}", _first_to_last(values)) for name, (_, values) in _metrics(records, key).items()]


def _metrics(records: Sequence[Row], key: str) -> dict[str, tuple[list[Any], list[Any]]]:
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
    return f"{_number(values[0])} -> {_number(values[-1])}" if len(values) > 1 else _number(values[0])


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
    totals = [sum(device.values()) for device in memory]
    return max(totals) * len(totals) / sum(totals) if sum(totals) else 1.0


def _mib_of_column(count_bytes: int) -> str:
    mib = count_bytes / 2**20
    return f"{mib:,.0f}" if mib >= 1000 else f"{mib:.2f}"


def balance(memory: Sequence[Mapping[str, int]]) -> str:
    """How evenly memory is shared, in words."""
    return f"largest / mean {imbalance(memory):.3f}"


def metric_curves(run: RunSummary) -> dict[str, dict[str, tuple[list[Any], list[Any]]]]:
    """By the name of a metric, its lines: of training and of each evaluation set."""
    found: dict[str, dict[str, tuple[list[Any], list[Any]]]] = {}
    for metric, line in _metrics(run.steps, "metrics").items():
        found.setdefault(metric, {})["training"] = line
    for name, records in by_set(run).items():
        for metric, line in _metrics(records, "eval_metrics").items():
            found.setdefault(metric, {})[name or "evaluation"] = line
    return found


def logged_curves(run: RunSummary) -> dict[str, tuple[list[int], list[Any]]]:
    found: dict[str, tuple[list[int], list[Any]]] = {}
    for record in run.logged:
        for name, value in record.items():
            if name != "step" and _is_number(value) and not isinstance(value, bool):
                steps, values = found.setdefault(name, ([], []))
                steps.append(record["step"])
                values.append(value)
    return found


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
