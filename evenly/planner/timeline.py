"""When each rank of a pipeline does what: a simulation of its schedule from the seconds that each action takes. Pure.

`simulate` tells it of every action of any orders; `step_seconds` of a schedule as a whole, quick enough to compare
thousands of plans.

The *bubble* of a rank is its share of the step in which it computes nothing; the step lasts from the first beginning
on any rank to the last end on any rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from operator import mul
from statistics import fmean

from evenly.errors import UserError
from evenly.plan.orders import compute_orders, passes
from evenly.plan.schedule import COMPUTE, Action, Kind, Schedule, rank_of_stage, runnable, splits_backward
from evenly.planner.recurrence import KINDS, duration, message_to

Orders = Sequence[Sequence[Action]]
BACKWARD: Sequence[Kind] = ("backward", "backward_input")
SENDS: Sequence[Kind] = ("send_forward", "send_backward")


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds (or any other unit of time) of every stage's actions on one microbatch, and of a message.

    A schedule that does not split the backward pass needs no `backward_input` and `backward_weight`. `transfer_s` is
    from the end of a pass until another rank has what it made, `send_s` how long sending keeps a rank from its next
    action. `sizes`: how many times as long each microbatch takes, where they differ; the last one's is that of what
    fills up a schedule.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    backward_input: Sequence[float] = ()
    backward_weight: Sequence[float] = ()
    transfer_s: float = 0.0
    send_s: float = 0.0
    sizes: Sequence[float] = ()

    def of(self, action: Action) -> float:
        """The seconds of one action; receives take no time of their own."""
        if action.kind in SENDS:
            return self.send_s
        seconds: Mapping[Kind, Sequence[float]] = {
            "forward": self.forward,
            "backward": self.backward,
            "backward_input": self.backward_input,
            "backward_weight": self.backward_weight,
        }
        if action.kind not in COMPUTE:
            return 0.0
        size = self.sizes[min(action.microbatch, len(self.sizes) - 1)] if self.sizes else 1.0
        return size * seconds[action.kind][action.stage]


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one rank, from its beginning to its end in seconds; of a receive, the wait for it."""

    rank: int
    kind: Kind
    stage: int
    microbatch: int
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class Timeline:
    """The spans of one step, rank by rank in their order."""

    ranks: int
    spans: Sequence[Span]

    @property
    def makespan_s(self) -> float:
        """From the first beginning to the last end over all ranks; 0 where nothing was done."""
        return max((span.end_s for span in self.spans), default=0.0) - self.begin_s

    @property
    def begin_s(self) -> float:
        return min((span.begin_s for span in self.spans), default=0.0)

    @property
    def busy_s(self) -> list[float]:
        """For every rank the seconds in which it computes."""
        seconds = [0.0] * self.ranks
        for span in self.spans:
            seconds[span.rank] += span.seconds if span.kind in COMPUTE else 0.0
        return seconds

    @property
    def bubble(self) -> list[float]:
        """For every rank its bubble, 0 to 1: what is left of the step besides its computing."""
        whole = self.makespan_s
        return [1 - busy / whole if whole else 0.0 for busy in self.busy_s]


def costs_of(run: Timeline) -> Costs:
    """The costs of a step as run: means of each stage's passes of each kind, and of its messages.

    How long a message is under way follows from the receives that were waiting when it set out; others came later than
    it did. Ranks whose clocks differ tell it wrong by as much.
    """
    passes_s: dict[tuple[Kind, int], list[float]] = {}
    for span in run.spans:
        passes_s.setdefault((span.kind, span.stage), []).append(span.seconds)
    stages = 1 + max((stage for _, stage in passes_s), default=-1)
    mean = {kind: [fmean(passes_s.get((kind, stage), [0.0])) for stage in range(stages)] for kind in COMPUTE}
    sends = [span.seconds for span in run.spans if span.kind in SENDS]
    return Costs(
        forward=mean["forward"],
        backward=mean["backward"],
        backward_input=mean["backward_input"],
        backward_weight=mean["backward_weight"],
        transfer_s=max(0.0, fmean(_under_way(run) or [0.0])),
        send_s=fmean(sends or [0.0]),
    )


def _under_way(run: Timeline) -> list[float]:
    ended = {Action(span.kind, span.stage, span.microbatch): span.end_s for span in run.spans if span.kind in COMPUTE}
    found: list[float] = []
    for span in run.spans:
        for kind, step in _SENDERS.get(span.kind, ()):
            made_s = ended.get(Action(kind, span.stage + step, span.microbatch), -inf)
            found += [span.end_s - made_s] if made_s > span.begin_s else []
    return found


