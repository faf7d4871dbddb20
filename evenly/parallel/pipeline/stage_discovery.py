"""Finds what cutting a model into stages needs to know, by running its code on fake tensors.

Code that needs numbers does not run on these, and is run on made-up ones (`example_tensor`).

First, one run of the job's loss in which all parameters are remote: which blocks are called, in which order, and for
each call the cost and the parameters used up to the next one. Then, once the stages are chosen, each is run by itself,
from the last to the first: which tensors it has to receive.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from evenly.data.generators import drawn_past_torch, position_past_torch
from evenly.data.nest import tensors_in
from evenly.errors import EvenlyError, PathError, PlanError, describe
from evenly.model.fake import running_fake
from evenly.parallel.core.attributes import attributes_restored
from evenly.parallel.core.calls import BlockCall, BlockCalls
from evenly.parallel.pipeline.call_costs import CallRecord, CostRecorder, CurrentCost, merged_calls
from evenly.parallel.pipeline.draws import Draws
from evenly.parallel.pipeline.example_tensor import example_weight
from evenly.parallel.pipeline.example_tensor import examples as running_examples
from evenly.parallel.pipeline.hooks import has_hooks
from evenly.parallel.pipeline.input_discovery import InputDiscovery, StageEnded
from evenly.parallel.pipeline.messages import FORMS
from evenly.parallel.pipeline.model import StagedModel, StageRun, StageTensor
from evenly.parallel.pipeline.needs import Made, NeedFound
from evenly.parallel.pipeline.remote_tensor import (
    OTHER_PLAN,
    RUNNING_STAGE,
    RemoteTensor,
    fake_like,
    remote,
    write_refusal,
)
from evenly.parallel.pipeline.result_sites import ResultRecorder, ResultSites
from evenly.parallel.pipeline.stage_checks import (
    buffers_kept,
    check_can_be_staged,
    check_rules_of_buffers,
    same_modules,
)
from evenly.parallel.pipeline.stages import BEGIN_CALL, END_CALL, CallId, FoundCalls, StagePlan, stage_of_calls
from evenly.torch_private import memory_bytes, memory_key, operation_of

MOST_NEEDS = 100  # that are found one by one
MOST_FORWARDS = 24  # that are tried until each block was called


@dataclass(frozen=True, eq=False)
class Code:
    """The job's loss on one microbatch; kind: of its batch, without sizes and numbers; None where that is unknown."""

    run: Callable[[], Any]
    kind: Hashable = None


