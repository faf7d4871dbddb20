"""Zero-bubble orders made for given times, each rank doing at any moment the best that it can: to predict others' runs.

The schedules ZB-1p and ZB-2p of Qi et al. 2024 are of this kind, with a limit of once and twice the number of ranks.
With twice, each rank works without a gap where times are equal; `zb-2p` is registered so. With once, looking no further
than the moment costs some percent: the orders of evenly's `zero-bubble` (ZB-H1) hold as much and take less time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heapify, heappop, heappush

from evenly.plan.orders import Step, register_schedule
from evenly.plan.schedule import Action, Kind, ScheduleRules
from evenly.planner.timeline import Costs

CLOSE = 1e-9  # relative: what comes so little later than another comes with it


@dataclass
class _Rank:
    """What a rank has done, and when inputs and gradients came or will come, in the order of microbatches."""

    inputs_s: list[float] = field(default_factory=list[float])
    gradients_s: list[float] = field(default_factory=list[float])
    free_s: float = 0.0
    forwards: int = 0
    backwards: int = 0
    weights: int = 0
    order: list[Action] = field(default_factory=list[Action])

    def choice(self, now_s: float, limit: int) -> Kind | None:
        """The kind of pass that comes next; None where all there is has yet to come."""
        if _has_come(self.gradients_s, self.backwards, now_s):
            return "backward_input"
        if _has_come(self.inputs_s, self.forwards, now_s) and self.forwards - self.weights < limit:
            return "forward"
        return "backward_weight" if self.weights < self.backwards else None

    def do(self, kind: Kind, rank: int) -> Action:
        """Adds the pass to the order."""
        number = {"forward": self.forwards, "backward_input": self.backwards, "backward_weight": self.weights}[kind]
        self.forwards += kind == "forward"
        self.backwards += kind == "backward_input"
        self.weights += kind == "backward_weight"
        self.order.append(Action(kind, rank, number))
        return self.order[-1]


def greedy_orders(ranks: int, microbatches: int, costs: Costs, limit: int) -> tuple[tuple[Action, ...], ...]:
    """For every rank what it computes in a step, in order, with at most `limit` microbatches in flight."""
    return tuple(tuple(state.order) for state in _done(ranks, microbatches, costs, limit))


def _done(ranks: int, microbatches: int, costs: Costs, limit: int) -> list[_Rank]:
    assert limit >= 1
    states = [_Rank(inputs_s=[0.0] * microbatches), *(_Rank() for _ in range(ranks - 1))]
    waking = [(0.0, rank) for rank in range(ranks)]
    heapify(waking)
    while waking:
        now_s, rank = heappop(waking)
        if states[rank].free_s <= now_s and (kind := states[rank].choice(now_s, limit)) is not None:
            action = states[rank].do(kind, rank)
            states[rank].free_s = end_s = now_s + costs.of(action)
            heappush(waking, (end_s, rank))
            _tell(states, action, end_s, costs.transfer_s, waking)
    return states


def _tell(
    states: Sequence[_Rank], action: Action, end_s: float, transfer_s: float, waking: list[tuple[float, int]]
) -> None:
    """Lets the next rank have the output, or the one before the gradient; the last rank has its gradient at once."""
    rank = action.stage
    if action.kind == "forward" and rank == len(states) - 1:
        states[rank].gradients_s.append(end_s)
    elif action.kind == "forward":
        states[rank + 1].inputs_s.append(end_s + transfer_s)
        heappush(waking, (end_s + transfer_s, rank + 1))
    elif action.kind == "backward_input" and rank:
        states[rank - 1].gradients_s.append(end_s + transfer_s)
        heappush(waking, (end_s + transfer_s, rank - 1))


def _has_come(times_s: Sequence[float], number: int, now_s: float) -> bool:
    return number < len(times_s) and times_s[number] <= now_s * (1 + CLOSE)


@cache
def _of_equal_times(ranks: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    one = [1.0] * ranks
    costs = Costs(forward=one, backward=[2.0] * ranks, backward_input=one, backward_weight=one)
    return greedy_orders(ranks, microbatches, costs, 2 * ranks)


def _rule(rank: int, ranks: int, _: int, microbatches: int) -> list[Step]:
    return [(action.kind, 0) for action in _of_equal_times(ranks, microbatches)[rank]]


register_schedule("zb-2p", ScheduleRules(stages=1, splits_backward=True, steady=True), _rule)
