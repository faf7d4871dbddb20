"""Fits what devices and libraries reach to published step times: `python -m benchmarks.published.fit [--csv FILE]`.

Every number of `priors.toml` is where the fit begins and what pulls it back: a number that no run says anything about
keeps its prior. Errors are those of log(predicted / measured), of rows of grades A and B, in units of TOLERANCE, and
large ones count linearly, so that odd rows do not pull. What devices reach is written to
evenly/planner/speeds.toml, what libraries do to libraries.toml here.

`--folds 5` writes nothing: it fits to four fifths of the rows and predicts the last fifth, five times over, so that
each row is predicted once by numbers that have not seen it. Rows of a model on a kind of device stay together: they
differ by little; of a library with one model on one kind of device, those of a plan do. No library can be left out,
since every row of most of them is from one source.

`--only NAME ...` fits some libraries, and devices that no other has rows of, and holds all else as it is: what is
added, or changed of one library, moves no others.
"""

from __future__ import annotations

import argparse
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.published import cases
from benchmarks.published.accuracy import Pair, accuracy
from benchmarks.published.libraries import FILE as LIBRARIES
from benchmarks.published.libraries import library_named
from benchmarks.published.rows import TRAINING, Incomplete, measured, read
from evenly.planner.speeds import FILE as SPEEDS

HERE = Path(__file__).parent
PRIORS = HERE / "priors.toml"
TOLERANCE = 0.05
ROUNDS = 12
PLAN = ("tp", "pp", "microbatch", "activation_ckpt")
# Facts rather than fits.
FIXED = {"weight_bytes", "gradient_bytes"}
# How far a number may be from its prior: standard deviation of its logarithm, by its name or its table's.
LOOSE = {"matmul": 0.1, "attention": 0.15, "bandwidth_share": 0.1, "traffic": 0.4, "start_s": 0.5, "narrow": 0.7}
LOOSE |= {
    "passes": 0.3,
    "host_s": 0.5,
    "tensor_host_s": 0.5,
    "tensor_s": 0.7,
    "message_s": 0.7,
    "turn_s": 0.5,
    "uneven": 0.7,
}
LOOSE |= {
    "idle": 0.4,
    "unaligned": 0.5,
    "contention": 0.5,
    "jitter": 0.7,
    "optimizer_bytes": 0.3,
    "message_bytes_per_s": 0.5,
}
LOOSE |= {"tensor_hidden": 0.3, "data_hidden": 0.5, "gather_share": 0.5, "gather_copy_bytes": 0.5, "shares": 0.2}

Path_ = tuple[str, ...]


