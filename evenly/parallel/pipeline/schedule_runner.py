"""Runs a rank's actions of a step: its stages on the microbatches of the batch, in the order of the schedule.

The order is that of `orders`. Messages and shapes are our own (`messages`), since the
microbatches of one step may differ in shape, and the loss is the job's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from evenly.comm.groups import Group
from evenly.parallel.pipeline.backward import backward, begin_backward, non_view_alias
from evenly.parallel.pipeline.messages import Arriving, ArrivingGradients, Payload, StageChannel
from evenly.parallel.pipeline.model import StagedModel
from evenly.parallel.pipeline.orders import Taken, orders, receives_ahead, taken_by
from evenly.plan.axes import PipelineAxis
from evenly.plan.schedule import Action, Kind, rank_of_stage

Pass = tuple[int, int]  # stage, microbatch


class ActionSpan(NamedTuple):
    """What a rank did when; seconds of the machine's clock."""

    kind: Kind
    stage: int
    microbatch: int
    begin_s: float
    end_s: float


class MicrobatchWork(Protocol):
    """The microbatches of a step."""

    def shape_key(self, microbatch: int) -> Hashable:
        """Its shapes: what the shapes within the model follow from."""
        ...

    def forward(self, microbatch: int) -> torch.Tensor | None:
        """The job's loss of it; a scalar to be differentiated, or None if there is nothing to."""
        ...

    def before_backward(self, *, last: bool) -> None:
        """A stage is about to compute gradients; for the last time in this step on this rank, or not."""
        ...

    def after_backward(self) -> None:
        """Called when parameters have new gradients."""
        ...


@dataclass(eq=False)
class _Passing:
    """A microbatch in a stage, between its forward and its backward."""

    inputs: Payload
    outputs: Payload
    gradients: list[torch.Tensor | None] = field(default_factory=list[torch.Tensor | None])
    rest: Callable[[], None] | None = None


