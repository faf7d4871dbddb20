"""Predictions beside measurements: row by row, then as figures per source."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.published.accuracy import Pair, accuracy, spearman, within_sweeps
from benchmarks.published.rows import Incomplete, Measured, Predicted, Row, measured
from evenly.errors import EvenlyError, describe

Predict = Callable[[Mapping[str, str]], Predicted]
# What the rows of a sweep have in common: between them the plan differs, and how much there is to do.
SWEEP = ("model", "gpu", "gpus", "seq_len", "precision")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One row with what is predicted of it, if that could be; reasons: what of it does not count, and why.

    fault: the prediction failed in a way that is nobody's intention.
    """

    row: Row
    measured: Measured
    predicted: Predicted | None
    reasons: Sequence[str]
    fault: bool = False

    @property
    def time(self) -> Pair | None:
        """Seconds of a step."""
        return _pair(self.predicted and self.predicted.step_s, self.measured.step_s)

    @property
    def memory(self) -> Pair | None:
        """Bytes of the worst rank."""
        return _pair(self.predicted and self.predicted.peak_bytes, self.measured.peak_bytes)

    @property
    def throughput(self) -> Pair | None:
        """Tokens per second and device; of sequences not stated, as if there were one of one token on one device."""
        if self.time is None:
            return None
        tokens = _stated(self.row, "global_batch_sequences") * _stated(self.row, "seq_len") / _stated(self.row, "gpus")
        return Pair(tokens / self.time.predicted, tokens / self.time.measured)

    @property
    def ran(self) -> bool:
        """Whether the run had room."""
        return not self.measured.ran_out

    @property
    def fits(self) -> bool | None:
        """Whether it is predicted to have room, None where that is open."""
        if self.predicted is None or self.predicted.peak_bytes is None or self.predicted.limit_bytes is None:
            return None
        return self.predicted.peak_bytes <= self.predicted.limit_bytes


def compare(rows: Iterable[Row], predict: Predict) -> list[Compared]:
    """Every row, in its order; those of which nothing counts are not predicted."""
    return [_compared(row, predict) for row in rows]


def document(compared: Sequence[Compared], *, rows: bool = False) -> dict[str, Any]:
    """All figures, errors as fractions; with `rows`, each row's besides."""
    sources = list(dict.fromkeys(each.row.source for each in compared))
    found: dict[str, Any] = {
        "overall": _figures(compared),
        "sources": {name: _figures([each for each in compared if each.row.source == name]) for name in sources},
        "skipped": [{"id": each.row.id, "reason": reason} for each in compared for reason in each.reasons],
    }
    return found | ({"rows": [_row(each) for each in compared if each.predicted]} if rows else {})


def _compared(row: Row, predict: Predict) -> Compared:
    counted = measured(row)
    predicted, problem, fault = _predicted(row, predict) if counted.counts else (None, "", False)
    reasons = [*counted.reasons, *filter(None, [problem])]
    if predicted and counted.step_s is not None and predicted.step_s is None:
        reasons.append("step time: none predicted")
    if predicted and predicted.unclear:
        reasons.append(predicted.unclear)
    elif predicted and (counted.peak_bytes is not None or counted.ran_out) and predicted.peak_bytes is None:
        reasons.append("memory: none predicted")
    return Compared(row=row, measured=counted, predicted=predicted, reasons=tuple(reasons), fault=fault)


def _predicted(row: Row, predict: Predict) -> tuple[Predicted | None, str, bool]:
    """A prediction, or why there is none and whether that is a fault: one bad row must not hide the others."""
    try:
        predicted = predict(row.cells)
        values = {name: value for name, value in asdict(predicted).items() if name != "unclear"}
        wrong = [name for name, value in values.items() if value is not None and not 0 < value < math.inf]
        return (None, f"fault: predicted {wrong[0]} is no positive number", True) if wrong else (predicted, "", False)
    except Incomplete as problem:
        return None, problem.reason, False
    except EvenlyError as problem:
        return None, " ".join(filter(None, (problem.asked, problem.found))), False
    except Exception as problem:
        return None, " ".join(f"fault: {describe(problem)}".split()), True


def _stated(row: Row, column: str) -> float:
    try:
        return row.number(column) or 1.0
    except Incomplete:
        return 1.0


def _pair(predicted: float | None, measured: float | None) -> Pair | None:
    return None if predicted is None or measured is None else Pair(predicted, measured)


def _figures(compared: Sequence[Compared]) -> dict[str, Any]:
    memory = {grade: [each for each in compared if each.measured.peak_grade == grade] for grade in "AB"}
    in_sweeps, sweeps = within_sweeps(_sweeps(compared))
    return {
        "time": asdict(accuracy(_pairs(each.time for each in compared))),
        "memory": asdict(accuracy(_pairs(each.memory for each in memory["A"]))),
        "memory_b": asdict(accuracy(_pairs(each.memory for each in memory["B"]))),
        "rank_correlation": spearman(_pairs(each.throughput for each in compared)),
        "rank_correlation_in_sweeps": in_sweeps,
        "sweeps": sweeps,
        "fits": _fits(compared),
    }


def _sweeps(compared: Iterable[Compared]) -> Iterable[Sequence[Pair]]:
    sweeps: dict[tuple[str, ...], list[Pair]] = {}
    for each in compared:
        if each.throughput is not None:
            common = (each.row.source, *(each.row.cells[column] for column in SWEEP))
            sweeps.setdefault(common, []).append(each.throughput)
    return sweeps.values()


def _fits(compared: Iterable[Compared]) -> dict[str, Any]:
    judged = [each for each in compared if each.fits is not None]
    refused = [each.row.id for each in judged if each.ran and not each.fits]
    accepted = [each.row.id for each in judged if each.fits and not each.ran]
    agree = 1 - len(refused + accepted) / len(judged) if judged else None
    return {"rows": len(judged), "agree": agree, "ran_but_refused": refused, "ran_out_but_accepted": accepted}


def _row(each: Compared) -> dict[str, Any]:
    pairs = {"time_s": each.time, "memory_bytes": each.memory}
    found = {name: asdict(pair) | {"error": pair.error} for name, pair in pairs.items() if pair is not None}
    return {"id": each.row.id, "source": each.row.source, **found, "ran": each.ran, "fits": each.fits}


def _pairs(pairs: Iterable[Pair | None]) -> list[Pair]:
    return [pair for pair in pairs if pair is not None]
