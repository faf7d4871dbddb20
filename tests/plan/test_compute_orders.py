"""The orders in which ranks compute, against torch's own classes; what they hold in memory; how quick they are made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from evenly.plan.orders import Pass, compute_orders, in_flight_of, passes
from evenly.plan.schedule import SCHEDULES, Kind, Schedule, in_flight, runnable, stages_per_rank

OF_TORCH = {
    "interleaved": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
KINDS: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


def cases(schedule: Schedule, ranks: Iterable[int], microbatches: Iterable[int]) -> list[tuple[int, int, int]]:
    numbers = (1, 2, 3, 4) if schedule in ("interleaved", "looped-bfs", "zero-bubble") else (None,)
    each = product(ranks, (stages_per_rank(schedule, number) for number in numbers), microbatches)
    return [case for case in each if runnable(schedule, *case) == case[-1]]


def of_torch(name: str, ranks: int, number: int, microbatches: int) -> list[list[Pass]]:
    stage = SimpleNamespace(num_stages=ranks * number, group_size=ranks, group_rank=0, submod=None)
    made = getattr(schedules, name)([stage] * number, microbatches).pipeline_order
    return [[*flattened(made[rank])] for rank in range(ranks)]


def flattened(order: Iterable[Any]) -> Iterator[Pass]:
    """Without torch's None, which stands for a bubble; what it has overlap becomes its parts, one after the other."""
    for action in order:
        if action is not None and action.sub_actions is not None:
            yield from flattened(action.sub_actions)
        elif action is not None:
            yield KINDS[action.computation_type.value], action.stage_index, action.microbatch_index


@pytest.mark.parametrize("schedule", OF_TORCH)
def test_the_rules_make_the_orders_of_torch(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules._PipelineScheduleRuntime, "_prepare_schedule_with_comms", lambda *_: None)
    checked = cases(schedule, range(1, 9), range(1, 25))
    assert len(checked) > 100
    for case in checked:
        assert passes(schedule, *case) == of_torch(OF_TORCH[schedule], *case), case


def test_orders_in_words() -> None:
    def text(schedule: Schedule, ranks: int, number: int, microbatches: int, rank: int) -> str:
        return " ".join(map(str, compute_orders(schedule, ranks, number, microbatches)[rank]))

    assert text("naive", 2, 1, 2, 0) == "F0.0 B0.0 F0.1 B0.1"
    assert text("gpipe", 2, 1, 2, 1) == "F1.0 F1.1 B1.0 B1.1"
    assert text("1f1b", 2, 1, 3, 0) == "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2"
    assert text("interleaved", 2, 2, 2, 1) == "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1"
    assert text("looped-bfs", 2, 2, 2, 0) == "F0.0 F0.1 F2.0 F2.1 B2.1 B2.0 B0.1 B0.0"
    assert text("zero-bubble", 2, 1, 2, 1) == "F1.0 I1.0 F1.1 I1.1 W1.0 W1.1"
    assert text("zbv", 1, 2, 1, 0) == "F0.0 F1.0 I1.0 W1.0 I0.0 W0.0"


@pytest.mark.parametrize("schedule", (*SCHEDULES,))
def test_microbatches_in_flight_are_those_of_the_whole_order(schedule: Schedule) -> None:
    for case in cases(schedule, (1, 2, 3, 5, 8), (*range(1, 30), 32, 40, 45, 64, 72, 80)):
        assert in_flight_of(schedule, *case) == in_flight(compute_orders(schedule, *case)), case


def test_what_is_in_flight_belongs_to_the_caller() -> None:
    in_flight_of("1f1b", 2, 1, 4)[0][0] = 99
    assert in_flight_of("1f1b", 2, 1, 4) == [[2], [1]]
