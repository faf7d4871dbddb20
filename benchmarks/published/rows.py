"""Published runs as they stand in a CSV file, and what was measured of each. README.md says what the columns mean."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from evenly.errors import UserError

HERE = Path(__file__).parent
TRAINING = HERE / "training.csv"
COLUMNS = tuple(next(csv.reader([TRAINING.read_text().splitlines()[0]])))
MEASURED = ("measured_iter_s", "measured_tokens_per_s_per_gpu", "measured_peak_mem_gib")
COUNTED = ("A", "B")
FAULTY = "known to be low"  # in the notes of throughputs that a fault of the library held down
WHOLE = 0.02  # by which a batch may miss a whole number of microbatches, for rounding of what is printed
GIB = 2**30


class Incomplete(Exception):
    """A row does not say what a prediction, or the use of its measurement, needs; `reason` says what that is."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What is predicted of a row: seconds of a step, bytes of the worst rank, bytes that a device has.

    unclear: why bytes are not predicted though seconds are.
    """

    step_s: float | None
    peak_bytes: float | None
    limit_bytes: float | None
    unclear: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published run. cells: by column, all of training.csv's among them, empty where the file says nothing."""

    id: str
    source: str
    cells: Mapping[str, str]

    def number(self, column: str) -> float | None:
        """The cell as a positive number, None where it is empty; Incomplete where it is anything else."""
        text = self.cells[column]
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (value > 0 and math.isfinite(value)):
            raise Incomplete(f"{column} is no positive number: {text!r}")
        return value

    def needed(self, column: str) -> float:
        """The cell as a positive number; Incomplete where there is none."""
        value = self.number(column)
        if value is None:
            raise Incomplete(f"{column} is not stated")
        return value


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What counts of a row's measurements. reasons: why others do not.

    peak_grade: "A", or "B", which is reported apart. ran_out: the run did not fit.
    """

    step_s: float | None = None
    peak_bytes: float | None = None
    peak_grade: str = ""
    ran_out: bool = False
    reasons: Sequence[str] = ()

    @property
    def counts(self) -> bool:
        """Whether anything is left to compare."""
        return self.ran_out or self.step_s is not None or self.peak_bytes is not None


def read(path: Path) -> list[Row]:
    """The rows of a file, in their order; UserError where it is no CSV file of these columns."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return list(_rows(csv.reader(file, strict=True), path))
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise _refused(path, str(problem)) from problem


def measured(row: Row) -> Measured:
    """What counts of a row: its step time under grade A or B, its peak of memory under A, and B apart."""
    step_s, no_step = _counted(row, STEP)
    peak, no_peak = _counted(row, PEAK)
    ran_out = peak == math.inf
    reasons = tuple(filter(None, (no_step, no_peak)))
    return Measured(
        step_s=step_s,
        peak_bytes=None if ran_out else peak,
        peak_grade="" if peak is None or ran_out else row.cells[PEAK.grade].upper(),
        ran_out=ran_out,
        reasons=reasons or (("nothing measured",) if step_s is None and peak is None else ()),
    )


def _rows(lines: Iterator[list[str]], path: Path) -> Iterator[Row]:
    heads = [head.strip() for head in next(lines, [])]
    if not set(heads) & set(MEASURED):
        raise _refused(path, f"no column {' or '.join(MEASURED)}; its first line is {','.join(heads)[:80]!r}")
    if twice := {head for head in heads if head and heads.count(head) > 1}:
        raise _refused(path, f"columns that stand twice: {', '.join(sorted(twice))}")
    for number, cells in enumerate(lines, 2):
        if len(cells) > len(heads):
            raise _refused(path, f"row {number} has {len(cells)} cells for {len(heads)} columns")
        if any(cell.strip() for cell in cells):
            yield _row(number, heads, cells)


