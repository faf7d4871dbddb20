"""Ranks that do not get on: for how long each has stood still, and which of them is the cause.

Pure: records in, as they are seen at one look after another; no clock is read here. A rank gets on when its count of
ticks moves; it is silent when its heartbeat does not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from evenly.observe.diagnosis import SILENT_AFTER_S, Diagnosis, describe, explain, inside, ranks_in_words
from evenly.observe.recorder import RankRecord

STEP_LIMIT_S = 180.0  # in a step, once the first is done
LIMIT_S = 540.0  # else: the first step, compiling, evaluations, checkpoints, code between steps; below NCCL's own limit
STEPS_LIMIT = 3  # at least as long as this many steps took

# Time between two looks beyond this is nobody's: the machine was suspended, or the launcher stopped.
MOST_BETWEEN_LOOKS_S = 5.0

# Where a rank by itself has to get on. Building a model or the user's own loop may take any time.
LIMITED = ("first step", "step", "evaluating")


def limit_of(record: RankRecord, asked_s: float | None) -> float:
    """For how long a rank in the state of `record` may stand still, in seconds; asked_s: what the user has set."""
    usual_s = asked_s or (STEP_LIMIT_S if record.state == "step" else LIMIT_S)
    return max(usual_s, STEPS_LIMIT * record.longest_step_s)


@dataclass
class _Still:
    """What was seen of a rank last, and for how long it has been so."""

    ticks: int
    beat_s: float
    still_s: float = 0.0
    silent_s: float = 0.0


class Standstills:
    """Adds up, look by look, for how long ranks have stood still.

    limit_s: for how long they may; None: by what they do, see `limit_of`.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._ranks: dict[int, _Still] = {}

    def look(self, records: Iterable[RankRecord], passed_s: float) -> None:
        """Takes what ranks have recorded, `passed_s` seconds after the look before."""
        passed_s = min(passed_s, MOST_BETWEEN_LOOKS_S)
        for record in records:
            if (seen := self._ranks.get(record.rank)) is None:
                self._ranks[record.rank] = _Still(record.ticks, record.beat_s)
                continue
            seen.still_s = seen.still_s + passed_s if seen.ticks == record.ticks else 0.0
            seen.silent_s = seen.silent_s + passed_s if seen.beat_s == record.beat_s else 0.0
            seen.ticks, seen.beat_s = record.ticks, record.beat_s

    def overdue(self, records: Collection[RankRecord]) -> dict[int, float]:
        """The ranks that have stood still for longer than any of them may, with the seconds."""
        running = [record for record in records if record.state != "ended"]
        limit_s = max((limit_of(record, self._limit_s) for record in running), default=0.0)
        still = {record.rank: self._ranks[record.rank].still_s for record in running if record.rank in self._ranks}
        return {rank: seconds for rank, seconds in still.items() if seconds > limit_s}

    def silent(self, ranks: Iterable[int]) -> dict[int, float]:
        """Those of `ranks` whose heartbeat stands still, with the seconds."""
        return {rank: s for rank in ranks if rank in self._ranks and (s := self._ranks[rank].silent_s) > SILENT_AFTER_S}


def explain_stall(
    records: Collection[RankRecord],
    overdue: Mapping[int, float],
    silent: Mapping[int, float],
    stopped: Collection[int],
    *,
    now_s: float,
) -> Diagnosis | None:
    """The cause of a stall, None where the records show none: it may lie on another node.

    overdue, silent: ranks that stand still, and whose heartbeat does, with the seconds, by `Standstills`.
    stopped: ranks whose processes the system has stopped.
    """
    by_rank = {record.rank: record for record in records}
    if frozen := sorted({*stopped, *silent}):
        words = "; ".join(_frozen(rank, by_rank.get(rank), silent.get(rank, 0.0), rank in stopped) for rank in frozen)
        return Diagnosis(tuple(frozen), words + _waiting(records, frozen), FROZEN)
    if writing := sorted(rank for rank in overdue if by_rank[rank].writing):
        words = "; ".join(
            f"rank {r} writes the checkpoint {by_rank[r].writing}, and has not got on for {overdue[r]:.0f} s"
            for r in writing
        )
        return Diagnosis(tuple(writing), words + _waiting(records, writing), STORAGE)
    if found := explain(records, now_s=now_s):
        return found
    stuck = sorted(rank for rank in overdue if _is_stuck(by_rank[rank]))
    own = [rank for rank in stuck if by_rank[rank].in_own_code]
    if not own and all(record.rank in overdue for record in records if record.state != "ended"):
        own = stuck  # of another it may turn out a moment later that it is in the user's code
    if not own:
        return None
    words = "; ".join(f"rank {r} has not got on for {overdue[r]:.0f} s: it is {_place(by_rank[r])}" for r in own)
    return Diagnosis(tuple(own), words + _waiting(records, own), STUCK)


FROZEN = "let it run, or look at what its machine and its devices do"
STORAGE = "look at that storage, which may hang; --stall-limit allows more time"
STUCK = "look for a loop or a wait without end there; --stall-limit allows more time"


def _is_stuck(record: RankRecord) -> bool:
    return record.state in LIMITED and (record.in_own_code or inside(record) is None)


def _frozen(rank: int, record: RankRecord | None, silent_s: float, is_stopped: bool) -> str:
    what = f"rank {rank}'s process is stopped (SIGSTOP or the like)" if is_stopped else f"rank {rank} is frozen"
    since = f", silent since {silent_s:.0f} s" if silent_s else ""
    return what + since + ("" if record is None else f", last seen {_place(record)}")


def _place(record: RankRecord) -> str:
    entry = None if record.in_own_code else inside(record)
    if entry is not None:
        return f"in {describe(entry)}"
    doing = {"first step": ", in its first step", "evaluating": ", in an evaluation"}.get(record.state, "")
    return f"in {record.where or 'an unknown place'}{doing}"


def _waiting(records: Iterable[RankRecord], but: Collection[int]) -> str:
    waiting = {record.rank: entry for record in records if record.rank not in but and (entry := inside(record))}
    if not waiting:
        return ""
    ranks = sorted(waiting)
    return f"; {ranks_in_words(ranks)} wait{'s' * (len(ranks) == 1)} in {describe(waiting[ranks[0]])}"
