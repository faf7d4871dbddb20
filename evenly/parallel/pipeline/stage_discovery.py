"""Finds what cutting a model into stages needs to know, by running its code on fake tensors.

Code that needs numbers does not run on these, and is run on made-up ones (`example_tensor`).

First, one run of the job's loss in which all parameters are remote: which blocks are called, in which order, and for
each call the cost and the parameters used up to the next one. Then, once the stages are chosen, each is run by itself,
from the last to the first: which tensors it has to receive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from evenly.data.generators import drawn_past_torch, position_past_torch
from evenly.data.nest import map_tensors, tensors_by_path, tensors_in
from evenly.errors import EvenlyError, PlanError, describe
from evenly.model.fake import running_fake
from evenly.parallel.core.attributes import attributes_restored
from evenly.parallel.core.calls import BlockCall, BlockCalls
from evenly.parallel.pipeline.call_costs import CallRecord, CostRecorder, CurrentCost, merged_calls
from evenly.parallel.pipeline.draws import Draws
from evenly.parallel.pipeline.example_tensor import example_of, example_weight
from evenly.parallel.pipeline.example_tensor import examples as running_examples
from evenly.parallel.pipeline.hooks import has_hooks, run_with_hooks
from evenly.parallel.pipeline.messages import MAX_TENSORS
from evenly.parallel.pipeline.model import ResultRecorder, StagedModel, StageRun, StageTensor
from evenly.parallel.pipeline.remote_tensor import (
    OTHER_PLAN,
    RUNNING_STAGE,
    RemoteTensor,
    is_remote,
    materialized,
    remote,
)
from evenly.parallel.pipeline.stage_checks import check_can_be_staged, same_modules
from evenly.parallel.pipeline.stages import (
    BEGIN_CALL,
    END_CALL,
    CallCost,
    CallId,
    FoundCalls,
    StagePlan,
    TensorSite,
    stage_of_calls,
)
from evenly.torch_private import memory_key, operation_of

MOST_FORWARDS = 24  # that are tried until each block was called


def find_call_costs(model: StagedModel, compute: Callable[[], Any]) -> list[CallCost]:
    """The cost of each block call of one forward; compute: runs the job's loss. Raises `PlanError` where it cannot."""
    return find_calls(model, compute).costs


def find_calls(model: StagedModel, compute: Callable[[], Any]) -> FoundCalls:
    """The block calls of a forward, also those that the first leaves out by chance."""
    check_can_be_staged(model)
    with same_modules(model.model):
        found = _discover(model, partial(_CallDiscovery, model), compute)
    if not found.call_costs:
        raise PlanError(
            "cutting the model into stages",
            "it has no repeated blocks that its forward calls",
            f"put its layers into a ModuleList or Sequential, or {OTHER_PLAN}",
        )
    records, first = found.call_costs, tuple(record.call for record in found.call_costs)
    between: dict[str, set[CallId]] = {}
    found.add_between(between)
    places = {block.name: number for number, block in enumerate(model.blocks)}
    missing = {*places} - {call for call, _ in first}
    for key in range(1, MOST_FORWARDS) if found.by_chance else ():
        if not missing:
            break
        other = _discover(model, partial(_CallDiscovery, model), compute, key=key)
        other.add_between(between)
        records = merged_calls(records, other.call_costs, places)
        missing -= {record.call[0] for record in records}
    return FoundCalls([record.cost(model) for record in records], first, found.by_chance, between)


def find_stage_plan(
    model: StagedModel,
    found: FoundCalls,
    counts: Sequence[int],
    compute: Callable[[], Any],
    evaluate: Callable[[], Any] | None,
) -> StagePlan:
    """The stage plan with `counts` block calls per stage; compute, evaluate: run the loss in training, evaluation.

    Raises `PlanError` where a stage cannot run by itself.
    """
    stage_of = stage_of_calls([call_cost.call for call_cost in found.costs], counts)
    owners = found.owners([*model.stage_tensors], stage_of)
    nothing = tuple(() for _ in counts)
    stage_plan = StagePlan(
        counts=tuple(counts),
        calls={True: found.first, False: ()},
        stage_of=stage_of,
        owners=owners,
        stage_inputs={True: nothing, False: nothing},
        mixed_draws=frozenset({True} if found.by_chance else ()),
        by_chance=found.by_chance,
        runs_through=frozenset((True, False) if has_hooks(block.module for block in model.blocks) else ()),
    )
    stage_plan = _with_stage_inputs(model, stage_plan, compute, training=True)
    if evaluate is None:
        return stage_plan
    calls = tuple(call_cost.call for call_cost in find_call_costs(model, evaluate))
    if any(call not in stage_of for call in calls):
        raise PlanError(
            RUNNING_STAGE,
            "an evaluation calls blocks that training does not: the model leaves some out by chance (layerdrop)",
            OTHER_PLAN,
        )
    stage_plan = replace(stage_plan, calls={**stage_plan.calls, False: calls})
    return _with_stage_inputs(model, stage_plan, evaluate, training=False)


