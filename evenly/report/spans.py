"""The spans that ranks wrote: a run's `timeline/rank0.jsonl` and so on.

A span a line: step, rank, position on the pipeline axis, kind, and begin_s and end_s of the wall clock; of a pass, or
a message of a pipeline, also stage and microbatch, of what else a rank does a name, and of an operation between ranks
its axis and waited_s. A span of a receive is the wait for it; arrived_s is when it was there. What is no pass follows
all passes of its step, and a pipeline has operations alone of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from evenly.errors import UserError
from evenly.observe.run_folder import RunFolder, whole_number
from evenly.plan.schedule import Action, Kind
from evenly.planner.timeline import Span
from evenly.report.run import amount

Row = Mapping[str, Any]


OtherKind = Literal["loading", "operation", "update"]
FIRST_S, LAST_S = -1e11, 1e12  # between these lie the times that a machine's clock may say


@dataclass(frozen=True)
class OtherSpan:
    """What a rank did that is no pass, from its beginning to its end in seconds.

    Of an operation, which was under way so long: its name, axis, and for how long of that the rank waited for it, None
    where that is not recorded.
    """

    kind: OtherKind
    name: str
    begin_s: float
    end_s: float
    axis: str = ""
    waited_s: float | None = None


@dataclass(frozen=True)
class RecordedSpans:
    """What the ranks of a run wrote: their positions on the pipeline axis, and their spans by step.

    others: what is no pass.
    """

    positions: Mapping[int, int]
    steps: Mapping[int, Mapping[int, Sequence[Span]]]
    others: Mapping[int, Mapping[int, Sequence[OtherSpan]]]

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The ranks of every replica, by position: the n-th of each position belong together, as meshes count."""
        at: dict[int, list[int]] = {}
        for rank in sorted(self.positions):
            at.setdefault(self.positions[rank], []).append(rank)
        return [*zip(*(at[position] for position in sorted(at)), strict=False)]


class _Record(NamedTuple):
    step: int
    rank: int
    position: int
    span: Span | OtherSpan


def read_recorded(folder: Path) -> RecordedSpans | None:
    """The recorded spans of the run in `folder`; None without any. Raises `UserError` for files of another kind."""
    files = [records for path in RunFolder(folder).timelines() if (records := _read(path))]
    if not files:
        return None
    positions = {records[-1].rank: records[-1].position for records in files}
    found = {records[-1].rank: _by_step(records) for records in files}
    steps = {rank: passes for rank, (passes, _) in found.items()}
    return RecordedSpans(positions, steps, {rank: others for rank, (_, others) in found.items()})


def _read(path: Path) -> list[_Record]:
    records: list[_Record] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        if lines and not lines[-1].endswith("}"):
            lines.pop()  # half written
        for line in lines:
            records.append(_record(json.loads(line, parse_int=whole_number), path.stem))
    except (OSError, ValueError) as problem:
        where = f"line {len(records) + 1} is no span: " if isinstance(problem, ValueError) else ""
        raise UserError(f"report on {path}", f"{where}{problem}", "remove the file, or name another folder") from None
    return records


def _record(value: Any, stem: str) -> _Record:
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    step, rank, position = (_whole(value, name) for name in ("step", "rank", "position"))
    begin_s, end_s = (
        float(_checked(value, name, lambda number: isinstance(number, int | float) and FIRST_S < number < LAST_S))
        for name in ("begin_s", "end_s")
    )
    kind = _checked(value, "kind", lambda kind: kind in (*get_args(Kind), *get_args(OtherKind)))
    if end_s < begin_s:
        raise ValueError("it ends before it begins")
    if stem != f"rank{rank}":
        raise ValueError(f"it is of rank {rank}")
    if kind in get_args(OtherKind):
        name = _checked(value, "name", lambda name: isinstance(name, str))
        axis = _checked({"axis": "", **value}, "axis", lambda axis: isinstance(axis, str))
        return _Record(step, rank, position, OtherSpan(kind, name, begin_s, end_s, axis, amount(value.get("waited_s"))))
    stage, microbatch = (_whole(value, name) for name in ("stage", "microbatch"))
    return _Record(step, rank, position, Span(rank, kind, stage, microbatch, begin_s, end_s))


def _whole(value: Row, name: str) -> int:
    return _checked(value, name, lambda number: isinstance(number, int) and number >= 0)


def _checked(value: Row, name: str, fits: Callable[[Any], bool]) -> Any:
    found = value.get(name)
    if not fits(found):
        raise ValueError(f"{name} is {found!r}")
    return found


def _by_step(records: Sequence[_Record]) -> tuple[dict[int, list[Span]], dict[int, list[OtherSpan]]]:
    """A resumed run does steps again: what comes twice, or before what is there, replaces everything from there on.

    A step is done again where a pass follows what is no pass, or in a pipeline a pass of the same stage and microbatch.
    """
    passes: dict[int, list[Span]] = {}
    others: dict[int, list[OtherSpan]] = {}
    actions: set[Action] = set()
    staged = not any(isinstance(record.span, OtherSpan) and record.span.kind != "operation" for record in records)
    last = -1
    for record in records:
        span, step = record.span, record.step
        action = Action(span.kind, span.stage, span.microbatch) if isinstance(span, Span) else None
        again = action in actions if staged else action is not None and step in others
        if step < last or (step == last and again):
            passes = {at: found for at, found in passes.items() if at < step}
            others = {at: found for at, found in others.items() if at < step}
            last = -1
        actions = actions if step == last else set()
        if isinstance(span, OtherSpan):
            others.setdefault(step, []).append(span)
        else:
            passes.setdefault(step, []).append(span)
            actions.add(Action(span.kind, span.stage, span.microbatch))
        last = step
    return passes, others