def find_calls(model: StagedModel, codes: Sequence[Code]) -> FoundCalls:
    """The block calls of the forwards of `codes`, also those that all of them leave out by chance."""
    check_can_be_staged(model)
    discovery = partial(_CallDiscovery, model)
    with same_modules(model.model):
        runs = {0: _discover(model, discovery, codes[0].run)}
    others = _other_paths(model, codes, reads=runs[0].random.reads)
    runs |= {number: _discover(model, discovery, codes[number].run) for number in others}
    paths = {number: tuple(record.call for record in run.call_costs) for number, run in runs.items()}
    places = {block.name: number for number, block in enumerate(model.blocks)}
    records: list[CallRecord] = []
    between: dict[str, set[CallId]] = {}
    by_chance, key = any(run.by_chance for run in runs.values()), 0
    for run in runs.values():
        run.add_between(between)
        records = merged_calls(records, run.call_costs, places)
    while by_chance and (missing := {*places} - {record.call[0] for record in records}):
        if (key := key + 1) < MOST_FORWARDS:
            run = _discover(model, discovery, codes[0].run, key=key)
            run.add_between(between)
            found = run.call_costs
        else:  # no draw has called them, which may be called yet
            like = records[len(records) // 2] if records else CallRecord(BEGIN_CALL)
            left = [block for block in model.blocks if block.name in missing]
            found = [replace(like, call=(one.name, 0), tensors=model.names_in(one.module)) for one in left]
        records = merged_calls(records, found, places)
    if not records:
        raise PlanError(
            "cutting the model into stages",
            "it has no repeated blocks that its forward calls",
            f"put its layers into a ModuleList or Sequential, or {OTHER_PLAN}",
        )
    return FoundCalls([record.cost(model) for record in records], paths, by_chance, between)


def _other_paths(model: StagedModel, codes: Sequence[Code], *, reads: bool) -> list[int]:
    """The numbers of those that take other paths than the ones before; reads: whether numbers of a batch may decide."""
    first = {code.kind: number for number, code in reversed([*enumerate(codes)])}
    seen = [n for n, code in enumerate(codes) if reads or code.kind is None or first[code.kind] == n]
    if len(seen) == 1:
        return []
    nothing = {True: ((),), False: ((),)}
    through = frozenset((True, False) if has_hooks(block.module for block in model.blocks) else ())
    model.set_stage_plan(StagePlan((0,), {True: (), False: ()}, {}, {}, nothing, runs_through=through))
    by_path = {path_of(model, codes[number].run, key=0): number for number in reversed(seen)}
    return sorted(by_path.values())[1:]


def find_stage_plan(
    model: StagedModel,
    found: FoundCalls,
    counts: Sequence[int],
    codes: Sequence[Code],
    evaluations: Sequence[Code],
    *,
    owners: Mapping[str, tuple[int, ...]],
    phase: str = "",
) -> StagePlan:
    """The stage plan with `counts` block calls per stage; codes, evaluations: the loss in training, evaluation.

    owners, phase: as in `StagePlan`. Raises `PlanError` where a stage cannot run by itself.
    """
    stage_of = stage_of_calls([call_cost.call for call_cost in found.costs], counts)
    check_rules_of_buffers(model.model, owners)
    nothing = tuple(() for _ in counts)
    stage_plan = StagePlan(
        counts=tuple(counts),
        calls={True: found.paths[0], False: ()},
        stage_of=stage_of,
        owners=owners,
        stage_inputs={True: nothing, False: nothing},
        mixed_draws=frozenset({True} if found.by_chance else ()),
        paths_differ=frozenset({True} if found.differ else ()),
        runs_through=frozenset((True, False) if has_hooks(block.module for block in model.blocks) else ()),
        phase=phase,
    )
    stage_plan = _with_paths(model, stage_plan, found, codes, training=True)
    if not evaluations:
        return stage_plan
    found = find_calls(model, evaluations)
    if any(call not in stage_of for calls in found.paths.values() for call in calls):
        raise PlanError(
            RUNNING_STAGE,
            "an evaluation calls blocks that training does not: the model leaves some out by chance (layerdrop)",
            OTHER_PLAN,
        )
    return _with_paths(model, stage_plan, found, evaluations, training=False)


def _with_paths(
    model: StagedModel, stage_plan: StagePlan, found: FoundCalls, codes: Sequence[Code], *, training: bool
) -> StagePlan:
    """`stage_plan` with the inputs of each stage; of the first path, where others need others."""
    differ = len({*found.paths.values()}) > 1
    first: StagePlan | None = None
    for number, calls in reversed([*found.paths.items()]):
        stage_plan = replace(stage_plan, calls={**stage_plan.calls, training: calls})
        stage_plan = _with_stage_inputs(model, stage_plan, codes[number].run, training=training)
        differ = differ or (first is not None and first.stage_inputs != stage_plan.stage_inputs)
        first = stage_plan
    return replace(stage_plan, paths_differ=stage_plan.paths_differ | ({training} if differ else set()))


def _with_stage_inputs(
    model: StagedModel, stage_plan: StagePlan, compute: Callable[[], Any], *, training: bool, key: int | None = 0
) -> StagePlan:
    """`stage_plan` with the inputs of each stage; key: as of `_run`."""
    for stage in reversed(range(stage_plan.stages)):
        model.set_stage_plan(stage_plan)
        discovery = partial(InputDiscovery, model, stage, training=training)
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
        if len(run.inputs) > FORMS:
            many = f"stage {stage} has to receive {len(run.inputs)} tensors"
            raise PlanError(RUNNING_STAGE, many, f"use fewer, or {OTHER_PLAN}")
        vary = stage_plan.shapes_vary or run.shaped > 0
        stage_plan = replace(stage_plan, stage_inputs=found, mixed_draws=mixed, shapes_vary=vary)
        stage_plan = replace(stage_plan, written=frozenset(model.needs.written), early=frozenset(model.needs.early))
        if training in stage_plan.paths_differ and stage_plan.early:
            raise PlanError(RUNNING_STAGE, "numbers of another stage may decide which blocks are called", OTHER_PLAN)
    return stage_plan


Discovery = TypeVar("Discovery", bound="_CallDiscovery | InputDiscovery")


def _discover(
    model: StagedModel, discovery: Callable[..., Discovery], compute: Callable[[], Any], *, key: int | None = 0
) -> Discovery:
    """A run of `compute` on fake tensors or, where that fails, on examples; `model.needs` grows until it suffices."""
    first: EvenlyError | None = None
    model.needs.all_false = False
    for examples, all_false in ((False, False), (True, False), (False, True), (True, True)):
        if all_false and not model.needs.early:
            break
        model.needs.all_false = all_false
        for _ in range(MOST_NEEDS):
            try:
                _run(model, run := discovery(examples=examples), compute, key=key)
                return run
            except NeedFound as need:
                if not model.needs.add(need):
                    raise need.problem from need
            except EvenlyError as problem:
                first = first or problem
                break
    raise first or AssertionError


Path = tuple[tuple[CallId, ...], Hashable]  # the calls of a forward, and what else its code does between them


def path_of(model: StagedModel, compute: Callable[[], Any], *, training: bool = True, key: int | None = None) -> Path:
    """The path that `compute` takes through the model's code; no block is run. key: as of `_run`."""
    run = _CallOrder(model, training=training)
    try:
        _run(model, run, compute, key=key)
    except EvenlyError:
        pass  # behind the last block it may need numbers
    return tuple(run.found), tuple(run.uses)


def stage_plan_for(model: StagedModel, compute: Callable[[], Any], *, training: bool) -> StagePlan:
    before = model.stage_plan
    calls, uses = path_of(model, compute, training=training)
    key = before.phase, training, calls, uses
    if key in model.by_path:
        return model.by_path[key]
    if unknown := [call[0] for call in calls if call not in before.stage_of]:
        raise PathError(RUNNING_STAGE, f"it calls {unknown[0]}, and the first microbatches did not", OTHER_PLAN)
    try:
        plan = replace(before, calls={**before.calls, training: calls})
        plan = model.by_path[key] = _with_stage_inputs(model, plan, compute, training=training, key=None)
        return plan
    finally:
        model.set_stage_plan(before)


def _run(
    model: StagedModel,
    run: _CallDiscovery | InputDiscovery | _CallOrder,
    compute: Callable[[], Any],
    *,
    key: int | None,
) -> None:
    """Runs `compute` with random numbers from the stream `key`; None if it draws them itself, calls of blocks too."""
    calls = None if key is None else BlockCalls(model.blocks, model.device, model.call)
    model.running = run
    try:
        drawing = nullcontext() if calls is None or key is None else calls.drawing(key)
        with (
            attributes_restored(model.model),  # what only a first call does is not done yet
            buffers_kept(model.model),
            running_fake(),
            drawing,
            torch.enable_grad(),
            ResultRecorder(run),
            run.random,
            run.stack,
        ):
            run.end(compute())
    except StageEnded:
        pass
    except (EvenlyError, NeedFound):
        raise
    except Exception as problem:
        raise _refusal(problem) from problem
    finally:
        model.running = None
        if calls is not None:
            calls.close()


def _refusal(problem: Exception) -> PlanError:
    if operation := operation_of(problem):
        return PlanError(RUNNING_STAGE, f"{operation} needs numbers that another stage has", OTHER_PLAN)
    found = f"the model's code does not run on fake tensors: {describe(problem)}"
    return PlanError(RUNNING_STAGE, found, OTHER_PLAN)


class _CallDiscovery:
    """A run in which every parameter is remote, or an example; records each block call."""

    def __init__(self, model: StagedModel, *, examples: bool) -> None:
        self._model, self._examples = model, examples
        self.stack, self.random = ExitStack(), Draws()
        self._sites, self._made = ResultSites(inside=False), Made()
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
        self.current.saved[memory_key(tensor)] = memory_bytes(tensor)

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
        if stage_tensor.name not in self._remote:
            new = example_weight(stage_tensor.fake) if self._examples else remote(stage_tensor.fake, self)
            self._remote[stage_tensor.name] = new
            self._names[id(new)] = stage_tensor.name
        return self._remote[stage_tensor.name]

    def add_between(self, between: dict[str, set[CallId]]) -> None:
        """Adds what this run has used outside of blocks to `between`, as in `FoundCalls`."""
        modules = {block.name: block.module for block in self._model.blocks}
        begin = {*self._before_first.tensors}
        if self.call_costs:
            begin -= self._model.names_in(modules[self.call_costs[0].call[0]])
        for name in begin:
            between.setdefault(name, set()).add(BEGIN_CALL)
        for record in self.call_costs:
            after = END_CALL if record is self.call_costs[-1] else record.call
            for name in record.tensors - self._model.names_in(modules[record.call[0]]) - begin:
                between.setdefault(name, set()).add(after)

    def begin(self) -> None:
        """Results count from here on."""
        self._sites.begin()

    def note_results(self, function: str, results: Any, *, new: bool) -> Any:
        for site, tensor in self._sites.add(function, results):
            if new and site in self._model.needs.written:
                return remote(fake_like(tensor, self._model.device), self)
            if new:
                self._made.note(site, tensor)
        return results

    def refuses_write(self, target: torch.Tensor, function: str) -> Exception:
        return self._made.need(target, write_refusal(function))

    def note_write(self, target: RemoteTensor) -> None:
        """Nothing: no tensor is filled."""

    def want_numbers(self, tensors: list[RemoteTensor]) -> None:
        """Nothing: examples have numbers."""

    def call(self, call: BlockCall) -> Any:
        """Begins to record a call, and runs the block."""
        now = (call.block.name, call.number)
        self._sites.move(now, "inside")
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
        self._sites.move(now, "between")
        return result

    def draws(self) -> bool:
        """Notes that a function draws for remote tensors."""
        return self.random.note()

    def end(self, result: Any) -> None:
        """Called with the loss when the model's code has ended."""
        self._past_torch = drawn_past_torch()

    @property
    def by_chance(self) -> bool:
        return self.random.by_chance or self._past_torch


class _CallOrder(StageRun):
    """A run that skips every block, and finds out which are called, and what the code between them uses."""

    def __init__(self, model: StagedModel, *, training: bool) -> None:
        super().__init__(model, stage=0, inbox=[], training=training)
        self.stack, self.random, self.entered, self._ends_early = ExitStack(), Draws(), False, False
        self.found: list[CallId] = []
        self.uses: list[tuple[int | str, ...]] = []  # of each function of remote tensors: calls before, parameters

    def draws(self) -> bool:
        """Notes that a function draws for remote tensors."""
        return self.random.note()

    def note_inputs(self, tensors: list[torch.Tensor]) -> None:
        """Notes a function between blocks."""
        if self.random.between:
            places = [self._remote_places[id(one)] for one in tensors if id(one) in self._remote_places]
            self.uses.append((len(self.found), *(stage_tensor.name for _, _, stage_tensor in places)))

    def call(self, call: BlockCall) -> Any:
        """Skips the block."""
        now = (call.block.name, call.number)
        self.found.append(now)
        self.random.at_block(between=False)
        result = self._skip(call, now)
        self.random.at_block(between=True)
        return result