def _with_stage_inputs(
    model: StagedModel, stage_plan: StagePlan, compute: Callable[[], Any], *, training: bool, key: int | None = 0
) -> StagePlan:
    """`stage_plan` with the inputs of each stage; key: as of `_run`."""
    for stage in reversed(range(stage_plan.stages)):
        model.set_stage_plan(stage_plan)
        discovery = partial(_InputDiscovery, model, stage, training=training)
        try:
            run = _discover(model, discovery, compute, key=key)
        except EvenlyError as problem:  # it may need what a block has left behind
            if training in stage_plan.runs_through:
                raise
            stage_plan = replace(stage_plan, runs_through=stage_plan.runs_through | {training})
            model.set_stage_plan(stage_plan)
            try:
                run = _discover(model, discovery, compute, key=key)
            except EvenlyError as again:
                raise problem from again
        inputs = [*stage_plan.stage_inputs[training]]
        inputs[stage] = tuple(run.inputs)
        mixed = stage_plan.mixed_draws | ({training} if run.random.mixed else set())
        found = {**stage_plan.stage_inputs, training: tuple(inputs)}
        if len(run.inputs) >= MAX_TENSORS:
            raise PlanError(
                RUNNING_STAGE, f"stage {stage} has to receive {len(run.inputs)} tensors", f"use fewer, or {OTHER_PLAN}"
            )
        vary = stage_plan.shapes_vary or run.shaped > 0
        stage_plan = replace(stage_plan, stage_inputs=found, mixed_draws=mixed, shapes_vary=vary)
    return stage_plan


Discovery = TypeVar("Discovery", bound="_CallDiscovery | _InputDiscovery")


def _discover(
    model: StagedModel, discovery: Callable[..., Discovery], compute: Callable[[], Any], *, key: int | None = 0
) -> Discovery:
    """A run of `compute` on fake tensors or, where that fails, on examples."""
    try:
        _run(model, run := discovery(examples=False), compute, key=key)
    except EvenlyError as problem:
        try:
            _run(model, run := discovery(examples=True), compute, key=key)
        except EvenlyError as again:
            raise problem from again
    return run


def calls_of(model: StagedModel, compute: Callable[[], Any]) -> tuple[CallId, ...]:
    """The calls that `compute` makes, which draws its random numbers itself; no block is run."""
    run = _CallOrder(model)
    try:
        _run(model, run, compute, key=None)
    except EvenlyError:
        pass  # behind the last block it may need numbers
    return tuple(run.found)


def stage_plan_for(model: StagedModel, calls: tuple[CallId, ...], compute: Callable[[], Any]) -> StagePlan:
    """The model's stage plan for a microbatch in training that makes these calls; compute: as of `calls_of`."""
    before = model.stage_plan
    try:
        plan = replace(before, calls={**before.calls, True: calls})
        return _with_stage_inputs(model, plan, compute, training=True, key=None)
    finally:
        model.set_stage_plan(before)


def _run(
    model: StagedModel,
    run: _CallDiscovery | _InputDiscovery | _CallOrder,
    compute: Callable[[], Any],
    *,
    key: int | None,
) -> None:
    """Runs `compute` with random numbers from the stream `key`; None if it draws them itself, calls of blocks too."""
    calls = None if key is None else BlockCalls(model.blocks, model.device, model.call)
    model.running = run
    try:
        recorder = ResultRecorder(run) if isinstance(run, StageRun) else nullcontext()
        drawing = nullcontext() if calls is None or key is None else calls.drawing(key)
        kept = attributes_restored(model.model)  # what only a first call does is not done yet
        with kept, running_fake(), drawing, torch.enable_grad(), recorder, run.random, run.stack:
            run.end(compute())
    except _StageEnded:
        pass
    except EvenlyError:
        raise
    except Exception as problem:
        raise _refusal(problem) from problem
    finally:
        model.running = None
        if calls is not None:
            calls.close()


