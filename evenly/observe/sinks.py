"""Receivers of the records of a run; the files in its folder are one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Protocol

from evenly.errors import RunError
from evenly.observe.run_folder import RunFolder

Stream = Literal["config", "metrics", "events", "timeline"]


class Sink(Protocol):
    """Takes the records of one rank; `evenly.start(job, sinks=[...])` adds some to a run."""

    def write(self, stream: Stream, record: Mapping[str, Any]) -> None:
        """Receives one record, as soon as it exists.

        stream: "config" has one, before all steps: `rank`, `out` (the run's folder as text, or None), `step` (after
        which the run goes on, 0 for a new one) and `config` (settings of the job, its plain fields, the plan).
        "metrics" has a record for each step and each evaluation, on rank 0 alone; "events" those of this rank, with
        times; "timeline" what this rank did when, in a few steps of a run with a folder: its passes (of a pipeline also
        its sends and receives), and without a pipeline "loading", "operation" and "update".
        """
        ...

    def close(self) -> None:
        """Called once, when the run has ended."""
        ...


MOVED = "leave the folder of a run where it is until the run has ended"


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Within, a file of a run's folder is written; what the system says is a `RunError`."""
    try:
        yield
    except OSError as problem:
        words = os.strerror(problem.errno) if problem.errno else str(problem)
        raise RunError(f"write {path}", words, "see that the disk has room and can be written") from problem


class JsonLines:
    """A file of one JSON object a line, readable at any moment. Lines are whole: each is written in one call.

    Raises `RunError` where it cannot be written, or is no longer at `path`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8", buffering=1)

    def add(self, record: Mapping[str, Any]) -> None:
        """Writes `record` as one line; a number that is not finite, which JSON does not know, as null."""
        strict = finite(record)
        with writing(self._path):
            if not self._is_there():
                raise RunError(f"write {self._path}", "the file was removed or replaced while the run wrote it", MOVED)
            self._file.write(json.dumps(strict, allow_nan=False) + "\n")

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False

    def close(self) -> None:
        with suppress(OSError):  # of a line that could not be written, which has been an error
            self._file.close()


def finite(value: Any) -> Any:
    """Return `value` with null for every number that is not finite, in mappings and lists too; of numpy, Python's."""
    if isinstance(value, Mapping):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


class FolderSink:
    """The files of a run's folder. Rank 0 writes the metrics; every rank its own events and timeline."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        self._paths: dict[Stream, Path] = {
            "metrics": folder.metrics,
            "events": folder.events(rank),
            "timeline": folder.timeline(rank),
        }
        self._files: dict[Stream, JsonLines] = {}
        if rank == 0:  # marks the folder as a run's before the first step ends
            self._files["metrics"] = JsonLines(folder.metrics)

    def write(self, stream: Stream, record: Mapping[str, Any]) -> None:
        """Adds `record` to the file of its stream."""
        if stream not in self._files:
            self._files[stream] = JsonLines(self._paths[stream])
        self._files[stream].add(record)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
