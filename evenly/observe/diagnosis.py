"""Explains why ranks hang or disagree, from the records of each.

Pure: records in, a sentence out, while ranks still wait or after they have died.

The operations of a group are numbered, and ranks that agree call the same operation under the same number. So the cause
is the first number under which calls differ; or, if all agree so far, the ranks that have not reached the number which
others are waiting in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from evenly.observe.recorder import CollectiveCall, Entry, RankRecord

SILENT_AFTER_S = 5.0  # a main thread that holds the interpreter this long keeps the beat from being written


@dataclass(frozen=True)
class Diagnosis:
    """ranks: those that others wait for, or that disagree. text: the explanation. do: what to do about it."""

    ranks: tuple[int, ...]
    text: str
    do: str = "let every rank do the same operations in the same order"


def explain(
    records: Iterable[RankRecord], *, now_s: float, exit_reasons: Mapping[int, str] | None = None
) -> Diagnosis | None:
    """The cause of a stall or a failure, None where the records show none.

    exit_reasons: how ranks ended, such as 'was killed by SIGKILL'. now_s: as of `time.time()`.
    """
    by_rank = {record.rank: record for record in records}
    groups = {entry.call.group for record in by_rank.values() for entry in record.entries if entry.number}
    diagnoses = [_of_group(name, by_rank, now_s, exit_reasons or {}) for name in sorted(groups)]
    found = [diagnosis for diagnosis in diagnoses if diagnosis is not None]
    found += _of_point_to_point(by_rank, now_s, exit_reasons or {})
    waiting = {rank for rank, record in by_rank.items() if is_waiting(record)}
    # Of several, the one whose ranks are not waiting themselves.
    return min(found, key=lambda diagnosis: len(waiting.intersection(diagnosis.ranks)), default=None)


def disagreement(calls: Mapping[int, CollectiveCall]) -> str:
    """Which ranks call what under one number; '' if all calls agree."""
    asked: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        asked.setdefault(call.asked(), []).append(rank)
    if len(asked) < 2:
        return ""
    where = {what: calls[who[0]].where for what, who in asked.items()}
    places = {what: f" at {line}" if line else "" for what, line in where.items()}
    return "; ".join(f"{ranks_in_words(who)}: {what}{places[what]}" for what, who in asked.items())


def inside(record: RankRecord) -> Entry | None:
    return next((entry for entry in record.entries if entry.left_s is None), None)


def is_waiting(record: RankRecord) -> bool:
    """Whether a rank is in an operation, and not in the user's code meanwhile: it may read ahead."""
    return not record.in_own_code and inside(record) is not None


# ------------------------------------------------------------------------------------------------ collectives
def _of_group(
    group: str, by_rank: Mapping[int, RankRecord], now_s: float, exit_reasons: Mapping[int, str]
) -> Diagnosis | None:
    entries = {rank: _entries_of(by_rank[rank], group) for rank in ranks_of_group(group) if rank in by_rank}
    for number in sorted({number for numbers in entries.values() for number in numbers}):
        calls = {rank: numbers[number].call for rank, numbers in entries.items() if number in numbers}
        if words := disagreement(calls):
            text = f"the ranks ask for different things in operation #{number} of group {group}: {words}"
            return Diagnosis(_minority(calls), text)
    reached = {rank: max(numbers, default=0) for rank, numbers in entries.items()}
    last = max(reached.values(), default=0)
    arrived = [rank for rank, number in reached.items() if number == last]
    missing = [rank for rank, number in reached.items() if number < last]
    missing += [rank for rank in exit_reasons if rank in ranks_of_group(group) and rank not in reached]
    entry = next((entries[rank][last] for rank in arrived if last and entries[rank][last].left_s is None), None)
    if entry is None or not missing:
        return None
    statuses = "; ".join(_status_of(rank, by_rank.get(rank), now_s, exit_reasons) for rank in missing)
    waiting = [rank for rank in arrived if rank not in exit_reasons]
    waits = f"; {ranks_in_words(waiting)} wait{'s' * (len(waiting) == 1)}" if waiting else ""
    text = f"{ranks_in_words(missing)} did not reach {describe(entry)}; {statuses}{waits}"
    return Diagnosis(tuple(missing), text)


