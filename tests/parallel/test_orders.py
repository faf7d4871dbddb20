"""Every order that a pipeline runs: complete, in causal order, its messages matched, and never stuck."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import accumulate, pairwise, product

import pytest

from evenly.parallel.pipeline.orders import Order, acknowledgements, orders, receives_ahead
from evenly.plan.schedule import (
    COMPUTE,
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    rank_of_stage,
    runnable,
    splits_backward,
    stages_per_rank,
)

SIZES: dict[Schedule, tuple[int, ...]] = {"interleaved": (1, 2, 3), "looped-bfs": (1, 2, 3), "zero-bubble": (1, 2)}
CASES = [
    (schedule, ranks, number, microbatches)
    for schedule in (*SCHEDULES,)
    for number, ranks, microbatches in product(
        SIZES.get(schedule, (stages_per_rank(schedule, None),)), (1, 2, 3, 4), range(1, 13)
    )
    if runnable(schedule, ranks, number, microbatches) == microbatches
]
Case = tuple[Schedule, int, int, int]

each_schedule = pytest.mark.parametrize("schedule", (*SCHEDULES,))


def of(schedule: Schedule) -> list[Case]:
    return [case for case in CASES if case[0] == schedule]


def select(order: Order, *kinds: Kind) -> list[Action]:
    return [action for action in order if action.kind in kinds]


def receive_of(send: Action) -> Action:
    if send.kind == "send_forward":
        return Action("recv_forward", send.stage + 1, send.microbatch)
    return Action("recv_backward", send.stage - 1, send.microbatch)


@each_schedule
def test_every_stage_runs_every_microbatch_forward_then_backward_once(schedule: Schedule) -> None:
    for case in of(schedule):
        _, ranks, number, microbatches = case
        placed = rank_of_stage(schedule, ranks, number)
        assert len(orders(*case)) == ranks
        for stage, microbatch in product(range(ranks * number), range(microbatches)):
            mine = [action for action in orders(*case)[placed[stage]] if action.stage == stage]
            kinds = [action.kind for action in mine if action.microbatch == microbatch]
            computed = [kind for kind in kinds if not kind.startswith(("send", "recv"))]
            whole, halves = ["forward", "backward"], ["forward", "backward_input", "backward_weight"]
            assert computed == whole or (computed == halves and splits_backward(schedule)), (case, stage, microbatch)
        assert sum(len(order) for order in orders(*case)) == sum(len({*order}) for order in orders(*case))


@each_schedule
def test_messages_go_between_stages_of_different_ranks_alone(schedule: Schedule) -> None:
    for case in of(schedule):
        _, ranks, number, microbatches = case
        placed = rank_of_stage(schedule, ranks, number)
        changes = sum(here != there for here, there in pairwise(placed))
        found = Counter(action.kind for order in orders(*case) for action in order)
        for kind in ("send_forward", "recv_forward", "send_backward", "recv_backward"):
            assert found[kind] == changes * microbatches, case


@each_schedule
def test_two_ranks_agree_on_the_order_of_messages_in_either_direction(schedule: Schedule) -> None:
    for case in of(schedule):
        _, ranks, number, _ = case
        placed = rank_of_stage(schedule, ranks, number)
        for sender, receiver in product(range(ranks), repeat=2):
            sends = [receive_of(send) for send in select(orders(*case)[sender], "send_forward", "send_backward")]
            sent = [message for message in sends if placed[message.stage] == receiver]
            receives = select(orders(*case)[receiver], "recv_forward", "recv_backward")
            step = {"recv_forward": -1, "recv_backward": 1}
            received = [action for action in receives if placed[action.stage + step[action.kind]] == sender]
            assert received == sent, (case, sender, receiver)


def run_to_the_end(orders_of_ranks: tuple[Order, ...], placed: tuple[int, ...]) -> None:
    """Asynchronous sends on one channel per direction; a receive takes what comes first, and it has to be that."""
    channels: dict[tuple[int, int], list[Action]] = {}
    have: list[set[Action]] = [set() for _ in orders_of_ranks]
    at = [0] * len(orders_of_ranks)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders_of_ranks):
            while at[rank] < len(order) and step(order[at[rank]], rank, placed, channels, have[rank]):
                at[rank] += 1
                moved = True
    assert at == [len(order) for order in orders_of_ranks]
    assert not any(channels.values())


def step(
    action: Action, rank: int, placed: tuple[int, ...], channels: dict[tuple[int, int], list[Action]], have: set[Action]
) -> bool:
    """Whether the rank can act; `have` is what it computed and received."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind.startswith("recv"):
        waiting = channels.get((placed[stage + (-1 if action.kind == "recv_forward" else 1)], rank), [])
        if not waiting:
            return False
        assert waiting.pop(0) == action
    elif action.kind.startswith("send"):
        message = receive_of(action)
        needed = {"forward"} if action.kind == "send_forward" else {"backward", "backward_input"}
        assert any(Action(kind, stage, microbatch) in have for kind in needed)  # pyright: ignore[reportArgumentType]
        channels.setdefault((rank, placed[message.stage]), []).append(message)
    elif action.kind == "forward" and stage:
        assert {Action("recv_forward", stage, microbatch), Action("forward", stage - 1, microbatch)} & have
    elif action.kind.startswith("backward") and action.kind != "backward_weight" and stage < len(placed) - 1:
        sources: tuple[Kind, ...] = ("backward", "backward_input")
        after = {Action(kind, stage + 1, microbatch) for kind in sources}
        assert ({Action("recv_backward", stage, microbatch)} | after) & have
    have.add(action)
    return True