class ScheduleRunner:
    """The pipeline as one rank runs it.

    axis:      as in the plan. group: its ranks.
    computing: around every backward.
    in_parts:  whether the gradients of inputs come first where the schedule asks for that; else all come together.
    prepare:   called before every pass. leaving: what a stage's output goes through before it is sent on, in turn.
    """

    def __init__(
        self,
        model: StagedModel,
        axis: PipelineAxis,
        group: Group,
        *,
        computing: AbstractContextManager[object],
        in_parts: bool,
        prepare: Callable[[], object] | None,
        leaving: Sequence[Callable[[Payload], Payload]],
    ) -> None:
        self._model, self._axis, self._group = model, axis, group
        self._ranks = rank_of_stage(axis.schedule, axis.size, axis.stages_per_rank)
        self._computing, self._in_parts, self._prepare, self._leaving = computing, in_parts, prepare, leaving
        self._channel = StageChannel(group, len(self._ranks))
        self._work: Any = None
        self._likes: list[Hashable] = []  # of each microbatch, what the forms within the model follow from
        self._training, self._last = True, False
        self._forget()

    def _forget(self) -> None:
        self._passing: dict[Pass, _Passing] = {}
        self._inboxes: dict[Pass, Payload] = {}
        self._arriving: dict[Pass, Arriving] = {}
        self._gradients: dict[Pass, ArrivingGradients] = {}
        self._local_gradients: dict[Pass, list[torch.Tensor | None]] = {}

    # --------------------------------------------------------------------------------------------------- a pass
    def step(self, microbatches: int, work: MicrobatchWork, spans: list[ActionSpan] | None = None) -> None:
        """Forward and backward of all microbatches; what was done when is added to `spans`."""
        self._training = True
        self._perform(self._orders(microbatches), self._acknowledged(microbatches), microbatches, work, spans)

    def evaluate(self, microbatches: int, work: MicrobatchWork) -> None:
        """The forward of all microbatches."""
        self._training = False
        forward = ("forward", "send_forward", "recv_forward")
        actions = [action for action in self._orders(microbatches) if action.kind in forward]
        self._perform(actions, {}, microbatches, work, None)

    def _orders(self, microbatches: int) -> Sequence[Action]:
        if not microbatches:
            return ()
        axis = self._axis
        return orders(axis.schedule, axis.size, axis.stages_per_rank, microbatches)[self._group.position]

    def _acknowledged(self, microbatches: int) -> Taken:
        if not microbatches:
            return {}
        axis = self._axis
        return taken_by(axis.schedule, axis.size, axis.stages_per_rank, microbatches)[self._group.position]

    def _perform(
        self,
        actions: Sequence[Action],
        taken: Taken,
        microbatches: int,
        work: MicrobatchWork,
        spans: list[ActionSpan] | None,
    ) -> None:
        self._work = work
        self._likes = [(self._training, work.shape_key(number)) for number in range(microbatches)]
        if self._prepare is not None:
            self._prepare()
        clock = time.time() - time.perf_counter()  # the machine's, which may be set back meanwhile
        try:
            last = max((n for n, action in enumerate(actions) if action.kind in self._backwards), default=-1)
            for number, action in enumerate(actions):
                self._last = number == last
                self._expect(receives_ahead(actions, number))
                begin = clock + time.perf_counter()
                getattr(self, f"_{action.kind}")((action.stage, action.microbatch))
                for sent in taken.get(action, ()):
                    back = sent.kind == "send_backward"
                    self._channel.acknowledged(sent.stage + (not back), sent.microbatch, back=back)
                if spans is not None:
                    end = clock + time.perf_counter()
                    spans.append(ActionSpan(action.kind, action.stage, action.microbatch, begin, end))
            self._channel.finish()
        finally:
            self._work = None
            self._forget()

    def _expect(self, coming: Sequence[Action]) -> None:
        """Begins to receive what comes next, where its shapes are known."""
        for action in coming:
            at = (action.stage, action.microbatch)
            if action.kind == "recv_backward":
                self._expect_gradients(at)
            elif self._channel.expects(action.stage, self._likes[action.microbatch]):
                self._expect_inputs(at)
            else:
                return

    # -------------------------------------------------------------------------------------------------- forward
    def _recv_forward(self, at: Pass) -> None:
        self._expect_inputs(at)
        self._inboxes[at] = self._arriving.pop(at).wait()

    def _expect_inputs(self, at: Pass) -> None:
        if at not in self._arriving and at not in self._inboxes:
            stage, microbatch = at
            needs = self._model.stage_plan.stage_inputs[self._training][stage]
            self._arriving[at] = self._channel.begin_recv(
                self._ranks[stage - 1],
                tensors=len(needs),
                stage=stage,
                microbatch=microbatch,
                like=self._likes[microbatch],
            )

    def _forward(self, at: Pass) -> None:
        stage, microbatch = at
        inputs = self._inboxes.pop(at, [])
        given = [None if tensor is None else non_view_alias(tensor) for tensor in inputs]
        found: list[torch.Tensor | None] = []

        def compute() -> Any:
            found.append(self._work.forward(microbatch))
            return found[0]

        payload, _ = self._model.forward(stage, given, compute, training=self._training)
        if payload is not None:
            for change in self._leaving:
                payload = change(payload)
        outputs = [None if one is None else non_view_alias(one) for one in (found if payload is None else payload)]
        if payload is not None and self._ranks[stage + 1] == self._group.position:
            self._inboxes[stage + 1, microbatch] = [
                None if one is None else one.detach().requires_grad_(one.requires_grad) for one in outputs
            ]
        if self._training or payload is not None:
            self._passing[at] = _Passing(inputs, outputs)

    def _send_forward(self, at: Pass) -> None:
        stage, microbatch = at
        passing = self._passing[at] if self._training else self._passing.pop(at)
        to, like = self._ranks[stage + 1], self._likes[microbatch]
        self._channel.send(passing.outputs, to, stage=stage + 1, microbatch=microbatch, like=like)

    # ------------------------------------------------------------------------------------------------- backward
    @property
    def _backwards(self) -> tuple[Kind, ...]:
        """Kinds of actions after which parameters have gradients."""
        return ("backward", "backward_weight") if self._in_parts else ("backward", "backward_input")

    def _recv_backward(self, at: Pass) -> None:
        self._expect_gradients(at)
        self._passing[at].gradients = self._gradients.pop(at).wait()

    def _expect_gradients(self, at: Pass) -> None:
        passing = self._passing.get(at)
        if passing is not None and at not in self._gradients and not passing.gradients:
            stage, microbatch = at
            source = self._ranks[stage + 1]
            self._gradients[at] = self._channel.begin_recv_gradients(
                passing.outputs, source, stage=stage + 1, microbatch=microbatch
            )

    def _backward(self, at: Pass) -> None:
        passing = self._passing.pop(at)
        self._work.before_backward(last=self._last)
        with self._computing:
            backward(*self._differentiated(at, passing))
        self._hand_back(at, passing)
        self._work.after_backward()

    def _backward_input(self, at: Pass) -> None:
        passing = self._passing[at]
        self._work.before_backward(last=self._last)
        outputs, gradients = self._differentiated(at, passing)
        inputs = [one for one in passing.inputs if one is not None and one.requires_grad]
        with self._computing:
            if self._in_parts:
                passing.rest = begin_backward(outputs, gradients, inputs, self._model.parameters(at[0]))
            else:
                backward(outputs, gradients)
        passing.outputs = []
        self._hand_back(at, passing)

    def _backward_weight(self, at: Pass) -> None:
        rest = self._passing.pop(at).rest
        self._work.before_backward(last=self._last)
        if rest is not None:
            with self._computing:
                rest()
        self._work.after_backward()

    def _differentiated(self, at: Pass, passing: _Passing) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """What there is a gradient of, and the gradient; that of the loss is left to torch."""
        stage, _ = at
        if stage == len(self._ranks) - 1:
            outputs = [one for one in passing.outputs if one is not None and one.requires_grad]
            return outputs, [None for _ in outputs]
        gradients = self._local_gradients.pop(at, passing.gradients)
        both = [
            (one, gradient)
            for one, gradient in zip(passing.outputs, gradients, strict=True)
            if one is not None and one.requires_grad and gradient is not None
        ]
        return [one for one, _ in both], [gradient for _, gradient in both]

    def _hand_back(self, at: Pass, passing: _Passing) -> None:
        """Keeps the gradients of what the stage received for the stage that sent it."""
        stage, microbatch = at
        if stage and self._ranks[stage - 1] == self._group.position:
            self._local_gradients[stage - 1, microbatch] = [None if one is None else one.grad for one in passing.inputs]
        elif stage:
            self._returning = passing.inputs

    def _send_backward(self, at: Pass) -> None:
        stage, microbatch = at
        to = self._ranks[stage - 1]
        self._channel.send_gradients(self._returning, to, stage=stage, microbatch=microbatch)
        self._returning = []
