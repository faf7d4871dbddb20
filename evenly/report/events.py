"""What befell a run: its starts, ends and failures, rank by rank, and in words."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import gmtime, strftime
from typing import Literal, TypeGuard

from evenly.observe.attempts import ended_attempts
from evenly.observe.diagnosis import ranks_in_words
from evenly.observe.run_folder import RunFolder
from evenly.report.growing import GrowingFile, objects

EventName = Literal["started", "evaluated", "saved", "failed", "ended"]
NAMES: tuple[EventName, ...] = ("started", "evaluated", "saved", "failed", "ended")


@dataclass(frozen=True)
class RankEvent:
    """A line of `events/rank*.jsonl`: when it was, of which rank, and after which step; size: of the world."""

    time_s: float
    rank: int
    event: EventName
    step: int
    size: int | None = None


class EventReader:
    """The events of the run in a folder, each read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = RunFolder(folder)
        self._files: dict[int, GrowingFile] = {}
        self._found: dict[int, list[RankEvent]] = {}

    def read(self, ranks: Sequence[int] | None = None) -> list[RankEvent]:
        """All events so far, by time; of `ranks` alone where that is given."""
        for rank in self._folder.ranks_with_events() if ranks is None else ranks:
            file = self._files.setdefault(rank, GrowingFile(self._folder.events(rank)))
            with suppress(OSError, ValueError):
                lines = file.lines()
                if file.begun_again:
                    self._found[rank] = []
                self._found.setdefault(rank, []).extend(_events(lines, rank))
        return sorted((one for found in self._found.values() for one in found), key=lambda one: (one.time_s, one.rank))


def _events(lines: list[str], rank: int) -> list[RankEvent]:
    found: list[RankEvent] = []
    for record in objects(lines):
        name, step, time_s, size = (record.get(key) for key in ("event", "step", "time", "size"))
        known = NAMES[NAMES.index(name)] if name in NAMES else None
        if known is not None and _is_count(step) and isinstance(time_s, int | float) and 0 <= time_s < 1e11:
            found.append(RankEvent(float(time_s), rank, known, step, size if _is_count(size) else None))
    return found


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**15


def starts(events: Sequence[RankEvent]) -> list[RankEvent]:
    """The starts of the first rank, each of which is one of the run's."""
    return [one for one in events if one.rank == 0 and one.event == "started"]


HEADS = ("when", "step", "what")


def rows(events: Sequence[RankEvent], slow: Sequence[str], folder: Path | None) -> list[tuple[str, str, str]]:
    """Starts, ends, failures, plans without room and slow ranks, by time: when, at which step, what."""
    found: list[tuple[float, str, str]] = []
    for number, one in enumerate(starts(events)):
        ranks = f" on {one.size} rank{'s' * (one.size != 1)}" if one.size else ""
        words = "started" if number == 0 else "started again" if one.step == 0 else "went on"
        found.append((one.time_s, str(one.step), f"{words}{ranks}"))
    found += [(one.time_s, str(one.step), "ended") for one in events if one.event == "ended" and one.rank == 0]
    found += _failures(events)
    attempts = ended_attempts(RunFolder(folder)) if folder is not None else []
    texts = [(_when(time_s), step, what) for time_s, step, what in sorted(found)]
    for one in attempts:
        of_rank = "" if one.rank is None else f"rank {one.rank}: "
        texts.append(("", "" if one.step is None else str(one.step), f"no room under {one.plan}: {of_rank}{one.found}"))
    return texts + [("", "", f"slow: {words}") for words in slow]


def _failures(events: Sequence[RankEvent]) -> list[tuple[float, str, str]]:
    """Ranks that failed after the same step within a minute are one failure."""
    found: list[tuple[float, int, list[int]]] = []
    for one in events:
        if one.event == "failed":
            if found and found[-1][1] == one.step and one.time_s - found[-1][0] < 60:
                found[-1][2].append(one.rank)
            else:
                found.append((one.time_s, one.step, [one.rank]))
    return [(time_s, str(step), f"{ranks_in_words(sorted({*ranks}))} failed") for time_s, step, ranks in found]


def _when(time_s: float) -> str:
    return f"{strftime('%Y-%m-%d %H:%M:%S', gmtime(time_s))} UTC"
