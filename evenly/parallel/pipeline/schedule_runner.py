"""Runs a rank's actions of a step: its stages on the microbatches of the batch, in the order of the schedule.

The order comes from `orders`. torch's stages are not used, since the microbatches of one step may differ in shape
(`messages`), and the loss is the job's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.checkpoint import CheckpointError

from evenly.comm.groups import Group
from evenly.errors import EvenlyError, PathError, PlanError
from evenly.parallel.core.calls import several_stages_together
from evenly.parallel.pipeline.backward import backward, begin_backward, non_view_alias
from evenly.parallel.pipeline.messages import IncomingGradients, IncomingTensors, Payload, StageChannel
from evenly.parallel.pipeline.model import StagedModel
from evenly.parallel.pipeline.orders import Acknowledgements, acknowledgements, orders, receives_ahead
from evenly.parallel.pipeline.result_forms import ResultForms
from evenly.parallel.pipeline.stage_discovery import stage_plan_for
from evenly.parallel.pipeline.stages import StagePlan
from evenly.plan.axes import PipelineAxis
from evenly.plan.schedule import Action, ActionSpan, Kind, rank_of_stage

Pass = tuple[int, int]  # stage, microbatch


class MicrobatchWork(Protocol):
    """The microbatches of a step."""

    def shape_key(self, microbatch: int) -> Hashable:
        """The shapes of the microbatch, which determine all shapes within the model."""

    def run_code(self, microbatch: int) -> Any:
        """Runs the job's loss of the microbatch, and records nothing."""

    def forward(self, microbatch: int) -> torch.Tensor | None:
        """The job's loss of the microbatch; a scalar to differentiate, or None if there is nothing to."""

    def stop(self, microbatch: int, problem: EvenlyError) -> bool:
        """Records that the microbatch cannot be run; False if its pass cannot go on without it."""
        ...

    def after_forward(self, outputs: Payload) -> None:
        """Called with what a stage's forward has returned: what the next stage receives, or the loss."""

    def before_backward(self, *, last: bool) -> None:
        """Called before a stage computes gradients; last: for the last time in this step on this rank."""

    def after_backward(self) -> None:
        """Called when parameters have new gradients."""


@dataclass(eq=False)
class _InFlight:
    """A microbatch in a stage, between its forward and its backward.

    gradients:       of the outputs, once received. backward_weight: computes the gradients of parameters, if they come
                     after those of the inputs.
    """

    inputs: Payload
    outputs: Payload
    gradients: list[torch.Tensor | None] = field(default_factory=list[torch.Tensor | None])
    backward_weight: Callable[[], None] | None = None


def _span(action: Action, begin_s: float, clock: float, arrived_s: float | None) -> ActionSpan:
    """Of an action that ends here; clock: the machine's less `time.perf_counter`, on which `arrived_s` is."""
    end_s, arrived = clock + time.perf_counter(), None if arrived_s is None else clock + arrived_s
    return ActionSpan(action.kind, action.stage, action.microbatch, begin_s, end_s, arrived)


@contextmanager
def types_kept(types: Callable[[], dict[str, torch.dtype]]) -> Generator[None]:
    """Raises `PlanError` where what runs within changes one of `types`, by name of a parameter."""
    before = types()
    yield
    after = types()
    if changed := [name for name, kind in after.items() if before[name] != kind]:
        raise PlanError(
            "running a stage of the model by itself",
            f"the forward makes {changed[0]} {after[changed[0]]}, which was {before[changed[0]]}",
            "let the model's builder give parameters their types, or have the forward cast what it computes with",
        )


