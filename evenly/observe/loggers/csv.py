"""A CSV file."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evenly.observe.loggers.logger import LoggedRun, Logger, LogRow


class CSVLogger(Logger):
    """Writes the CSV file `path`, one row per step, its evaluation included; by
    default `metrics.csv` in the run's folder.

    A figure that comes for the first time gets a column of its own: the file is then written once more. A run that goes
    on keeps the rows of the steps that it does not repeat.
    """

    name = "csv"
    place = "metrics.csv"

    def open(self, run: LoggedRun) -> None:
        path = self.path(run)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._table = GrowingTable(path, up_to=run.step)

    def add(self, rows: Sequence[LogRow]) -> None:
        for row in rows:
            self._table.add(row.step, row.figures)
        self._table.flush()

    def finish(self, *, failed: bool) -> None:
        self._table.close()


class GrowingTable:
    """A CSV file whose last row, and whose columns, can be added to. Rows of a step beyond `up_to` are removed."""

    def __init__(self, path: Path, *, up_to: int) -> None:
        self._path = path
        self._columns = ["step"]
        rows: list[dict[str, Any]] = []
        if path.exists():
            with path.open(encoding="utf-8", newline="") as file:
                reader = csv.DictReader(file)
                rows = [row for row in reader if row["step"].isdecimal() and int(row["step"]) <= up_to]
                self._columns = [*(reader.fieldnames or self._columns)]
        self._last: dict[str, Any] = {}
        self._write_all(rows)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Adds `values` to the row of `step`, which is the last or a further one."""
        same = str(self._last.get("step")) == str(step)
        row = {**self._last, **values} if same else {"step": step, **values}
        if same:
            self._file.seek(self._last_at)
            self._file.truncate()
        if unknown := [name for name in values if name not in self._columns]:
            self._columns += unknown
            self.flush()
            with self._path.open(encoding="utf-8", newline="") as file:
                rows: list[dict[str, Any]] = [*csv.DictReader(file)]
            self._file.close()
            self._write_all(rows)
        self._write(row)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write_all(self, rows: Sequence[Mapping[str, Any]]) -> None:
        half = self._path.with_suffix(".half")
        self._file = half.open("w", encoding="utf-8", newline="")
        csv.writer(self._file).writerow(self._columns)
        for row in rows:
            self._write(row)
        self.flush()
        half.replace(self._path)  # which is still the file that is open

    def _write(self, row: Mapping[str, Any]) -> None:
        self._last, self._last_at = {**row}, self._file.tell()
        csv.DictWriter(self._file, self._columns, restval="").writerow(row)
