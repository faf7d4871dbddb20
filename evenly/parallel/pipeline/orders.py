"""What every rank of a pipeline does in a step, in order, with its messages, as data. Pure; imports no torch.

Sends are asynchronous and follow at once what they send; a receive waits. Messages from one rank to another are
received in the order in which they are sent, each as late as that allows: just before what needs it, or needs one that
was sent after it. Such receives wait no longer than what follows them has to, and need no tags. Nothing is said about
the order of what two ranks send each other in opposite directions: where a send may block until it is received, each
direction needs a channel of its own.

torch's own way of placing receives (`_add_send_recv`) puts them as early as it can, for a runtime that posts them there
and waits later. To wait there takes up to twice the time of the schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

from evenly.plan.orders import compute_orders
from evenly.plan.schedule import Action, Kind, Schedule, rank_of_stage

Order = tuple[Action, ...]
Taken = Mapping[Action, tuple[Action, ...]]

# What takes the result of an action to another rank, and how many stages further on.
MESSAGES: dict[Kind, tuple[Kind, Kind, int]] = {
    "forward": ("send_forward", "recv_forward", 1),
    "backward": ("send_backward", "recv_backward", -1),
    "backward_input": ("send_backward", "recv_backward", -1),
}

RECEIVES: frozenset[Kind] = frozenset(["recv_forward", "recv_backward"])
AHEAD = 2  # messages that a rank waits for before it needs them
WITHIN = 8  # of its next actions


def receives_ahead(actions: Sequence[Action], number: int) -> list[Action]:
    """The messages that a rank waits for, those that it knows the shapes of, from before its action `number` on."""
    return [action for action in actions[number : number + WITHIN] if action.kind in RECEIVES][:AHEAD]


@cache
def orders(schedule: Schedule, ranks: int, stages_per_rank: int, microbatches: int) -> tuple[Order, ...]:
    """For every rank of the pipeline axis its actions in a step, in order; `microbatches` is a runnable number."""
    computing = compute_orders(schedule, ranks, stages_per_rank, microbatches)
    return _with_messages(computing, rank_of_stage(schedule, ranks, stages_per_rank))


@cache
def taken_by(schedule: Schedule, ranks: int, stages_per_rank: int, microbatches: int) -> tuple[Taken, ...]:
    """For every rank, by a receive of its own: those of its sends of which that message tells that they were received.

    A rank receives in its order: whoever hears of it knows that it has had all that it waited for before it sent that.
    """
    all_orders = orders(schedule, ranks, stages_per_rank, microbatches)
    found: tuple[dict[Action, tuple[Action, ...]], ...] = tuple({} for _ in all_orders)
    rank_of = rank_of_stage(schedule, ranks, stages_per_rank)
    for order in all_orders:
        had: dict[int, list[Action]] = {}  # by sender, since it was last acknowledged
        for action in order:
            sent = _other_end(action)
            if sent is not None and action.kind in RECEIVES:
                had.setdefault(rank_of[sent.stage], []).append(sent)
            elif sent is not None:
                teller = rank_of[sent.stage]
                found[teller][sent] = tuple(had.pop(teller, ()))
    return found


def _other_end(action: Action) -> Action | None:
    """The receive that belongs to a send, or the other way round."""
    for send, receive, step in MESSAGES.values():
        if action.kind == send:
            return Action(receive, action.stage + step, action.microbatch)
        if action.kind == receive:
            return Action(send, action.stage - step, action.microbatch)
    return None


def _with_messages(computing: Sequence[Sequence[Action]], rank_of: Sequence[int]) -> tuple[Order, ...]:
    """Adds sends and receives between neighbouring stages of different ranks."""
    arriving = [[deque[Action]() for _ in computing] for _ in computing]  # [receiver][sender], in the order of sending
    for sender, order in enumerate(computing):
        for _, receive in filter(None, (_message_after(action, rank_of) for action in order)):
            arriving[rank_of[receive.stage]][sender].append(receive)
    return tuple(tuple(_in_turn(order, arriving[rank], rank_of)) for rank, order in enumerate(computing))


def _in_turn(order: Iterable[Action], arriving: Sequence[deque[Action]], rank_of: Sequence[int]) -> Iterator[Action]:
    """The order of a rank with its messages; takes those it receives out of `arriving`, by sender."""
    received: set[Action] = set()
    for action in order:
        needed, sender = _receive_before(action, rank_of)
        while needed is not None and needed not in received:
            received.add(first := arriving[sender].popleft())
            yield first
        yield action
        if message := _message_after(action, rank_of):
            yield message[0]


def _message_after(action: Action, rank_of: Sequence[int]) -> tuple[Action, Action] | None:
    """What `action` says of another rank: the send, and the receive over there."""
    if action.kind not in MESSAGES:
        return None
    send, receive, step = MESSAGES[action.kind]
    stage = action.stage + step
    if stage not in range(len(rank_of)) or rank_of[stage] == rank_of[action.stage]:
        return None
    return Action(send, action.stage, action.microbatch), Action(receive, stage, action.microbatch)


def _receive_before(action: Action, rank_of: Sequence[int]) -> tuple[Action | None, int]:
    """What `action` needs from another rank, and from which."""
    if action.kind not in MESSAGES:
        return None, 0
    _, receive, step = MESSAGES[action.kind]
    stage = action.stage - step
    if stage not in range(len(rank_of)) or rank_of[stage] == rank_of[action.stage]:
        return None, 0
    return Action(receive, action.stage, action.microbatch), rank_of[stage]
