"""The spans that the ranks of a pipeline wrote: a run's `timeline/rank0.jsonl` and so on.

A span a line: step, rank, position on the pipeline axis, kind, stage, microbatch, and begin_s and end_s of the wall
clock. A span of a receive is the wait for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, get_args

from evenly.errors import UserError
from evenly.observe.run_folder import RunFolder, whole_number
from evenly.plan.schedule import Action, Kind
from evenly.planner.timeline import Span

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RecordedPipeline:
    """What the ranks of a run wrote: their positions on the pipeline axis, and their spans by step."""

    positions: Mapping[int, int]
    steps: Mapping[int, Mapping[int, Sequence[Span]]]

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The ranks of every replica, by position: the n-th of each position belong together, as meshes count."""
        at: dict[int, list[int]] = {}
        for rank in sorted(self.positions):
            at.setdefault(self.positions[rank], []).append(rank)
        return [*zip(*(at[position] for position in sorted(at)), strict=False)]


class _Record(NamedTuple):
    step: int
    position: int
    span: Span


def read_recorded(folder: Path) -> RecordedPipeline | None:
    """The recorded spans of the run in `folder`; None without any. Raises `UserError` for files of another kind."""
    files = [records for path in RunFolder(folder).timelines() if (records := _read(path))]
    if not files:
        return None
    positions = {records[-1].span.rank: records[-1].position for records in files}
    return RecordedPipeline(positions, {records[-1].span.rank: _by_step(records) for records in files})


def _read(path: Path) -> list[_Record]:
    records: list[_Record] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        if lines and not lines[-1].endswith("}"):
            lines.pop()  # half written
        for line in lines:
            records.append(_record(json.loads(line, parse_int=whole_number), path.stem))
    except (OSError, ValueError) as problem:
        where = f"line {len(records) + 1} is no span of a pipeline: " if isinstance(problem, ValueError) else ""
        raise UserError(f"report on {path}", f"{where}{problem}", "remove the file, or name another folder") from None
    return records


def _record(value: Any, stem: str) -> _Record:
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    step, rank, position, stage, microbatch = (
        _checked(value, name, lambda number: isinstance(number, int) and number >= 0)
        for name in ("step", "rank", "position", "stage", "microbatch")
    )
    begin_s, end_s = (
        float(_checked(value, name, lambda number: isinstance(number, int | float) and isfinite(number)))
        for name in ("begin_s", "end_s")
    )
    kind = _checked(value, "kind", lambda kind: kind in get_args(Kind))
    if end_s < begin_s:
        raise ValueError("it ends before it begins")
    if stem != f"rank{rank}":
        raise ValueError(f"it is of rank {rank}")
    return _Record(step, position, Span(rank, kind, stage, microbatch, begin_s, end_s))


def _checked(value: Row, name: str, fits: Callable[[Any], bool]) -> Any:
    found = value.get(name)
    if not fits(found):
        raise ValueError(f"{name} is {found!r}")
    return found


def _by_step(records: Iterable[_Record]) -> dict[int, list[Span]]:
    """A resumed run does steps again: what comes twice, or before what is there, replaces everything from there on."""
    steps: dict[int, dict[Action, Span]] = {}
    last = 0
    for record in records:
        span, step = record.span, record.step
        action = Action(span.kind, span.stage, span.microbatch)
        if step < last or action in steps.get(step, ()):
            steps = {number: spans for number, spans in steps.items() if number < step}
        steps.setdefault(step, {})[action] = span
        last = step
    return {step: [*spans.values()] for step, spans in steps.items()}
