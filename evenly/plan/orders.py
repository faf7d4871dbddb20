"""In which order each rank of a pipeline computes: every schedule by its rule. Pure; imports no torch, sends nothing.

A rule is a sequence of steps, each a kind of pass and one of the rank's own stages, 0 the earliest in the model. A
rule names no microbatches: every stage takes them from the first to the last, forward as backward, and computes its
gradients of weights in the order of those of its inputs. Only looped-bfs goes back from the last to the first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

from evenly.plan.schedule import SCHEDULES, Action, Kind, Schedule, ScheduleRules, in_flight, rank_of_stage, runnable

Step = tuple[Kind, int]  # which of the rank's own stages
Pass = tuple[Kind, int, int]  # stage of the model, microbatch
Rule = Callable[[int, int, int, int], Sequence[Step]]

FORWARD: list[Step] = [("forward", 0), ("forward", 1)]  # of the two stages of a V
BACKWARD: list[Step] = [("backward", 0), ("backward", 1)]
INPUT: list[Step] = [("backward_input", 0), ("backward_input", 1)]
WEIGHT: list[Step] = [("backward_weight", 0), ("backward_weight", 1)]


@cache
def compute_orders(
    schedule: Schedule, ranks: int, stages_per_rank: int, microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    """For every rank of the pipeline axis what it computes in a step, in order; `microbatches` is a runnable number."""
    return tuple(
        tuple(Action(*one) for one in order) for order in passes(schedule, ranks, stages_per_rank, microbatches)
    )


def passes(schedule: Schedule, ranks: int, stages_per_rank: int, microbatches: int) -> list[list[Pass]]:
    """As `compute_orders`, in plain tuples of kind, stage and microbatch: cheap where there are many."""
    assert runnable(schedule, ranks, stages_per_rank, microbatches) == microbatches
    placed = rank_of_stage(schedule, ranks, stages_per_rank)
    stages = [[stage for stage, holder in enumerate(placed) if holder == rank] for rank in range(ranks)]
    if schedule == "looped-bfs":
        return [_looped(own, microbatches) for own in stages]
    rules = (RULES[schedule](rank, ranks, stages_per_rank, microbatches) for rank in range(ranks))
    return [_numbered(rule, own, microbatches) for rule, own in zip(rules, stages, strict=True)]


def in_flight_of(schedule: Schedule, ranks: int, stages_per_rank: int, microbatches: int) -> list[list[int]]:
    """`plan.schedule.in_flight` of the schedule, quick for any runnable number of microbatches."""
    rules = SCHEDULES[schedule]
    least = 4 * ranks  # what is in flight no longer changes once a step has a few rounds
    whole_rounds = not rules.equal_rounds or microbatches % ranks == 0
    enough = min(microbatches, least) if rules.steady and whole_rounds else microbatches
    return [[*most] for most in _in_flight(schedule, ranks, stages_per_rank, enough)]


@cache
def _in_flight(schedule: Schedule, ranks: int, stages_per_rank: int, microbatches: int) -> list[list[int]]:
    return in_flight(compute_orders(schedule, ranks, stages_per_rank, microbatches))


def _numbered(rule: Iterable[Step], stages: Sequence[int], microbatches: int) -> list[Pass]:
    """The rule with its microbatches; leaves out those that the step does not have."""
    begun, returned = [0] * len(stages), [0] * len(stages)
    open_weights: list[deque[int]] = [deque() for _ in stages]
    found: list[Pass] = []
    for kind, own in rule:
        if kind == "backward_weight":
            number = open_weights[own].popleft()
        else:
            counts = begun if kind == "forward" else returned
            number = counts[own]
            counts[own] += 1
        if kind == "backward_input":
            open_weights[own].append(number)
        if number < microbatches:
            found.append((kind, stages[own], number))
    return found


def _alternating(ahead: int, forwards: Sequence[Step], backwards: Sequence[Step]) -> list[Step]:
    """`ahead` forward passes, then one forward, one backward in turn, then the backward passes that are left.

    naive is none ahead: a microbatch comes back before the next begins. gpipe is all ahead. 1f1b is one ahead for every
    rank that follows (Narayanan et al. 2021, section 2.2.1): then the first gradient is there when it is needed.
    """
    ahead = min(ahead, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    return [*forwards[:ahead], *(step for pair in pairs for step in pair), *backwards[len(forwards) - ahead :]]


def _interleaved(beyond: int, ranks: int, stages: int, microbatches: int, back: Kind = "backward") -> list[Step]:
    """Microbatches go in rounds; in each, a rank's stages run one after the other (Narayanan et al. 2021, 2.2.2).

    A round has one microbatch per rank, or a few more where that makes rounds of equal length; backward the stages run
    from the last. The last rank has a round through all its stages but one ahead of one forward, one backward; the
    others `beyond` more: two for every rank that follows, so that gradients do not wait for forward passes in between.
    """
    rounds = max(1, microbatches // ranks)
    length = microbatches // rounds
    forwards: list[Step] = [("forward", own) for own in range(stages) for _ in range(length)]
    backwards: list[Step] = [(back, own) for own in reversed(range(stages)) for _ in range(length)]
    return _alternating((stages - 1) * length + beyond, forwards * rounds, backwards * rounds)


def _zero_bubble(rank: int, ranks: int, stages: int, microbatches: int) -> list[Step]:
    """Interleaved (or 1f1b), with gradients of weights put off to where the rank would wait (ZB-H1, Qi et al. 2024).

    Since gradients of inputs alone go to the rank before, one forward pass ahead for each that follows is enough. Those
    of weights lag behind by as many as there are ranks before this one, and so fill the time in which the last
    gradients of inputs go back through them.
    """
    found: list[Step] = []
    lagging: deque[Step] = deque()
    for step in _interleaved(ranks - 1 - rank, ranks, stages, microbatches, "backward_input"):
        found.append(step)
        if step[0] == "backward_input":
            lagging.append(("backward_weight", step[1]))
            if len(lagging) > rank:
                found.append(lagging.popleft())
    return [*found, *lagging]


def _looped(stages: Sequence[int], microbatches: int) -> list[Pass]:
    """Breadth first (Lamy-Poirier 2022): a stage runs all microbatches before the rank's next one; then all back."""
    forwards: list[Pass] = [("forward", stage, number) for stage in stages for number in range(microbatches)]
    return forwards + [("backward", stage, number) for _, stage, number in reversed(forwards)]


