"""What every rank of a pipeline does in a step, in order, with its messages, as data. Pure; imports no torch.

Sends are asynchronous and directly follow the action whose result they send; a receive waits. Messages from one rank to
another are received in the order in which they are sent, each as late as possible: just before the action that needs
it, or that needs a message sent after it. So a receive waits no longer than the next action has to, and needs no tag.
Messages in opposite directions between two ranks are not ordered against each other: where a send may block until it
is received, each direction needs a channel of its own.

torch's `_add_send_recv` places receives as early as possible, for a runtime that posts them there and waits later.
Waiting there would take up to twice the time of the schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

from evenly.plan.orders import compute_orders
from evenly.plan.schedule import Action, Kind, Schedule, rank_of_stage

Order = tuple[Action, ...]
Acknowledgements = Mapping[Action, tuple[Action, ...]]

# The send and the receive that carry an action's result to another rank, and the offset of the receiving stage.
MESSAGES: dict[Kind, tuple[Kind, Kind, int]] = {
    "forward": ("send_forward", "recv_forward", 1),
    "backward": ("send_backward", "recv_backward", -1),
    "backward_input": ("send_backward", "recv_backward", -1),
}

RECEIVES: frozenset[Kind] = frozenset(["recv_forward", "recv_backward"])
RECEIVES_AHEAD = 2  # receives that a rank posts before it needs them
LOOKAHEAD_ACTIONS = 8  # how far ahead it looks for them


def receives_ahead(actions: Sequence[Action], number: int) -> list[Action]:
    """The receives to post before action `number`, as far as their shapes are known by then."""
    return [action for action in actions[number : number + LOOKAHEAD_ACTIONS] if action.kind in RECEIVES][
        :RECEIVES_AHEAD
    ]


@cache
def orders(schedule: Schedule, ranks: int, stages_per_rank: int, microbatches: int) -> tuple[Order, ...]:
    """The actions of a step for every rank of the pipeline axis, in order; `microbatches` is a runnable number."""
    compute_actions = compute_orders(schedule, ranks, stages_per_rank, microbatches)
    return _with_messages(compute_actions, rank_of_stage(schedule, ranks, stages_per_rank))


@cache
def acknowledgements(
    schedule: Schedule, ranks: int, stages_per_rank: int, microbatches: int
) -> tuple[Acknowledgements, ...]:
    """For every rank, each of its receives -> those of its sends which that message proves to be delivered.

    A rank runs its actions in order: a message from it proves that every receive before that send has completed.
    """
    all_orders = orders(schedule, ranks, stages_per_rank, microbatches)
    found: tuple[dict[Action, tuple[Action, ...]], ...] = tuple({} for _ in all_orders)
    rank_of = rank_of_stage(schedule, ranks, stages_per_rank)
    for order in all_orders:
        received: dict[int, list[Action]] = {}  # by sender, since the last message to it
        for action in order:
            sent = _other_end(action)
            if sent is not None and action.kind in RECEIVES:
                received.setdefault(rank_of[sent.stage], []).append(sent)
            elif sent is not None:
                sender = rank_of[sent.stage]
                found[sender][sent] = tuple(received.pop(sender, ()))
    return found


def _other_end(action: Action) -> Action | None:
    for send, receive, step in MESSAGES.values():
        if action.kind == send:
            return Action(receive, action.stage + step, action.microbatch)
        if action.kind == receive:
            return Action(send, action.stage - step, action.microbatch)
    return None


def _with_messages(compute_actions: Sequence[Sequence[Action]], rank_of: Sequence[int]) -> tuple[Order, ...]:
    """Adds sends and receives between neighbouring stages of different ranks."""
    arriving = [
        [deque[Action]() for _ in compute_actions] for _ in compute_actions
    ]  # [receiver][sender], in the order of sending
    for sender, order in enumerate(compute_actions):
        for _, receive in filter(None, (_message_after(action, rank_of) for action in order)):
            arriving[rank_of[receive.stage]][sender].append(receive)
    return tuple(
        tuple(_interleave_receives(order, arriving[rank], rank_of)) for rank, order in enumerate(compute_actions)
    )


def _interleave_receives(
    order: Iterable[Action], arriving: Sequence[deque[Action]], rank_of: Sequence[int]
) -> Iterator[Action]:
    """The actions of a rank with its messages; pops its receives from `arriving`, by sender."""
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
    """The send after `action`, and the matching receive on the other rank, if there are any."""
    if action.kind not in MESSAGES:
        return None
    send, receive, step = MESSAGES[action.kind]
    stage = action.stage + step
    if stage not in range(len(rank_of)) or rank_of[stage] == rank_of[action.stage]:
        return None
    return Action(send, action.stage, action.microbatch), Action(receive, stage, action.microbatch)


def _receive_before(action: Action, rank_of: Sequence[int]) -> tuple[Action | None, int]:
    if action.kind not in MESSAGES:
        return None, 0
    _, receive, step = MESSAGES[action.kind]
    stage = action.stage - step
    if stage not in range(len(rank_of)) or rank_of[stage] == rank_of[action.stage]:
        return None, 0
    return Action(receive, action.stage, action.microbatch), rank_of[stage]
