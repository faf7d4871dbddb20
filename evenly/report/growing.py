"""Files of one JSON object a line that a run may still write: what is new in them, read once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evenly.observe.run_folder import whole_number


class GrowingFile:
    """The whole lines that a file has got since it was last asked.

    begun_again: whether the last call found another file, or a shorter one, and read it from its beginning.
    """

    def __init__(self, path: Path, *, tail_bytes: int | None = None) -> None:
        """tail_bytes: of a longer file no more than the lines in so many of its last bytes are read at first."""
        self.path, self.begun_again = path, False
        self._tail_bytes = tail_bytes
        self._offset, self._file = 0, (0, 0)

    def lines(self) -> list[str]:
        """The new lines; an object at the end counts without the end of its line. Raises `OSError`, `ValueError`."""
        with self.path.open("rb") as file:
            found = os.fstat(file.fileno())
            self.begun_again = (found.st_dev, found.st_ino) != self._file or found.st_size < self._offset
            if self.begun_again:
                self._file, self._offset = (found.st_dev, found.st_ino), 0
                if self._tail_bytes is not None and found.st_size > self._tail_bytes:
                    file.seek(found.st_size - self._tail_bytes)
                    file.readline()  # which began before
                    self._offset = file.tell()
            file.seek(self._offset)
            text = file.read(max(0, found.st_size - self._offset))
        end = text.rfind(b"\n") + 1
        whole, rest = text[:end].decode("utf-8"), text[end:]
        if rest and _ends(rest):
            whole, end = whole + rest.decode("utf-8"), len(text)
        self._offset += end
        return [line for line in whole.split("\n") if line]


def _ends(text: bytes) -> bool:
    """Whether nothing is missing at the end of an object; it may be wrong for another reason."""
    if not text.endswith(b"}"):
        return False
    try:
        json.loads(text)
    except UnicodeDecodeError:
        return False
    except json.JSONDecodeError as problem:
        return problem.pos < len(problem.doc) and "Unterminated" not in problem.msg
    return True


def objects(lines: list[str]) -> Iterator[dict[str, Any]]:
    """The lines that are JSON objects; others, of a damaged file, are passed over."""
    for line in lines:
        try:
            value = json.loads(line, parse_int=whole_number)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value