def _zbv(rank: int, ranks: int, microbatches: int) -> Iterator[Step]:
    """ZB-V of Qi et al. 2024 (section 6), for at least 2 * ranks - 1 microbatches; fewer leave gaps.

    A microbatch goes down the first stages and up the second ones, both halves of its backward pass likewise. The rank
    runs its first stage ahead until the first microbatch has come back up to it, then its two stages in turn, then the
    second one forward and back until its first gradient has come up from the other side. In the steady state every
    forward pass is followed by both halves of a backward pass of the same stage, first and second stage in turn.
    Towards the end the gradients of inputs go first; those of weights that they leave behind are the last.
    """
    following = ranks - 1 - rank
    first, second = ([FORWARD[own], INPUT[own], WEIGHT[own]] for own in (0, 1))
    yield from FORWARD[:1] * (2 * following + 1)
    yield from [FORWARD[1], FORWARD[0]] * rank
    yield from second * (following + 1)
    yield from (first + second) * (microbatches - following - ranks)
    yield from (first[1:] + second) * following
    yield from [INPUT[0], INPUT[1]] * rank
    yield from [INPUT[0], WEIGHT[0]] * (following + 1)
    yield from [WEIGHT[1]] * rank
    yield from [WEIGHT[0]] * rank


def _dualpipev(rank: int, ranks: int, microbatches: int) -> Iterator[Step]:
    """DualPipe (DeepSeek-V3 2024, section 3.2.1) cut in half: stages as a V, for at least 2 * ranks microbatches.

    The rank fills up with its first stage, then with both in turn, then brings back the second's first microbatches in
    two halves. In the steady state forward passes of one stage go with whole backward passes of the other (which may
    run at the same time; here one follows the other). At the end both stages go back in turn; the second half of these
    passes leaves the gradients of weights for later, where they fill the waits for the last gradients of inputs.
    """
    following = ranks - 1 - rank
    returning = [BACKWARD[1], BACKWARD[0]] * (rank + 1)
    halved = [INPUT[own] for _, own in returning[rank + 1 :]]
    yield from FORWARD[:1] * (2 * following)
    yield from [FORWARD[0], FORWARD[1]] * (rank + 1)
    yield from [INPUT[1], WEIGHT[1], FORWARD[1]] * following
    yield from [FORWARD[0], BACKWARD[1], FORWARD[1], BACKWARD[0]] * (microbatches - ranks - following)
    yield from [BACKWARD[1], FORWARD[1], BACKWARD[0]] * following
    yield from returning[: rank + 1] + halved
    weights = [WEIGHT[own] for _, own in halved + [INPUT[0]] * following]
    for weight in weights[:following]:
        yield from (weight, INPUT[0])
    yield from weights[following:]


def _in_turn(ahead: Callable[[int, int], int]) -> Rule:
    """One stage per rank; `ahead` forward passes first, by the ranks that follow and the microbatches."""

    def rule(rank: int, ranks: int, _: int, microbatches: int) -> list[Step]:
        number = ahead(ranks - 1 - rank, microbatches)
        return _alternating(number, FORWARD[:1] * microbatches, BACKWARD[:1] * microbatches)

    return rule


# The order of each schedule: for a rank, of so many ranks with so many stages each, on so many microbatches.
RULES: dict[Schedule, Rule] = {
    "naive": _in_turn(lambda following, microbatches: 0),
    "gpipe": _in_turn(lambda following, microbatches: microbatches),
    "1f1b": _in_turn(lambda following, microbatches: following),
    "interleaved": lambda rank, p, v, m: _interleaved(2 * (p - 1 - rank), p, v, m),
    "zero-bubble": _zero_bubble,
    "zbv": lambda rank, p, _, m: [*_zbv(rank, p, max(m, 2 * p - 1))],
    "dualpipev": lambda rank, p, _, m: [*_dualpipev(rank, p, m)],
}


OWN = frozenset(SCHEDULES)


def register_schedule(name: Schedule, rules: ScheduleRules, order: Rule) -> None:
    """Adds a schedule, which plans then name: `schedule=NAME`. Raises `ValueError` for one of this package's names.

    order: for (rank, ranks, stages per rank, microbatches) the passes of that rank in a step, each a kind and which of
    its own stages, 0 the earliest in the model; every stage takes its microbatches from the first to the last.
    """
    if name in OWN:
        raise ValueError(f"there is a schedule {name!r} already")
    SCHEDULES[name], RULES[name] = rules, order
