"""When operations between ranks were under way, and when a rank waited for them; pure.

Communication is *hidden* as far as it is under way while the rank does something else. Seconds of an axis are those in
which at least one of its operations was under way, or waited for: what several have in common counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from evenly.plan.schedule import ActionSpan, Kind


class UnderWay(NamedTuple):
    """An operation of one rank, which waits for it from `waited_from_s` to its end; in seconds of one clock.

    begin_s:       when it was begun; of a message, by its sender.
    waited_from_s: as late as `end_s` where it was complete before anybody waited.
    end_s:         when it was complete, or the rank knew of it where it waited.
    """

    begin_s: float
    waited_from_s: float
    end_s: float


@dataclass(slots=True)
class Timing:
    """What is noted of an operation of this rank; axis: the name of its group. On the clock of `time.perf_counter`.

    complete_s: when it was complete, where that was noticed apart from the wait.
    waited_from_s, ended_s: of the wait for it; None where there was none so far.
    """

    operation: str
    axis: str
    label: str
    begin_s: float
    complete_s: float | None = None
    waited_from_s: float | None = None
    ended_s: float | None = None

    def under_way(self) -> UnderWay | None:
        """None where it is not known to have ended."""
        if self.waited_from_s is None or self.ended_s is None:
            return None if self.complete_s is None else UnderWay(self.begin_s, self.complete_s, self.complete_s)
        if self.complete_s is not None and self.complete_s <= self.waited_from_s:
            return UnderWay(self.begin_s, self.complete_s, self.complete_s)
        return UnderWay(self.begin_s, self.waited_from_s, self.ended_s)


class Communication(NamedTuple):
    """For how many seconds something was under way along an axis, and for how many of them the rank waited for it."""

    under_way_s: float
    waited_s: float


# The pass that sends what a receive waits for, and at which stage, counted from the receiver's.
_SENT_BY: Mapping[Kind, tuple[Kind, int]] = {
    "recv_forward": ("send_forward", -1),
    "recv_backward": ("send_backward", 1),
}


def messages(received: Iterable[ActionSpan], sent: Iterable[ActionSpan]) -> list[UnderWay]:
    """The messages that a rank of a pipeline has `received` in a step; sent: the passes of all ranks of its pipeline.

    A receiver waits for a message only once that is sent: before, it waits for the stage that computes it.
    """
    begun = {(span.kind, span.stage, span.microbatch): span.begin_s for span in sent}
    found: list[UnderWay] = []
    for span in received:
        if span.kind in _SENT_BY:
            kind, step = _SENT_BY[span.kind]
            begin_s = begun.get((kind, span.stage + step, span.microbatch))
            if begin_s is not None:
                found.append(_message(span, begin_s))
    return found


def _message(span: ActionSpan, begin_s: float) -> UnderWay:
    end_s = max(begin_s, span.end_s if span.arrived_s is None else min(span.arrived_s, span.end_s))
    return UnderWay(begin_s, min(end_s, max(begin_s, span.begin_s)), end_s)


def communication(found: Sequence[UnderWay]) -> Communication:
    return Communication(
        covered([(one.begin_s, one.end_s) for one in found]), covered([(one.waited_from_s, one.end_s) for one in found])
    )


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """The seconds that lie in at least one of the spans, each from its beginning to its end."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def mean_by_axis(ranks: Sequence[Mapping[str, Communication]]) -> dict[str, dict[str, float]]:
    """By axis the mean of all ranks: under_way_s, waited_s, and hidden, the share of the first that nobody waited."""
    found: dict[str, dict[str, float]] = {}
    for axis in dict.fromkeys(axis for of_rank in ranks for axis in of_rank):
        under_way_s, waited_s = (
            sum(of_rank[axis][number] for of_rank in ranks if axis in of_rank) / len(ranks) for number in (0, 1)
        )
        hidden = 1 - waited_s / under_way_s if under_way_s else 0.0
        found[axis] = {"under_way_s": under_way_s, "waited_s": waited_s, "hidden": hidden}
    return found
