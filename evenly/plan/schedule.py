"""The pipeline schedules: where they place stages, and which sizes they can run. Pure; imports no torch.

A model's blocks are cut into stages; microbatches pass through them forward and backward. A schedule determines the
order of these actions on each rank (`orders.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, NamedTuple

from evenly.errors import PlanError

Kind = Literal[
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "send_forward",
    "recv_forward",
    "send_backward",
    "recv_backward",
]
Schedule = str  # a name in SCHEDULES

COMPUTE: frozenset[Kind] = frozenset(["forward", "backward", "backward_input", "backward_weight"])
LETTERS: dict[Kind, str] = {
    "forward": "F",
    "backward": "B",
    "backward_input": "I",
    "backward_weight": "W",
    "send_forward": "SF",
    "recv_forward": "RF",
    "send_backward": "SB",
    "recv_backward": "RB",
}


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does in a step; `F3.0` is the forward pass of stage 3 on microbatch 0.

    kind:       "backward" computes all gradients, "backward_input" those of the stage's input alone and
                "backward_weight" the rest, those of its parameters. "send_forward" sends a stage's output to the
                next stage, "recv_forward" takes a stage's input from the one before; "send_backward" and
                "recv_backward" do so with gradients, the other way.
    stage:      of the rank that acts, sender as receiver; from 0, in the model's order.
    microbatch: from 0, within the step.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{LETTERS[self.kind]}{self.stage}.{self.microbatch}"


class ActionSpan(NamedTuple):
    """When a rank ran an action, in seconds of the machine's clock.

    arrived_s: of a receive, when its message was there; None where that is not known.
    """

    kind: Kind
    stage: int
    microbatch: int
    begin_s: float
    end_s: float
    arrived_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ScheduleRules:
    """Where a schedule places stages, and which numbers of microbatches it runs. Its order is in `plan.orders`.

    stages:          per rank; None if the plan chooses, with `usual` as the default.
    as_v:            stages are placed as a V over the ranks: rank r holds r and 2 * ranks - 1 - r.
    splits_backward: whether gradients of parameters are computed apart from those of inputs.
    equal_rounds:    whether microbatches run in rounds of equal length, their number over that of ranks, rounded down.
    every_stage:     whether there must be a microbatch for every stage.
    steady:          whether, after a few rounds, more microbatches leave the number in flight as it is.
    """

    stages: int | None = None
    usual: int = 1
    as_v: bool = False
    splits_backward: bool = False
    equal_rounds: bool = False
    every_stage: bool = False
    steady: bool = False


SCHEDULES: dict[Schedule, ScheduleRules] = {
    "naive": ScheduleRules(stages=1, steady=True),
    "gpipe": ScheduleRules(stages=1),
    "1f1b": ScheduleRules(stages=1, steady=True),
    "interleaved": ScheduleRules(usual=2, equal_rounds=True, steady=True),
    "looped-bfs": ScheduleRules(usual=2),
    "zero-bubble": ScheduleRules(splits_backward=True, equal_rounds=True, steady=True),
    "zbv": ScheduleRules(stages=2, as_v=True, splits_backward=True, steady=True),
    "dualpipev": ScheduleRules(stages=2, as_v=True, splits_backward=True, every_stage=True, steady=True),
}


def stages_per_rank(schedule: Schedule, asked: int | None) -> int:
    """Stages that every rank holds; None takes the schedule's own. Raises `PlanError` for a number that it cannot."""
    rules = SCHEDULES[schedule]
    if rules.stages is None:
        if asked is not None and asked < 1:
            raise PlanError(
                f"schedule={schedule} stages_per_rank={asked}", "a rank has at least one stage", "ask for more"
            )
        return asked or rules.usual
    if asked not in (None, rules.stages):
        free = [name for name, other in SCHEDULES.items() if other.stages is None]
        raise PlanError(
            f"schedule={schedule} stages_per_rank={asked}",
            f"this schedule has exactly {rules.stages} stage{'s' * (rules.stages > 1)} per rank",
            f"leave out stages_per_rank, or use {', '.join(free[:-1])} or {free[-1]} for another number",
        )
    return rules.stages


def rank_of_stage(schedule: Schedule, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """For every stage the rank, from 0 on the pipeline axis, that holds it.

    Stages go round the ranks in a loop; those of zbv and dualpipev go there and back, as a V: rank r holds r and
    2 * ranks - 1 - r, so that the last rank's two stages follow each other, and the first rank has the first and the
    last stage.
    """
    stages = range(ranks * stages_per_rank)
    if SCHEDULES[schedule].as_v:
        return tuple(min(stage, 2 * ranks - 1 - stage) for stage in stages)
    return tuple(stage % ranks for stage in stages)


def splits_backward(schedule: Schedule) -> bool:
    """Whether gradients of parameters are computed apart from those of inputs: what the next stage needs goes first."""
    return SCHEDULES[schedule].splits_backward


def runnable(schedule: Schedule, ranks: int, stages_per_rank: int, microbatches: int) -> int:
    """The smallest number of microbatches, at least `microbatches`, that the schedule can run.

    The caller fills up with microbatches that do not count. The interleaved and zero-bubble schedules run rounds
    of equal length, and their number is that of microbatches over ranks, rounded down; dualpipev needs a microbatch
    for every stage. The others run any number.
    """
    rules = SCHEDULES[schedule]
    if rules.equal_rounds:
        return next(number for number in count(microbatches) if number % max(1, number // ranks) == 0)
    return max(microbatches, ranks * stages_per_rank) if rules.every_stage else microbatches


def in_flight(orders: Sequence[Sequence[Action]]) -> list[list[int]]:
    """For every rank, for each of its stages in ascending order, the most microbatches whose activations it holds.

    From the forward pass to the end of the backward pass; where that is split, of its second half.
    """
    return [[_most_in_flight(order, stage) for stage in sorted({action.stage for action in order})] for order in orders]


def _most_in_flight(order: Sequence[Action], stage: int) -> int:
    change: Mapping[Kind, int] = {"forward": 1, "backward": -1, "backward_weight": -1}
    now = most = 0
    for action in order:
        now += change.get(action.kind, 0) if action.stage == stage else 0
        most = max(most, now)
    return most