@each_schedule
def test_orders_run_to_their_end_where_a_receive_waits_and_a_send_does_not(schedule: Schedule) -> None:
    for case in of(schedule):
        run_to_the_end(orders(*case), rank_of_stage(*case[:3]))


@each_schedule
def test_what_is_known_to_be_received_was_sent_before_and_received_before_the_message_that_tells(
    schedule: Schedule,
) -> None:
    for case in of(schedule):
        planned, placed = orders(*case), rank_of_stage(*case[:3])
        for rank, (order, taken) in enumerate(zip(planned, acknowledgements(*case), strict=True)):
            told = [send for sends in taken.values() for send in sends]
            assert len(told) == len({*told}), case
            for receive, sends in taken.items():
                teller = placed[receive.stage + (-1 if receive.kind == "recv_forward" else 1)]
                answer = next(a for a in planned[teller] if a.kind.startswith("send") and receive_of(a) == receive)
                for send in sends:
                    assert order.index(send) < order.index(receive), (case, rank)
                    assert planned[teller].index(receive_of(send)) < planned[teller].index(answer), (case, rank)


def test_as_many_sends_are_open_with_many_microbatches_as_with_few() -> None:
    def most_open(microbatches: int) -> list[int]:
        return [
            max(accumulate(a.kind.startswith("send") - len(taken.get(a, ())) for a in order))
            for order, taken in zip(
                orders("1f1b", 4, 1, microbatches), acknowledgements("1f1b", 4, 1, microbatches), strict=True
            )
        ]

    assert most_open(32) == most_open(12)


def text(order: Order) -> str:
    return " ".join(map(str, order))


def test_orders_in_words() -> None:
    assert text(orders("naive", 2, 1, 2)[0]) == "F0.0 SF0.0 RB0.0 B0.0 F0.1 SF0.1 RB0.1 B0.1"
    assert text(orders("gpipe", 2, 1, 2)[1]) == "RF1.0 F1.0 RF1.1 F1.1 B1.0 SB1.0 B1.1 SB1.1"
    assert text(orders("1f1b", 2, 1, 2)[1]) == "RF1.0 F1.0 B1.0 SB1.0 RF1.1 F1.1 B1.1 SB1.1"
    assert text(orders("1f1b", 3, 1, 1)[0]) == "F0.0 SF0.0 RB0.0 B0.0"
    assert text(orders("1f1b", 1, 1, 2)[0]) == "F0.0 B0.0 F0.1 B0.1"


def test_a_stage_beside_its_neighbour_gets_no_message() -> None:
    assert text(orders("zbv", 2, 2, 1)[1]) == "RF1.0 F1.0 F2.0 SF2.0 RB2.0 I2.0 W2.0 I1.0 SB1.0 W1.0"


def test_what_was_sent_before_is_received_before() -> None:
    """Rank 0 sends F0.2 before B3.0; rank 1 needs them the other way round."""
    order = orders("zbv", 2, 2, 3)[1]
    first, then = Action("recv_forward", 1, 2), Action("recv_backward", 2, 0)
    assert order.index(then) == order.index(first) + 1 and order.index(Action("forward", 1, 2)) > order.index(then)


def test_orders_import_no_torch() -> None:
    program = (
        "import sys; from evenly.parallel.pipeline.orders import orders; from evenly.plan.schedule import SCHEDULES; "
        "[orders(schedule, 4, 2 if schedule[-1] == 'v' else 1, 8) for schedule in SCHEDULES]; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


@each_schedule
def test_messages_arrive_while_something_is_computed(schedule: Schedule) -> None:
    """Sends follow what they send, and receives are posted before a pass that does not need them, if there is one."""
    for case in of(schedule):
        for order in orders(*case):
            for before, action in pairwise(order):
                if action.kind in ("send_forward", "send_backward"):
                    of_pass = "forward" if action.kind == "send_forward" else "backward"
                    assert before.kind.startswith(of_pass) and (before.stage, before.microbatch) == (
                        action.stage,
                        action.microbatch,
                    )
            assert late_receives(order) == []


def late_receives(order: Order) -> list[Action]:
    """Receives without a pass between where they are posted and where they are waited for, for which there was one.

    A gradient cannot come before the forward of its own microbatch.
    """
    posted: dict[Action, int] = {}
    ended: dict[tuple[int, int], int] = {}
    late: list[Action] = []
    for number, action in enumerate(order):
        for receive in receives_ahead(order, number):
            if receive.kind == "recv_forward" or (receive.stage, receive.microbatch) in ended:
                posted.setdefault(receive, number)
        if action.kind == "forward":
            ended[action.stage, action.microbatch] = number
        earliest = ended.get((action.stage, action.microbatch), -1) + 1
        passes = [other for other in order[earliest:number] if other.kind in COMPUTE]
        if action in posted and passes and not any(other.kind in COMPUTE for other in order[posted[action] : number]):
            late.append(action)
    return late