class ScheduleRunner:
    """Runs one rank's part of the pipeline.

    axis:              as in the plan. group: its ranks.
    backward_context:  entered around every backward.
    split_backward:    whether the gradients of inputs are computed first where the schedule asks for that.
    before_pass:       called before every step or evaluation.
    output_transforms: applied in order to a stage's output before it is sent.
    """

    def __init__(
        self,
        model: StagedModel,
        axis: PipelineAxis,
        group: Group,
        *,
        backward_context: AbstractContextManager[object],
        split_backward: bool,
        before_pass: Callable[[], object] | None,
        output_transforms: Sequence[Callable[[Payload], Payload]],
    ) -> None:
        self._model, self._group = model, group
        self._schedule = axis.schedule, axis.size, axis.stages_per_rank  # of the pipeline
        self._ranks = rank_of_stage(*self._schedule)
        self._backward_context, self._split_backward = backward_context, split_backward
        self._backwards: tuple[Kind, ...] = ("backward", "backward_weight" if split_backward else "backward_input")
        self._before_pass, self._output_transforms = before_pass, output_transforms
        self._channel = StageChannel(group, len(self._ranks))
        self._work: Any = None
        self._shape_keys: list[Hashable] = []  # of each microbatch
        self._stage_plans: list[StagePlan] = []  # of each microbatch
        self._stopped_by: EvenlyError | None = None  # what this rank cannot run; it goes on with nothing to the end
        self._training, self._runs_backwards, self._is_last_backward = True, True, False
        self._reset()

    def _reset(self) -> None:
        self._in_flight: dict[Pass, _InFlight] = {}
        self._inputs: dict[Pass, Payload] = {}
        self._forms: dict[Pass, ResultForms] = {}  # as the stage before has sent them
        self._found_forms: dict[Pass, ResultForms] = {}  # for the next stage
        self._incoming: dict[Pass, IncomingTensors] = {}
        self._incoming_gradients: dict[Pass, IncomingGradients] = {}
        self._local_gradients: dict[Pass, list[torch.Tensor | None]] = {}

    # --------------------------------------------------------------------------------------------------- a pass
    def step(self, microbatches: int, work: MicrobatchWork, spans: list[ActionSpan] | None = None) -> None:
        """Runs forward and backward of all microbatches; appends when each action ran to `spans`."""
        self._training = True
        self._run(self._orders(microbatches), self._acknowledgements(microbatches), microbatches, work, spans)

    def look(self, microbatches: int, work: MicrobatchWork) -> None:
        """Runs the forward of all microbatches as in training, and drops it."""
        self._training = True
        with types_kept(self._model.local_types):
            self._run(self._forwards(microbatches), {}, microbatches, work, None)

    def evaluate(self, microbatches: int, work: MicrobatchWork) -> None:
        """Runs the forward of all microbatches."""
        self._training = False
        self._run(self._forwards(microbatches), {}, microbatches, work, None)

    def _forwards(self, microbatches: int) -> list[Action]:
        forward = ("forward", "send_forward", "recv_forward")
        return [action for action in self._orders(microbatches) if action.kind in forward]

    def _orders(self, microbatches: int) -> Sequence[Action]:
        if not microbatches:
            return ()
        return orders(*self._schedule, microbatches)[self._group.position]

    def _acknowledgements(self, microbatches: int) -> Acknowledgements:
        if not microbatches:
            return {}
        return acknowledgements(*self._schedule, microbatches)[self._group.position]

    def _run(
        self,
        actions: Sequence[Action],
        acknowledged_by: Acknowledgements,
        microbatches: int,
        work: MicrobatchWork,
        spans: list[ActionSpan] | None,
    ) -> None:
        self._work, self._stopped_by = work, None
        self._stage_plans = [self._stage_plan_of(number) for number in range(microbatches)]
        vary = self._model.stage_plan.shapes_vary
        kind = self._training, self._model.stage_plan.phase
        self._shape_keys = [
            None if vary else (kind, work.shape_key(number), id(plan)) for number, plan in enumerate(self._stage_plans)
        ]
        if self._before_pass is not None:
            self._before_pass()
        clock = time.time() - time.perf_counter()  # the machine's, which may be set meanwhile
        try:
            last = max((n for n, action in enumerate(actions) if action.kind in self._backwards), default=-1)
            self._runs_backwards = last >= 0
            for number, action in enumerate(actions):
                self._is_last_backward = number == last
                self._post_receives(receives_ahead(actions, number))
                begin = clock + time.perf_counter()
                arrived_s = getattr(self, f"_{action.kind}")((action.stage, action.microbatch))
                for sent in acknowledged_by.get(action, ()):
                    is_gradient = sent.kind == "send_backward"
                    self._channel.acknowledged(sent.stage + (not is_gradient), sent.microbatch, is_gradient=is_gradient)
                if spans is not None:
                    spans.append(_span(action, begin, clock, arrived_s))
            self._channel.finish()
        except CheckpointError as problem:
            raise several_stages_together("what the model has checkpointed") from problem
        finally:
            self._work = None
            self._reset()

    def _stage_plan_of(self, microbatch: int) -> StagePlan:
        training, first = self._training, self._model.stage_plan
        if training not in first.paths_differ or self._stopped_by is not None:
            return first
        try:
            return stage_plan_for(self._model, partial(self._work.run_code, microbatch), training=training)
        except EvenlyError as problem:
            self._stop(microbatch, problem)
            return first

    def _stop(self, microbatch: int, problem: EvenlyError) -> None:
        """Computes nothing more in this pass: others wait for messages, and learn at its end that it has failed."""
        if not self._work.stop(microbatch, problem):
            raise problem
        self._stopped_by = problem

    def _post_receives(self, coming: Sequence[Action]) -> None:
        """Begins the next receives, as far as their shapes are known."""
        for action in coming:
            at = (action.stage, action.microbatch)
            if action.kind == "recv_backward":
                self._begin_recv_gradients(at)
            elif self._channel.expects(action.stage, self._shape_keys[action.microbatch]):
                self._begin_recv_inputs(at)
            else:
                return

    # -------------------------------------------------------------------------------------------------- forward
    def _recv_forward(self, at: Pass) -> float | None:
        self._begin_recv_inputs(at)
        incoming = self._incoming.pop(at)
        self._inputs[at], self._forms[at] = incoming.wait(), incoming.forms
        return incoming.arrived_s

    def _begin_recv_inputs(self, at: Pass) -> None:
        if at not in self._incoming and at not in self._inputs:
            stage, microbatch = at
            stage_inputs = self._stage_plans[microbatch].stage_inputs[self._training][stage]
            self._incoming[at] = self._channel.begin_recv(
                self._ranks[stage - 1],
                tensors=len(stage_inputs),
                stage=stage,
                microbatch=microbatch,
                shape_key=self._shape_keys[microbatch],
            )

    def _forward(self, at: Pass) -> None:
        stage, microbatch = at
        inputs = self._inputs.pop(at, [])
        given = [None if tensor is None else non_view_alias(tensor) for tensor in inputs]
        found: list[torch.Tensor | None] = []

        def compute() -> Any:
            found.append(self._work.forward(microbatch))
            return found[0]

        found_forms = [] if self._sends_forms(stage, microbatch) else None
        payload = None
        try:
            if self._stopped_by is None:
                payload, _ = self._model.forward(
                    stage,
                    given,
                    compute,
                    training=self._training,
                    stage_plan=self._stage_plans[microbatch],
                    forms=self._forms.pop(at, None),
                    found_forms=found_forms,
                )
        except PathError as problem:
            self._stop(microbatch, problem)
        if self._stopped_by is not None:
            expected = self._stage_plans[microbatch].stage_inputs[self._training][stage + 1 :]
            shape_key, found[:] = self._shape_keys[microbatch], [None]
            payload = self._channel.nothing(stage + 1, shape_key, len(expected[0])) if expected else None
        elif payload is not None:
            for transform in self._output_transforms:
                payload = transform(payload)
        outputs = found if payload is None else payload
        if self._split_backward and stage:  # whose two parts begin at an output's own node
            outputs = [None if one is None else non_view_alias(one) for one in outputs]
        if payload is not None and self._ranks[stage + 1] == self._group.position:
            self._inputs[stage + 1, microbatch] = [
                None if one is None else one.detach().requires_grad_(one.requires_grad) for one in outputs
            ]
            self._forms[stage + 1, microbatch] = found_forms or []
        elif found_forms is not None:
            self._found_forms[at] = found_forms
        self._work.after_forward(outputs)
        if self._runs_backwards or (payload is not None and (stage + 1, microbatch) not in self._inputs):
            self._in_flight[at] = _InFlight(inputs, outputs)

    def _sends_forms(self, stage: int, microbatch: int) -> bool:
        """Whether the next stage gets the forms of what blocks return: on this rank always, else for new shapes."""
        if stage == len(self._ranks) - 1:
            return False
        here = self._ranks[stage + 1] == self._group.position
        return here or self._channel.sends_forms(stage + 1, self._shape_keys[microbatch])

    def _send_forward(self, at: Pass) -> None:
        stage, microbatch = at
        in_flight = self._in_flight[at] if self._runs_backwards else self._in_flight.pop(at)
        to, shape_key = self._ranks[stage + 1], self._shape_keys[microbatch]
        forms = self._found_forms.pop(at, None)
        self._channel.send(
            in_flight.outputs, to, stage=stage + 1, microbatch=microbatch, shape_key=shape_key, forms=forms
        )

    # ------------------------------------------------------------------------------------------------- backward
    def _recv_backward(self, at: Pass) -> float | None:
        self._begin_recv_gradients(at)
        incoming = self._incoming_gradients.pop(at)
        self._in_flight[at].gradients = incoming.wait()
        return incoming.arrived_s

    def _begin_recv_gradients(self, at: Pass) -> None:
        in_flight = self._in_flight.get(at)
        if in_flight is not None and at not in self._incoming_gradients and not in_flight.gradients:
            stage, microbatch = at
            source = self._ranks[stage + 1]
            self._incoming_gradients[at] = self._channel.begin_recv_gradients(
                in_flight.outputs, source, stage=stage + 1, microbatch=microbatch
            )

    def _backward(self, at: Pass) -> None:
        in_flight = self._in_flight.pop(at)
        self._work.before_backward(last=self._is_last_backward)
        with self._backward_context:
            backward(*self._outputs_and_gradients(at, in_flight))
        if not self._return_gradients(at, in_flight):
            self._work.after_backward()

    def _backward_input(self, at: Pass) -> None:
        in_flight = self._in_flight[at]
        self._work.before_backward(last=self._is_last_backward)
        outputs, gradients = self._outputs_and_gradients(at, in_flight)
        inputs = [one for one in in_flight.inputs if one is not None and one.requires_grad]
        with self._backward_context:
            if self._split_backward:
                in_flight.backward_weight = begin_backward(outputs, gradients, inputs, self._model.parameters(at[0]))
            else:
                backward(outputs, gradients)
        in_flight.outputs = []
        self._return_gradients(at, in_flight)

    def _backward_weight(self, at: Pass) -> None:
        backward_weight = self._in_flight.pop(at).backward_weight
        self._work.before_backward(last=self._is_last_backward)
        if backward_weight is not None:
            with self._backward_context:
                backward_weight()
        self._work.after_backward()

    def _outputs_and_gradients(
        self, at: Pass, in_flight: _InFlight
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """The outputs that have a gradient, and their gradients; None for the loss, whose gradient torch fills in."""
        if at[0] == len(self._ranks) - 1:
            outputs = [one for one in in_flight.outputs if one is not None and one.requires_grad]
            return outputs, [None for _ in outputs]
        gradients = self._local_gradients.pop(at, in_flight.gradients)
        both = [
            (one, gradient)
            for one, gradient in zip(in_flight.outputs, gradients, strict=True)
            if one is not None and one.requires_grad and gradient is not None
        ]
        return [one for one, _ in both], [gradient for _, gradient in both]

    def _return_gradients(self, at: Pass, in_flight: _InFlight) -> bool:
        """Makes the gradients of the stage's inputs available to the stage before it; whether they are to be sent."""
        stage, microbatch = at
        if stage and self._ranks[stage - 1] == self._group.position:
            self._local_gradients[stage - 1, microbatch] = [
                None if one is None else one.grad for one in in_flight.inputs
            ]
            return False
        self._inputs_to_return = in_flight.inputs
        return stage > 0

    def _send_backward(self, at: Pass) -> None:
        stage, microbatch = at
        to = self._ranks[stage - 1]
        self._channel.send_gradients(self._inputs_to_return, to, stage=stage, microbatch=microbatch)
        self._inputs_to_return = []
        if at not in self._in_flight:  # a whole backward, whose end may wait for other ranks
            self._work.after_backward()
