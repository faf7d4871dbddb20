"""Under which plans a run was started, one after the other, and how those ended that another one has followed.

Each start writes a line, and the launcher one more where it goes on under another plan. No line is needed to go on.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from evenly.observe.run_folder import RunFolder, whole_number
from evenly.observe.sinks import JsonLines


@dataclass(frozen=True, kw_only=True)
class EndedAttempt:
    """A start that another plan has followed.

    plan: its text. rank, step: that had no room, None where that is unknown. found: what was raised.
    from_step: of the checkpoint that the run goes on from; None: from the beginning.
    """

    plan: str
    ended: Literal["no room", "refused"]
    rank: int | None
    step: int | None
    found: str
    from_step: int | None


def note_start(folder: RunFolder, plan: str, *, new: bool) -> None:
    """Writes that the run is started under `plan`; `new` forgets what a former run in this folder has left."""
    if new:
        with suppress(OSError):
            folder.attempts.unlink()
    _add(folder, {"plan": plan})


def note_end(folder: RunFolder, attempt: EndedAttempt) -> None:
    """Writes how the newest start has ended."""
    _add(folder, asdict(attempt))


def _add(folder: RunFolder, record: dict[str, Any]) -> None:
    lines = JsonLines(folder.attempts)
    lines.add({"time": time.time(), **record})
    lines.close()


def plans_started(folder: RunFolder) -> list[str]:
    """The plans of all starts, in their order."""
    return [record["plan"] for record in _records(folder) if "ended" not in record]


def ended_attempts(folder: RunFolder) -> list[EndedAttempt]:
    names = EndedAttempt.__dataclass_fields__
    ended = [record for record in _records(folder) if "ended" in record and names.keys() <= record.keys()]
    return [EndedAttempt(**{name: record[name] for name in names}) for record in ended]


def _records(folder: RunFolder) -> list[dict[str, Any]]:
    """The lines that are such records; a file that is damaged has fewer."""
    found: list[dict[str, Any]] = []
    with suppress(OSError, UnicodeError):
        for line in folder.attempts.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, RecursionError):
                record = json.loads(line, parse_int=whole_number)
                if isinstance(record, dict) and isinstance(record.get("plan"), str):
                    found.append(record)
    return found