class Fit:
    """Rows with what does not depend on the numbers, and the numbers."""

    def __init__(self, rows: Sequence[cases.Cells], only: Sequence[str] = ()) -> None:
        """only: libraries and devices whose numbers are fitted, to rows of these libraries, while all others stay."""
        self.tables = tomllib.loads(PRIORS.read_text(encoding="utf-8"))
        self.paths = [path for path in _numbers(self.tables) if not only or path[1] in only]
        if only:
            rows = [row for row in rows if cases.library_of(row) in only]
            fitted = tomllib.loads(SPEEDS.read_text(encoding="utf-8")) | tomllib.loads(LIBRARIES.read_text("utf-8"))
            for group in ("libraries", "devices"):
                fitted[group] |= {name: facts for name, facts in self.tables[group].items() if name in only}
            self.tables = fitted
        self.cases: list[cases.Case] = []
        measured: list[float] = []
        for row in rows:
            seconds = measured_seconds(row)
            try:
                found = cases.case_of(row)
            except Incomplete:
                continue
            if seconds is not None:
                self.cases.append(found)
                measured.append(seconds)
        self.parts = [cases.parts_of(case, library_named(case.library)) for case in self.cases]
        self.measured = np.array(measured)
        self.priors = np.array([_coordinate(path, _at(self.tables, path)) for path in self.paths])
        self.loose = np.array(
            [LOOSE.get(path[-1], LOOSE.get(path[-2], LOOSE.get(path[0], 0.3))) for path in self.paths]
        )

    def predict(self, point: np.ndarray, only: Sequence[int] | None = None) -> np.ndarray:
        """Step times in seconds with the numbers at `point`, of all rows or some."""
        for path, x in zip(self.paths, point, strict=True):
            _set(self.tables, path, _value(path, float(x)))
        which = range(len(self.cases)) if only is None else only
        return np.array([self._step_s(number) for number in which])

    def _step_s(self, number: int) -> float:
        case = self.cases[number]
        machine = cases.machine_of(case, library_named(case.library, self.tables), self.tables)
        return cases.seconds_of(case, self.parts[number], machine)

    def run(self) -> np.ndarray:
        """Damped Gauss-Newton on the smoothed errors; the point found."""
        point, damping = self.priors.copy(), 1.0
        predicted = self.predict(point)
        touched = [self._touched(path) for path in self.paths]
        cost = self._cost(point, predicted)
        for _ in range(ROUNDS):
            errors = np.log(predicted / self.measured) / TOLERANCE
            weights = 1 / np.sqrt(1 + errors**2)
            slopes = self._slopes(point, predicted, touched)
            curve = (slopes.T * weights) @ slopes + np.diag(1 / self.loose**2)
            pull = -(slopes.T @ (weights * errors)) - (point - self.priors) / self.loose**2
            while True:
                step = np.linalg.solve(curve + 0.05 * damping * np.diag(np.diag(curve)), pull)
                candidate = point + np.clip(step, -0.5, 0.5)
                after = self.predict(candidate)
                if (lower := self._cost(candidate, after)) < cost or damping > 1e4:
                    break
                damping *= 4
            done = cost - lower < 1e-3 * cost
            point, predicted, cost, damping = candidate, after, lower, damping / 3
            print(f"cost {cost:.1f}, median error {np.median(np.abs(predicted / self.measured - 1)):.3f}", flush=True)
            if done:
                break
        return point

    def _touched(self, path: Path_) -> list[int]:
        """Rows that a number can matter to: those of its library or device, else all."""
        group, name = path[0], path[1]
        kinds = self.tables["devices"][name]["kinds"] if group == "devices" else ()
        return [
            number
            for number, case in enumerate(self.cases)
            if (group != "libraries" or case.library == name)
            and (group != "devices" or case.cluster.device.kind in kinds)
        ]

    def _slopes(self, point: np.ndarray, predicted: np.ndarray, touched: Sequence[Sequence[int]]) -> np.ndarray:
        slopes = np.zeros((len(self.cases), len(point)))
        for number, rows in enumerate(touched):
            if len(rows):
                moved = point.copy()
                moved[number] += 0.02
                slopes[rows, number] = np.log(self.predict(moved, rows) / predicted[rows]) / 0.02 / TOLERANCE
        return slopes

    def _cost(self, point: np.ndarray, predicted: np.ndarray) -> float:
        errors = np.log(predicted / self.measured) / TOLERANCE
        return float(np.sum(np.sqrt(1 + errors**2) - 1) + 0.5 * np.sum(((point - self.priors) / self.loose) ** 2))


def held_out(rows: Sequence[cases.Cells], folds: int) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and measured seconds of all rows, each predicted by a fit to the folds that it is not in."""
    whole = Fit(rows)
    predicted = np.zeros(len(whole.cases))
    for left_out in folds_of([case.row for case in whole.cases], folds):
        others = [case.row for number, case in enumerate(whole.cases) if number not in left_out]
        predicted[left_out] = whole.predict(Fit(others).run(), left_out)
    return predicted, whole.measured


def folds_of(rows: Sequence[cases.Cells], folds: int) -> list[list[int]]:
    """Numbers of the rows of each fold, of about as many rows: the largest groups first, each to the smallest fold.

    A group is a model on a kind of device; of a library that has rows of one group alone it is a plan of these, since
    nothing would be left to say how fast the library is.
    """
    found_of: dict[str, set[tuple[str, ...]]] = {}
    for row in rows:
        found_of.setdefault(cases.library_of(row), set()).add((row["model"], row["gpu"]))
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, row in enumerate(rows):
        alone = len(found_of[cases.library_of(row)]) == 1
        plan = tuple(row.get(name, "") for name in PLAN) if alone else ()
        groups.setdefault((row["model"], row["gpu"], *plan), []).append(number)
    found: list[list[int]] = [[] for _ in range(folds)]
    for _, numbers in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])):
        min(found, key=len).extend(numbers)
    return found


def measured_seconds(row: cases.Cells) -> float | None:
    """Of a row's step: as printed, or from its tokens per second."""
    if cases.text(row, "measured_iter_s"):
        return float(row["measured_iter_s"])
    cells = [cases.text(row, name) for name in ("global_batch_sequences", "seq_len", "gpus")]
    rate = cases.text(row, "measured_tokens_per_s_per_gpu")
    if not rate or not all(cells):
        return None
    samples, tokens, gpus = map(float, cells)
    return samples * tokens / float(rate) / gpus