def _entries_of(record: RankRecord, group: str) -> dict[int, Entry]:
    return {entry.number: entry for entry in record.entries if entry.number and entry.call.group == group}


def _minority(calls: Mapping[int, CollectiveCall]) -> tuple[int, ...]:
    """The ranks whose call differs from that of most; of equally many, from that of the lowest rank."""
    asked = {rank: call.asked() for rank, call in sorted(calls.items())}
    usual = max(asked.values(), key=[*asked.values()].count)
    return tuple(rank for rank, what in asked.items() if what != usual)


def _status_of(rank: int, record: RankRecord | None, now_s: float, exit_reasons: Mapping[int, str]) -> str:
    """`it is in Lines.__getitem__ (data.py:31) since 40 s`."""
    if record is None:
        return f"rank {rank} " + exit_reasons.get(rank, "has not begun to communicate")
    entry = None if record.in_own_code else inside(record)  # it may read ahead while an operation is under way
    waits = f"in {describe(entry)} of group {entry.call.group}" if entry else f"in {record.where or 'an unknown place'}"
    if rank in exit_reasons:
        return f"rank {rank} {exit_reasons[rank]}, last seen {waits}"
    if record.state == "ended":
        operations = max((entry.serial for entry in record.entries), default=0)
        return f"rank {rank} has come to its end, after {operations} operations"
    if now_s - record.beat_s > SILENT_AFTER_S:
        return f"rank {rank} has been silent since {now_s - record.beat_s:.0f} s, last seen {waits}"
    since_s = now_s - (entry.entered_s if entry else record.since_s)
    return f"rank {rank} is {waits} since {since_s:.0f} s"


# --------------------------------------------------------------------------------------------- point to point
_PEER = re.compile(r"(?:to|from) (\d+)")


def _of_point_to_point(
    by_rank: Mapping[int, RankRecord], now_s: float, exit_reasons: Mapping[int, str]
) -> list[Diagnosis]:
    diagnoses: list[Diagnosis] = []
    for rank, record in by_rank.items():
        entry = inside(record) if is_waiting(record) else None
        peer = _PEER.search(entry.call.detail) if entry and not entry.number else None
        if entry and peer and rank not in exit_reasons:
            other = ranks_of_group(entry.call.group)[int(peer[1])]
            where = _status_of(other, by_rank.get(other), now_s, exit_reasons)
            text = f"rank {rank} waits in {describe(entry)}; {where}"
            diagnoses.append(Diagnosis((other,), text))
    return diagnoses


# ------------------------------------------------------------------------------------------------------ words
def describe(entry: Entry) -> str:
    """`all_reduce #456 (train.py:88, gradient of blocks.7)`."""
    number = f" #{entry.number}" if entry.number else f" {entry.call.detail}"
    about = ", ".join(part for part in (entry.call.where, entry.call.label) if part)
    return f"{entry.call.operation}{number}" + (f" ({about})" if about else "")


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    return f"rank{'s' * (len(ranks) != 1)} {number_ranges(ranks)}"


def number_ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> '0-2, 5'; the inverse of `numbers_of`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def numbers_of(ranges: str) -> list[int]:
    """'0-2, 5' -> [0, 1, 2, 5]."""
    numbers: list[int] = []
    for part in filter(None, ranges.split(", ")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def ranks_of_group(label: str) -> list[int]:
    """World ranks of a group, from its label: 'data [0-3]' -> [0, 1, 2, 3]; none from another text."""
    found = re.search(r"\[([\d, -]*)\]$", label)
    return numbers_of(found[1]) if found else []