def _refusal(problem: Exception) -> PlanError:
    operation = operation_of(problem)
    if not operation:
        return PlanError(
            RUNNING_STAGE, f"the model's code does not run on fake tensors: {describe(problem)}", OTHER_PLAN
        )
    return PlanError(RUNNING_STAGE, f"{operation} needs numbers that another stage has", OTHER_PLAN)


class _CallDiscovery:
    """A run in which every parameter is remote, or an example; records each block call."""

    def __init__(self, model: StagedModel, *, examples: bool) -> None:
        self._model, self._examples = model, examples
        self.stack, self.random = ExitStack(), Draws()
        self._past_torch = False  # whether Python's or numpy's generator was drawn from
        self._remote: dict[str, torch.Tensor] = {}
        self._names = {id(tensor): stage_tensor.name for tensor, stage_tensor in model.local_tensors()}
        self._weights = {memory_key(stage_tensor.fake) for stage_tensor in model.stage_tensors.values()}
        self._before_first = CallRecord(("", 0))  # what precedes the first call
        self.call_costs: list[CallRecord] = []
        if examples:
            noting = running_examples(note_inputs=self._note_examples, note_saved=self._note_saved)
            self.stack.enter_context(noting)
            self.stack.enter_context(CurrentCost(lambda: self.current))

    def _note_examples(self, arguments: Any) -> None:
        self.note_inputs([*tensors_in(arguments)])

    def _note_saved(self, tensor: torch.Tensor) -> None:
        self.current.saved[memory_key(tensor)] = tensor.untyped_storage().nbytes()

    @property
    def function_context(self) -> AbstractContextManager[object]:
        """Counts the cost of a function, and notes what it saves for the backward."""
        return CostRecorder(self.current, self._weights)

    @property
    def current(self) -> CallRecord:
        return self.call_costs[-1] if self.call_costs else self._before_first

    def value_of(self, tensor: RemoteTensor) -> None:
        """None: no tensor has data."""

    def note_inputs(self, tensors: list[torch.Tensor]) -> None:
        """Notes the parameters among `tensors`."""
        self.current.tensors |= {name for tensor in tensors if (name := self._names.get(id(tensor))) is not None}

    def note_shaped(self) -> None:
        """Nothing to note."""

    def view_of(self, module: nn.Module, name: str, stage_tensor: StageTensor) -> torch.Tensor:
        """One remote tensor, or example, for each parameter."""
        if stage_tensor.name not in self._remote:
            new = example_weight(stage_tensor.fake) if self._examples else remote(stage_tensor.fake, self)
            self._remote[stage_tensor.name] = new
            self._names[id(new)] = stage_tensor.name
        return self._remote[stage_tensor.name]

    def add_between(self, between: dict[str, set[CallId]]) -> None:
        """Adds what this run has used outside of blocks to `between`, as in `FoundCalls`."""
        modules = {block.name: block.module for block in self._model.blocks}
        begin = self._before_first.tensors - self._model.names_in(modules[self.call_costs[0].call[0]])
        for name in begin:
            between.setdefault(name, set()).add(BEGIN_CALL)
        for record in self.call_costs:
            after = END_CALL if record is self.call_costs[-1] else record.call
            for name in record.tensors - self._model.names_in(modules[record.call[0]]) - begin:
                between.setdefault(name, set()).add(after)

    def begin(self) -> None: ...

    def call(self, call: BlockCall) -> Any:
        """Begins to record a call, and runs the block."""
        self.call_costs.append(CallRecord((call.block.name, call.number)))
        if len(self.call_costs) == 1:
            first, before = self.call_costs[0], self._before_first
            first.tensors, first.saved, first.counter = {*before.tensors}, before.saved, before.counter
        if self._examples:  # other numbers may lead to other parameters
            self.current.tensors |= self._model.names_in(call.block.module)
        self.random.at_block(between=False)
        before = position_past_torch()
        result = call.run(*call.args, **call.kwargs)
        if position_past_torch() != before:
            raise PlanError(
                RUNNING_STAGE,
                f"block {call.block.name} draws from Python's or numpy's generator, and stages would draw others",
                "draw from torch, or use a plan without pipeline",
            )
        self.random.at_block(between=True)
        return result

    def draws(self) -> bool:
        """Notes that a function draws for remote tensors."""
        return self.random.note()

    def end(self, result: Any) -> None:
        """Called with the loss when the model's code has ended."""
        self._past_torch = drawn_past_torch()

    @property
    def by_chance(self) -> bool:
        """Whether what is drawn between blocks may decide which are called."""
        return self.random.by_chance or self._past_torch