# Shares that lie between 0 and 1 are fitted by their odds of the exposed rest, all else by its logarithm.
def _coordinate(path: Path_, value: float) -> float:
    return math.log(1 - value) if path[-1].endswith("_hidden") else math.log(value)


def _value(path: Path_, x: float) -> float:
    return 1 - min(1.0, math.exp(x)) if path[-1].endswith("_hidden") else math.exp(x)


def _numbers(table: Mapping[str, Any], before: Path_ = ()) -> list[Path_]:
    """Paths of the numbers that are fitted."""
    found: list[Path_] = []
    for name, value in table.items():
        path = (*before, name)
        if isinstance(value, dict) and name not in ("kernels", "holdings"):
            found += _numbers(value, path)
        elif isinstance(value, float) and name not in FIXED and (value > 0 or name.endswith("_hidden")):
            if before[:1] == ("shares",) or before == ("libraries", "any"):
                continue
            found.append(path)
    return found


def _at(table: Any, path: Path_) -> Any:
    for name in path:
        table = table[name]
    return table


def _set(table: Any, path: Path_, value: float) -> None:
    _at(table, path[:-1])[path[-1]] = value


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv", type=Path, default=TRAINING)
    parser.add_argument("--folds", type=int, help="predict rows that were not fitted, and write nothing")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="fit these libraries and devices alone")
    arguments = parser.parse_args()
    rows = [row.cells for row in read(arguments.csv) if measured(row).step_s is not None]
    if arguments.folds:
        pairs = zip(*held_out(rows, arguments.folds), strict=True)
        found = accuracy([Pair(*pair) for pair in pairs])
        print(f"{found.rows} rows held out: median {found.median:.1%}, p90 {found.p90:.1%}, bias {found.bias:+.1%}")
        return
    fit = Fit(rows, arguments.only)
    fit.predict(fit.run())
    libraries = {"libraries": fit.tables.pop("libraries")}
    for path, tables in ((SPEEDS, fit.tables), (LIBRARIES, libraries)):
        head = path.read_text(encoding="utf-8").split("\n\n", 1)[0]
        path.write_text(head + "\n\n" + written(tables), encoding="utf-8")


def written(tables: Mapping[str, Any]) -> str:
    """The tables as TOML, numbers to four digits."""
    lines: list[str] = []
    for group, table in tables.items():
        if all(not isinstance(value, dict) for value in table.values()):
            lines += _table(group, table)
        else:
            for name, entries in table.items():
                lines += _table(f"{group}.{name}", entries)
    return "\n".join(lines)


def _table(name: str, entries: Mapping[str, Any]) -> list[str]:
    return [f"[{name}]", *(f"{key} = {_literal(value)}" for key, value in entries.items()), ""]


def _literal(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_literal(one)}" for key, one in value.items()) + " }"
    if isinstance(value, int):  # and truth
        return str(value).lower()
    if isinstance(value, float):
        short = f"{value:.4g}"
        return short if "e" in short or "." in short else f"{short}.0"
    return "[" + ", ".join(map(_literal, value)) + "]" if isinstance(value, list) else f'"{value}"'


if __name__ == "__main__":
    main()
