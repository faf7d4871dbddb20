"""What all loggers have in common.

Order: a logger opens with the "config" record, the first of a run, on the main rank alone; then come rows, and the end.
All of it happens in a thread of its own, once a second: a network that is slow or gone does not reach the training, but
for a limited wait before the first step and after the last. The first error of a logger is a warning, after which it
does nothing more.
"""

from __future__ import annotations

import json
import queue
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import Any, ClassVar, NamedTuple

from evenly.errors import UserError
from evenly.observe.run_folder import RunFolder
from evenly.observe.sinks import Stream

PAUSE_S = 1.0  # between two writings
MOST_ROWS = 20_000  # that wait to be written
OPEN_LIMIT_S = 20.0  # that training waits for it to begin
END_LIMIT_S = 60.0  # for the rows that are left once a run has ended
SHORT_LIMIT_S = 10.0  # where it was stopped or has failed
PATIENCE_S = 3.0  # after which it says that it is waiting


class LogRow(NamedTuple):
    """The figures of one record. time_s: as `time.time()`."""

    step: int
    time_s: float
    figures: dict[str, float]


@dataclass(frozen=True)
class LoggedRun:
    """The run that a logger logs.

    out:    its folder, None without one.
    step:   after which it goes on, 0 for a new run.
    config: settings of the job, its plain fields, the plan: nested dicts.
    """

    out: Path | None
    step: int
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.out.resolve().name if self.out is not None else str(self.config["job"]["name"])

    def kept(self, logger: str) -> Path | None:
        """The file in which `logger` keeps what it has to know where the run goes on; None without a folder."""
        return RunFolder(self.out).logger(logger) if self.out is not None else None


class Logger(ABC):
    """A `Sink` that logs on the main rank.

    name:     in warnings, and on the command line.
    packages: modules that it needs.
    pip:      what installs them.
    place:    the file or folder that it writes in the run's folder unless another is given; '' for none.

    Raises `UserError` where packages are missing.
    """

    name: ClassVar[str]
    packages: ClassVar[Sequence[str]] = ()
    pip: ClassVar[str] = ""
    place: ClassVar[str] = ""

    def __init__(self, path: Path | str | None = None) -> None:
        _check_packages(type(self))
        self._path = Path(path) if path is not None else None
        self._rows: queue.Queue[LogRow] = queue.Queue(MOST_ROWS)
        self._is_open, self._ending = Event(), Event()
        self._failed = self._is_over = False
        self._steps = self._last_step = 0
        self._thread: Thread | None = None

    # --- what each kind does, in its thread ------------------------------------------------------------
    @abstractmethod
    def open(self, run: LoggedRun) -> None:
        """Begins, or goes on with what was logged of the run before."""

    @abstractmethod
    def add(self, rows: Sequence[LogRow]) -> None:
        """Writes the rows, in order; those of a step may come apart."""

    @abstractmethod
    def finish(self, *, failed: bool) -> None:
        """Ends; failed: whether the run has."""

    def path(self, run: LoggedRun) -> Path:
        return self._path or (run.out or Path()) / self.place

    # --- a sink -----------------------------------------------------------------------------------------
    def write(self, stream: Stream, record: Mapping[str, Any]) -> None:
        """Takes one record. Raises `UserError` where a run cannot be logged, on all ranks."""
        if stream == "config":
            self._begin(record)
        elif stream == "metrics" and self._thread is not None and not self._is_over:
            self._put(LogRow(record["step"], time.time(), figures_of(record)))
        elif stream == "events":
            self._failed = self._failed or record["event"] == "failed"

    def close(self) -> None:
        """Waits until all is written, but not for ever; safe to call twice."""
        if self._thread is None:
            return
        self._ending.set()
        limit_s = SHORT_LIMIT_S if self._failed or self._last_step < self._steps else END_LIMIT_S
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive() and not self._is_over:
            self._say(f"what is left goes to {self.name}, for {limit_s:.0f} s at most")
            self._thread.join(limit_s - PATIENCE_S)
        if self._thread.is_alive() and not self._is_over:
            self._warn(f"not all was written within {limit_s:.0f} s of the end")
        self._thread = None

    def _begin(self, record: Mapping[str, Any]) -> None:
        out = Path(record["out"]) if record["out"] is not None else None
        if self.place and self._path is None and out is None:
            do = f"give the run a folder, or the logger a place: {type(self).__name__}(PATH)"
            raise UserError(f"log to {self.name}", "the run has no folder", do)
        if record["rank"] == 0:
            run = LoggedRun(out, record["step"], record["config"])
            self._last_step, self._steps = run.step, run.config["job"]["steps"]
            self._thread = Thread(target=self._log, args=(run,), name=f"evenly {self.name}", daemon=True)
            self._thread.start()
            # Without the wait, its imports would slow down the first steps.
            if not self._is_open.wait(OPEN_LIMIT_S):
                self._say(f"{self.name} has not begun within {OPEN_LIMIT_S:.0f} s; the run goes on while it tries")

    def _put(self, row: LogRow) -> None:
        self._last_step = row.step
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._warn(f"it is {MOST_ROWS:,} records behind")

    # --- its thread -------------------------------------------------------------------------------------
    def _log(self, run: LoggedRun) -> None:
        try:
            self.open(run)
            self._is_open.set()
            is_last = False
            while not is_last and not self._is_over:
                is_last = self._ending.wait(PAUSE_S)
                if rows := [*self._waiting()]:
                    self.add(rows)
            self.finish(failed=self._failed)
        except (Exception, SystemExit) as problem:
            self._warn(f"{type(problem).__name__}: {first_line(problem)}")

    def _waiting(self) -> Iterator[LogRow]:
        while not self._rows.empty():
            yield self._rows.get_nowait()

    def _warn(self, why: str) -> None:
        if not self._is_over:
            self._is_over = True
            self._is_open.set()
            self._say(f"nothing more is logged to {self.name}: {why}")

    def _say(self, text: str) -> None:
        print(f"evenly: {text}", file=sys.stderr, flush=True)