class _CallOrder(StageRun):
    """A run that skips every block, and finds out which are called."""

    def __init__(self, model: StagedModel) -> None:
        super().__init__(model, stage=0, inbox=[], training=True)
        self.stack, self.random, self.entered = ExitStack(), Draws(), False
        self.found: list[CallId] = []

    def draws(self) -> bool:
        """Notes that a function draws for remote tensors."""
        return self.random.note()

    def call(self, call: BlockCall) -> Any:
        """Skips the block."""
        now = (call.block.name, call.number)
        self.found.append(now)
        self.random.at_block(between=False)
        result = self._skip(call, now)
        self.random.at_block(between=True)
        return result


class _StageEnded(Exception):
    """Ends the run of a stage at the first block of the next."""


class _InputDiscovery(StageRun):
    """A run of one stage that finds the tensors it must receive; fake tensors take their place."""

    def __init__(self, model: StagedModel, stage: int, *, training: bool, examples: bool) -> None:
        super().__init__(model, stage, [None] * len(model.stage_plan.stage_inputs[training][stage]), training=training)
        self.stack, self.random, self._examples = ExitStack(), Draws(), examples
        self._own: dict[str, torch.Tensor] = {}
        self.inputs: list[TensorSite] = []
        if examples and self.entered:
            self.stack.enter_context(running_examples())
        self._sites: dict[int, tuple[RemoteTensor, TensorSite]] = {}

    def value_of(self, tensor: RemoteTensor) -> torch.Tensor | None:
        """A fake tensor for each one used once the stage is entered, which it must receive; None if it has no site."""
        if not self.entered:
            return None
        if (found := super().value_of(tensor)) is not None:
            return found
        site = self._sites.get(id(tensor))
        if site is None:
            return None
        self.inputs.append(site[1])
        return example_of(tensor.fake) if self._examples else tensor.fake.clone()  # no leaf: may be overwritten

    def view_of(self, module: nn.Module, name: str, stage_tensor: StageTensor) -> torch.Tensor | None:
        """As in `StageRun`, with the stage's own parameters as fake tensors."""
        found = super().view_of(module, name, stage_tensor)
        if found is not None:
            return found
        if not self._examples:
            return stage_tensor.fake
        return self._own.setdefault(stage_tensor.name, example_weight(stage_tensor.fake))

    def _note(self, call: CallId, side: str, nest: Any) -> None:
        for path, tensor in tensors_by_path(nest):
            self._note_at(TensorSite(call, side, path), tensor)

    def _note_at(self, site: TensorSite, tensor: torch.Tensor) -> None:
        super()._note_at(site, tensor)
        if not self.entered and isinstance(tensor, RemoteTensor):
            self._sites.setdefault(id(tensor), (tensor, site))

    def _enter(self, call: BlockCall | None) -> None:
        arguments = () if call is None else (call.args, call.kwargs)
        for path, tensor in tensors_by_path(arguments):
            if isinstance(tensor, RemoteTensor):
                self._sites[id(tensor)] = (tensor, TensorSite(None, "in", path))
        if self._examples:
            self.stack.enter_context(running_examples())
        super()._enter(call)
        map_tensors(materialized, arguments)  # all arguments must be received

    def draws(self) -> bool:
        """Notes that a function draws for remote tensors."""
        return self.random.note()

    def call(self, call: BlockCall) -> Any:
        """As in `StageRun`, but ends without sending."""
        self.random.at_block(between=False)
        result = self._called(call)
        self.random.at_block(between=True)
        return result

    def _ended(self, call: BlockCall | None) -> Exception:
        self._payload(call)
        return _StageEnded()

    def _called(self, call: BlockCall) -> Any:
        stage = self._model.stage_plan.stage_of[call.block.name, call.number]
        if stage > self.stage:
            if not self.entered:
                self._enter(call)
            raise self._ended(call)
        return super().call(call)

    def _run_block(self, call: BlockCall, args: Any, kwargs: Any) -> Any:
        """The block's code without what a plan has put around it."""
        module = call.block.module
        result = run_with_hooks(module, partial(type(module).forward, module), args, kwargs)
        call.skip()
        return result

    def _check(self, nest: Any, call: BlockCall | None) -> None:
        for path, tensor in tensors_by_path(nest):
            if is_remote(tensor):
                where = f"block {call.block.name}" if call is not None else "the loss"
                raise PlanError(
                    RUNNING_STAGE,
                    f"{where} needs (at {path}) what an earlier stage computes inside a block and does not return, "
                    f"of shape {tuple(tensor.shape)}",
                    f"return it from the block, or {OTHER_PLAN}",
                )