# Of a receive, which pass of how many stages further on made what it waits for.
_SENDERS: Mapping[Kind, Sequence[tuple[Kind, int]]] = {
    "recv_forward": [("forward", -1)],
    "recv_backward": [("backward", 1), ("backward_input", 1)],
}


def simulate(orders: Orders, costs: Costs) -> Timeline:
    """The step in which every rank does its actions in order, each as soon as it can.

    An action waits for the one before it on its rank, and for what it needs: a forward pass for that of the stage
    before, a backward pass for its own forward pass and the backward pass (of inputs) of the next stage, that of
    weights for that of inputs; with `costs.transfer_s` on top where that stage is another rank's. Receives wait so
    too; sends take `costs.send_s` and hold up nobody else. Orders without sends and receives mean the same ones just
    where they are needed.

    Raises `UserError` where ranks wait for each other, or for what nobody does.
    """
    simulation = _Simulation(orders, costs)
    while any(simulation.advance(rank) for rank in range(len(orders))):
        pass
    for rank, order in enumerate(orders):
        if (done := len(simulation.spans[rank])) < len(order):
            raise UserError(
                "simulate a pipeline's step",
                f"rank {rank} waits for ever at {order[done]}, its action {done + 1} of {len(order)}",
                "give orders in which every action follows what it needs",
            )
    return Timeline(len(orders), [span for spans in simulation.spans for span in spans])


class _Simulation:
    def __init__(self, orders: Orders, costs: Costs) -> None:
        self.orders, self.costs = orders, costs
        self.spans: list[list[Span]] = [[] for _ in orders]
        self.rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in order}
        self.last_stage = max(self.rank_of, default=0)
        self.ended: dict[Action, float] = {}

    def advance(self, rank: int) -> bool:
        """Does what can be done of a rank's order; whether that was anything."""
        spans, order = self.spans[rank], self.orders[rank]
        before = len(spans)
        while len(spans) < len(order) and (ready := self._ready(order[len(spans)])) is not None:
            spans.append(self._do(rank, order[len(spans)], ready))
        return len(spans) > before

    def _do(self, rank: int, action: Action, ready: float) -> Span:
        free = self.spans[rank][-1].end_s if self.spans[rank] else 0.0
        begin = max(free, ready) if action.kind in COMPUTE else free
        end = self.ended[action] = max(begin, ready) + self.costs.of(action)
        return Span(rank, action.kind, action.stage, action.microbatch, begin, end)

    def _ready(self, action: Action) -> float | None:
        """When all that the action needs is there; None where that is not known yet."""
        times = [self._ended(kinds, stage, action) for kinds, stage in _needs(action, self.last_stage)]
        known = [time for time in times if time is not None]
        return max(known, default=0.0) if len(known) == len(times) else None

    def _ended(self, kinds: Sequence[Kind], stage: int, action: Action) -> float | None:
        transfer = self.costs.transfer_s if self.rank_of.get(stage) != self.rank_of[action.stage] else 0.0
        ended = (self.ended.get(Action(kind, stage, action.microbatch)) for kind in kinds)
        return next((time + transfer for time in ended if time is not None), None)


def _needs(action: Action, last_stage: int) -> list[tuple[Sequence[Kind], int]]:
    """The stages that must have ended an action on the same microbatch, and which action."""
    stage = action.stage
    if action.kind in ("forward", "recv_forward"):
        return [(("forward",), stage - 1)] if stage else []
    if action.kind == "backward_weight":
        return [(("backward_input",), stage)]
    if action.kind in ("backward", "backward_input", "recv_backward"):
        own: list[tuple[Sequence[Kind], int]] = [] if action.kind == "recv_backward" else [(("forward",), stage)]
        return own + ([(BACKWARD, stage + 1)] if stage < last_stage else [])
    return [(("forward",) if action.kind == "send_forward" else BACKWARD, stage)]