def _row(number: int, heads: Sequence[str], cells: Sequence[str]) -> Row:
    """A file without grades is somebody's own measurements: taken at their word."""
    values = dict.fromkeys(COLUMNS, "") | dict.fromkeys(heads, "")
    values |= dict(zip(heads, (cell.strip() for cell in cells), strict=False))
    for quantity in (STEP, PEAK):
        if quantity.grade not in heads and any(values[column] for column in quantity.columns):
            values[quantity.grade] = "A"
    values["global_batch_sequences"] = values["global_batch_sequences"] or batch_that_follows(values)
    return Row(id=values["id"] or f"row {number}", source=values["source"] or "unnamed", cells=values)


ACCUMULATED = re.compile(
    r"micro_num (\d+)|(?:gradient accumulation|GAS|accumulation steps) (?:of )?(\d+)", re.IGNORECASE
)


def batch_that_follows(cells: Mapping[str, str]) -> str:
    """The global batch, where a row does not state it but it follows from other cells; else "".

    From the microbatch, the data axis and how many microbatches the notes say a step has; else from step time and
    throughput, where both are measured and give a whole number of microbatches for every rank.
    """
    numbers = [_whole(cells[name]) for name in ("dp", "microbatch")]
    each = prod(number for number in numbers if number)
    if not all(numbers):
        return ""
    if accumulated := ACCUMULATED.search(cells["notes"]):
        return str(each * int(accumulated[1] or accumulated[2]))
    try:
        measured = [float(cells[name]) for name in (*MEASURED[:2], "gpus", "seq_len")]
    except ValueError:
        return ""
    batch = measured[0] * measured[1] * measured[2] / measured[3]
    rounds = round(batch / each)
    return str(rounds * each) if rounds and abs(batch / (rounds * each) - 1) < WHOLE else ""


def _whole(cell: str) -> int:
    """The cell as a whole number; 0 where it is none."""
    return int(float(cell)) if re.fullmatch(r"\d+(\.0*)?", cell) else 0


def _counted(row: Row, quantity: _Quantity) -> tuple[float | None, str]:
    """A measurement, or None and why there is none that counts: "" where the source gives none and claims none."""
    grade, stated = row.cells[quantity.grade].upper(), any(row.cells[column] for column in quantity.columns)
    if stated and grade not in COUNTED:
        why = row.cells["grade_why"]
        return None, f"{quantity.name}: {f'grade {grade}' if grade else 'no grade'}{f' ({why})' if why else ''}"
    if grade in COUNTED and not stated:
        return None, f"{quantity.name}: none of {', '.join(quantity.columns)} is stated"
    if stated and quantity is STEP and FAULTY in row.cells["notes"]:
        return None, f"{quantity.name}: {FAULTY}, by the source's own word"
    try:
        return (quantity.value(row) if stated else None), ""
    except Incomplete as problem:
        return None, f"{quantity.name}: {problem.reason}"


def _step_s(row: Row) -> float | None:
    """As measured, else from the throughput."""
    step_s, tokens_per_s = row.number("measured_iter_s"), row.number("measured_tokens_per_s_per_gpu")
    if step_s is not None or tokens_per_s is None:
        return step_s
    return row.needed("global_batch_sequences") * row.needed("seq_len") / (tokens_per_s * row.needed("gpus"))


def _peak_bytes(row: Row) -> float | None:
    """Infinity where the run did not fit."""
    if row.cells["measured_peak_mem_gib"].upper() == "OOM":
        return math.inf
    return row.needed("measured_peak_mem_gib") * GIB


@dataclass(frozen=True)
class _Quantity:
    name: str
    grade: str
    columns: Sequence[str]
    value: Callable[[Row], float | None]


STEP = _Quantity("step time", "grade_speed", ("measured_iter_s", "measured_tokens_per_s_per_gpu"), _step_s)
PEAK = _Quantity("memory", "grade_memory", ("measured_peak_mem_gib",), _peak_bytes)


def _refused(path: Path, found: str) -> UserError:
    return UserError(
        f"Published runs were asked for from {path}.",
        found,
        f"Give a CSV file (UTF-8, commas) with the columns of {TRAINING.name}, or some of them.",
    )