def first_line(problem: BaseException) -> str:
    return " ".join(str(problem).split())[:300]


def _check_packages(logger: type[Logger]) -> None:
    """Raises `UserError` with the line that installs them where packages of `logger` are missing."""
    missing = [name for name in logger.packages if find_spec(name) is None]
    if missing:
        found = f"{'packages are' if len(missing) > 1 else 'the package is'} not installed: {', '.join(missing)}"
        raise UserError(f"log to {logger.name}", found, f"pip install {logger.pip}")


# --- records -------------------------------------------------------------------------------------------


def figures_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by name, those of nested dicts by names joined with /; lists and texts are left out, but
    of the memory of all ranks the largest is taken.
    """
    memory = record.get("memory_bytes")
    numbers: dict[str, float] = {
        name: value
        for name, value in flat(record).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "step"
    }
    return {**numbers, "memory_bytes": max(memory)} if memory else numbers


def flat(nested: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a/b": 1}`."""
    found: dict[str, Any] = {}
    for name, value in nested.items():
        found |= flat(value, f"{before}{name}/") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return found


def flat_config(config: Mapping[str, Any]) -> dict[str, int | float | str | bool]:
    """`config` flat, of numbers, texts and truth values; all else as text, None left out."""
    return {
        name: value if isinstance(value, int | float | str | bool) else str(value)
        for name, value in flat(config).items()
        if value is not None
    }


class KeptRun:
    """What a logger of a service keeps in a run's folder: the name of its run there, and what it has logged of it.

    place: project, experiment: where another is named, nothing was kept.
    logged: name of a figure -> the last step that it was logged of.
    """

    def __init__(self, path: Path | None, place: str) -> None:
        self._path, self._place = path, place
        self.id: str | None = None
        self.logged: dict[str, int] = {}
        if path is not None and path.exists():
            values = json.loads(path.read_text(encoding="utf-8"))
            if values["place"] == place:
                self.id, self.logged = values["id"], values["logged"]

    def left(self, row: LogRow) -> dict[str, float]:
        """The figures of `row` that were not logged of its step before."""
        return {name: value for name, value in row.figures.items() if row.step > self.logged.get(name, -1)}

    def note(self, rows: Sequence[LogRow]) -> None:
        """Notes that `rows` were logged; the file is whole at any moment."""
        for row in rows:
            for name in row.figures:
                self.logged[name] = max(row.step, self.logged.get(name, -1))
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            half = self._path.with_suffix(".half")
            half.write_text(json.dumps({"place": self._place, "id": self.id, "logged": self.logged}) + "\n")
            half.replace(self._path)


def plain_name(name: str) -> str:
    """`name` with all but letters, digits and `_-. /:` as `_`: what services allow of names."""
    return re.sub(r"[^\w\-. /:]", "_", name)