def step_seconds(
    schedule: Schedule, ranks: int, stages_per_rank: int, microbatches: int, costs: Costs
) -> tuple[float, list[float]]:
    """Makespan of the schedule's step, and for every rank the seconds in which it computes.

    What `simulate` finds for the schedule's orders, to rounding; `microbatches` is a runnable number. What it takes to
    find out hardly grows with their number, but for gpipe and looped-bfs, and where a step does not come to repeat.
    """
    of_kinds = (costs.forward, costs.backward, costs.backward_input, costs.backward_weight)
    stages = ranks * stages_per_rank
    seconds = [one for of_kind in of_kinds for one in of_kind or [0.0] * stages]
    assert len(seconds) == len(KINDS) * stages and (costs.backward_input or not splits_backward(schedule))
    delays = [costs.transfer_s if comes else 0.0 for comes in _messages(schedule, ranks, stages_per_rank)]
    busy = [0.0] * ranks
    counts = _counts(schedule, ranks, stages_per_rank, microbatches)
    for stage, rank in enumerate(rank_of_stage(schedule, ranks, stages_per_rank)):
        busy[rank] += sum(map(mul, counts[stage], seconds[stage::stages]))
    return duration(schedule, ranks, stages_per_rank, microbatches, seconds, delays), busy


@cache
def unevenness(
    schedule: Schedule, ranks: int, stages_per_rank: int, loads: tuple[tuple[float, ...], ...], microbatches: int
) -> float:
    """How many times as long steps with microbatches of `loads` take as ones with so many that all cost the same.

    Ranks wait for each other where these differ, and their number may have to be filled up.
    """
    each = fmean(map(sum, loads)) / microbatches
    stages = range(ranks * stages_per_rank)
    costs = Costs(
        forward=[1.0 for _ in stages],
        backward=[2.0 for _ in stages],
        backward_input=[1.0 for _ in stages],
        backward_weight=[1.0 for _ in stages],
    )
    how = schedule, ranks, stages_per_rank

    def makespan(sizes: Sequence[float]) -> float:
        orders = compute_orders(*how, runnable(*how, len(sizes)))
        return simulate(orders, replace(costs, sizes=sizes)).makespan_s

    found = fmean(makespan([load / each for load in one]) for one in loads)
    return max(1.0, found / makespan([1.0] * microbatches))


@cache
def _messages(schedule: Schedule, ranks: int, stages_per_rank: int) -> tuple[bool, ...]:
    placed = rank_of_stage(schedule, ranks, stages_per_rank)
    return tuple(bool(message_to((kind, stage, 0), placed)) for kind in KINDS for stage in range(len(placed)))


def _counts(schedule: Schedule, ranks: int, stages_per_rank: int, microbatches: int) -> list[list[int]]:
    if not splits_backward(schedule):
        return [[microbatches, microbatches, 0, 0]] * ranks * stages_per_rank
    # dualpipev splits as many as it needs at the beginning and at the end.
    halves = _split_passes(ranks) if schedule == "dualpipev" else [microbatches] * ranks * stages_per_rank
    return [[microbatches, microbatches - split, split, split] for split in halves]


@cache
def _split_passes(ranks: int) -> Sequence[int]:
    shortest = passes("dualpipev", ranks, 2, 2 * ranks)
    split = Counter(stage for order in shortest for kind, stage, _ in order if kind == "backward_input")
    return tuple(split[stage] for stage in range(2 * ranks))


def ideal_bubble(schedule: Schedule, ranks: int, stages_per_rank: int, microbatches: int) -> float | None:
    """The bubble that the literature gives the schedule; None where it gives none for these numbers.

    As idle share of the step; papers mostly give the ratio of idle to busy time, b: this is b / (1 + b). Of p ranks, v
    stages per rank and m microbatches, for stages that take equal time, and messages that take none:

    - naive: (p - 1) / p, since one rank works at a time.
    - gpipe, 1f1b: (p - 1) / (m + p - 1) (Huang et al. 2019, section 2.3; Narayanan et al. 2021, section 2.2.1).
    - interleaved: (p - 1) / (v m + p - 1) (Narayanan et al. 2021, section 2.2.2), and looped-bfs the same
      (Lamy-Poirier 2022); for m of at least p.
    - zero-bubble: (p - 1) / (3 v m + p - 1) (ZB-H1 of Qi et al. 2024, table 2), where the forward pass and the
      two halves of the backward pass take equal time; for m of at least p.
    - zbv and dualpipev: none; the papers count each rank's time from its own beginning.
    """
    share = (ranks - 1) / (stages_per_rank * microbatches + ranks - 1)
    if schedule == "naive":
        return (ranks - 1) / ranks
    if schedule in ("gpipe", "1f1b"):
        return share
    if schedule in ("interleaved", "looped-bfs") and microbatches >= ranks:
        return share
    if schedule == "zero-bubble" and microbatches >= ranks:
        return (ranks - 1) / (3 * stages_per_rank * microbatches + ranks - 1)
    return None
