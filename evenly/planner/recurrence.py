"""How long a schedule takes, quickly: the ends of its passes one from another, and only until they repeat. Pure.

A pass ends its seconds after the later of two ends: that of the pass before it on its rank, and that of the pass of
another rank that it needs, with what the message takes on top. What it needs of its own rank comes earlier there.

Put into the order in which they would begin if all took equal time, the passes of a long step repeat round by round:
each needs what is as far back as for its like of the round before. A step of more microbatches has more of these
rounds, and nothing else. Once all ends that later passes can still need are equally much later than those of some
rounds before, so are the next, and so on: the rest of the rounds need not be gone through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from evenly.plan.orders import Pass, passes
from evenly.plan.schedule import SCHEDULES, Kind, Schedule, rank_of_stage

KINDS: Sequence[Kind] = ("forward", "backward", "backward_input", "backward_weight")
ROUNDING = 1e-12  # of ends, relative
ENOUGH = 5  # times as many microbatches as ranks show the rounds of every schedule

Message = Pass  # the pass that it follows; where a backward pass is split, "backward" stands for its first half
Link = tuple[int, int, int]  # as in `Recurrence`


@dataclass(frozen=True)
class Recurrence:
    """The passes of a step in an order in which each follows what it needs: `head`, rounds equal to `body`, `tail`.

    A pass is a link of three numbers: its kind and stage as the kind's place in KINDS * number of stages + stage; how
    many places before it the pass before it on its rank stands, or the beginning; and likewise the one that it needs
    of another rank, again the one before on its own where it needs none.

    reach:  how many places back the passes of rounds and tail need others, at most.
    rounds: in how many rounds like `body` the head ends, with `reach` places before them.
    """

    head: Sequence[Link]
    body: Sequence[Link]
    tail: Sequence[Link]
    reach: int
    rounds: int

    def duration(self, further: int, seconds: Sequence[float], delays: Sequence[float]) -> float:
        """Of the step with `further` rounds between head and tail; `seconds` of passes and `delays` of the messages to
        them by kind and stage, as links number them.
        """
        ends = [0.0]
        _follow(ends, self.head, seconds, delays)
        skipped = 0.0
        while further:
            period, later = self._period(ends)
            if period:
                skipped += further // period * later
                further %= period
            if further:
                _follow(ends, self.body, seconds, delays)
                further -= 1
        _follow(ends, self.tail, seconds, delays)
        return max(ends) + skipped

    def _period(self, ends: Sequence[float]) -> tuple[int, float]:
        """After how many rounds the ends repeat, and how much later; 0 rounds where they do not yet."""
        close = ROUNDING * ends[-1]
        needed = range(-self.reach, 0)
        for rounds in range(1, self.rounds + 1):
            back = rounds * len(self.body)
            later = ends[-1] - ends[-1 - back]
            if abs(ends[-self.reach] - ends[-self.reach - back] - later) <= close and all(
                -close <= ends[place] - ends[place - back] - later <= close for place in needed
            ):
                return rounds, later
        return 0, 0.0


def _follow(ends: list[float], links: Sequence[Link], seconds: Sequence[float], delays: Sequence[float]) -> None:
    """Appends the ends of the passes."""
    append = ends.append
    for kind, before, needed in links:
        free, ready = ends[-before], ends[-needed] + delays[kind]
        append((free if free > ready else ready) + seconds[kind])


def duration(
    schedule: Schedule,
    ranks: int,
    stages_per_rank: int,
    microbatches: int,
    seconds: Sequence[float],
    delays: Sequence[float],
) -> float:
    """From the beginning of a step to its last end; `seconds` and `delays` as in `Recurrence.duration`."""
    length, few = _round_length(schedule, ranks, microbatches), ENOUGH * ranks
    if not length or microbatches < few:
        return recurrence(schedule, ranks, stages_per_rank, microbatches).duration(0, seconds, delays)
    made = recurrence(schedule, ranks, stages_per_rank, few)
    if not made.rounds:  # registered as steady, but its passes do not repeat
        return recurrence(schedule, ranks, stages_per_rank, microbatches).duration(0, seconds, delays)
    return made.duration((microbatches - few) // length, seconds, delays)


def _round_length(schedule: Schedule, ranks: int, microbatches: int) -> int:
    """Microbatches after which a schedule repeats; 0 where it does not, or where a longer step has other rounds."""
    rules = SCHEDULES[schedule]
    if rules.equal_rounds:
        return ranks if microbatches % ranks == 0 else 0
    return 1 if rules.steady else 0


@lru_cache(maxsize=256)
def recurrence(schedule: Schedule, ranks: int, stages_per_rank: int, microbatches: int) -> Recurrence:
    """The passes of the schedule; `microbatches` is a runnable number. Without rounds all of them are its head."""
    placed = rank_of_stage(schedule, ranks, stages_per_rank)
    links = _links(_by_turn(passes(schedule, ranks, stages_per_rank, microbatches), placed), placed)
    size = 0
    if more := _round_length(schedule, ranks, microbatches):
        longer = passes(schedule, ranks, stages_per_rank, microbatches + more)
        size = sum(map(len, longer)) - len(links)
    end, rounds = _longest_run(links, size) if size else (len(links), 0)
    body = links[end - size : end] if rounds else []
    reach = max((place for _, *both in body + links[end:] for place in both), default=0)
    return Recurrence(links[:end], body, links[end:], reach, min(rounds, (end - reach) // max(1, size)))


def _longest_run(links: Sequence[Link], size: int) -> tuple[int, int]:
    """Where the longest run of links ends that are as those `size` before, and how many times `size` it is long."""
    end = longest = run = 0
    for place in range(size, len(links)):
        run = run + 1 if links[place] == links[place - size] else 0
        end, longest = (place + 1, run) if run >= longest else (end, longest)
    return end, longest // size


def _by_turn(orders: Iterable[Iterable[Pass]], placed: Sequence[int]) -> list[Pass]:
    found: list[tuple[int, int, Pass]] = []
    ends: dict[Message, int] = {}
    left = [deque(order) for order in orders]
    free = [0] * len(left)
    while any(left):
        for rank, order in enumerate(left):
            while order and (ready := _ready(order[0], placed, ends)) is not None:
                found.append((max(free[rank], ready), rank, order[0]))
                free[rank] = ends[message_of(order.popleft())] = max(free[rank], ready) + 1
    return [one for _, _, one in sorted(found)]


def _ready(one: Pass, placed: Sequence[int], ends: Mapping[Message, int]) -> int | None:
    needed = message_to(one, placed)
    return ends.get(needed) if needed else 0


def _links(ordered: Sequence[Pass], placed: Sequence[int]) -> list[Link]:
    found: list[Link] = []
    latest = [0] * len(placed)  # by rank, from 1
    numbers: dict[Message, int] = {}
    for number, one in enumerate(ordered, start=1):
        kind, stage, _ = one
        before, message = latest[placed[stage]], message_to(one, placed)
        needed = numbers[message] if message else before
        found.append((KINDS.index(kind) * len(placed) + stage, number - before, number - needed))
        latest[placed[stage]] = numbers[message_of(one)] = number
    return found


def message_of(one: Pass) -> Message:
    """What others can wait for: gradients of inputs come with either kind of backward pass."""
    kind, stage, microbatch = one
    return ("backward" if kind == "backward_input" else kind, stage, microbatch)


def message_to(one: Pass, placed: Sequence[int]) -> Message | None:
    """What a pass waits for from another rank; `placed` as `rank_of_stage` gives it."""
    kind, stage, microbatch = one
    source = stage - 1 if kind == "forward" else stage + 1
    if kind == "backward_weight" or not 0 <= source < len(placed) or placed[source] == placed[stage]:
        return None
    return ("forward" if kind == "forward" else "backward", source, microbatch)
