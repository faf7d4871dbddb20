"""Files of one JSON object a line, readable at any moment of a run."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any


class Records:
    """Appends objects to one file; with no path, to nothing. Lines are whole: each is written in one call."""

    def __init__(self, path: Path | None) -> None:
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8", buffering=1)

    @property
    def kept(self) -> bool:
        """Whether there is a file."""
        return self._file is not None

    def add(self, record: dict[str, Any]) -> None:
        """Writes `record` as one line; a number that is not finite, which JSON does not know, as null."""
        if self._file is not None:
            strict = {name: _finite_or_none(value) for name, value in record.items()}
            self._file.write(json.dumps(strict, allow_nan=False) + "\n")

    def event(self, name: str, **details: Any) -> None:
        """Writes what happened, with the time in seconds since 1970."""
        self.add({"time": time.time(), "event": name, **details})

    def close(self) -> None:
        """Closes the file; safe to call twice."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
