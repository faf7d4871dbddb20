"""What is found out of a model, without computing anything of it, before it is put into stages.

First, in one run of the job's loss in which all parameters are remote: which blocks are called, in which order; what is
computed from each call to the next, and with which parameters. Then, with stages chosen and run by themselves on
fake tensors, from the last to the first: what each has to receive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import nn

from evenly.data.nest import map_tensors, tensors_by_path, tensors_in
from evenly.errors import EvenlyError, PlanError, describe
from evenly.model.costs import CostCounter
from evenly.model.fake import running_fake
from evenly.parallel.core.calls import BlockCall, BlockCalls
from evenly.parallel.pipeline.model import Between, Known, StagedModel, StageRun
from evenly.parallel.pipeline.remote_tensor import ASKED, OTHER_AXIS, RemoteTensor, is_remote, present, remote
from evenly.parallel.pipeline.stages import CallCost, CallOf, StagePlan, TensorSite, owners_of, stage_of_calls
from evenly.torch_private import TensorDict, has_forward_hooks, memory_key, operation_of


def find_call_costs(model: StagedModel, compute: Callable[[], Any]) -> list[CallCost]:
    """The call_costs of one forward; `compute` runs the job's loss. Raises `PlanError` where it cannot run so."""
    _refuse_what_runs_past_stages(model)
    found = _DiscoveryRun(model)
    _run(model, found, compute)
    if not found.call_costs:
        raise PlanError(
            "cutting the model into stages",
            "it has no repeated blocks that its forward calls",
            f"put its layers into a ModuleList or Sequential, or {OTHER_AXIS}",
        )
    return [draft.cost(model) for draft in found.call_costs]


def _refuse_what_runs_past_stages(model: StagedModel) -> None:
    """Raises `PlanError` for what would compute with other stages' parameters, or not run where they are passed by."""
    held = {memory_key(tensor): known.name for tensor, known in model.real()}
    for name, module in model.model.named_modules():
        for attribute, value in vars(module).items():
            found = () if attribute in get_args(TensorDict) else tensors_in(value)
            if kept := next((held[memory_key(tensor)] for tensor in found if memory_key(tensor) in held), None):
                raise PlanError(
                    ASKED,
                    f"{name or 'the model'} ({type(module).__name__}) keeps {kept} in {attribute} too, "
                    "where it would be found on stages that do not hold it",
                    f"find it by its own name where it is used (LSTM and GRU: build them of cells), or {OTHER_AXIS}",
                )
    for block in model.blocks:
        if has_forward_hooks(block.module):
            raise PlanError(
                ASKED,
                f"block {block.name} has a forward hook, which does not run on stages that pass the block by",
                f"do in the block's forward what the hook does, or {OTHER_AXIS}",
            )


def find_stage_plan(
    model: StagedModel,
    call_costs: Sequence[CallCost],
    counts: Sequence[int],
    compute: Callable[[], Any],
    evaluate: Callable[[], Any] | None,
) -> StagePlan:
    """The stage_plan of `counts` call_costs per stage; compute, evaluate: run the job's loss in training and
    evaluation.

    Raises `PlanError` where a stage cannot run by itself.
    """
    calls = tuple(call_cost.call for call_cost in call_costs)
    stage_of = stage_of_calls(calls, counts)
    owners = owners_of([*model.known], call_costs, stage_of)
    nothing = tuple(() for _ in counts)
    stage_plan = StagePlan(tuple(counts), {True: calls, False: ()}, stage_of, owners, {True: nothing, False: nothing})
    stage_plan = _with_needs(model, stage_plan, compute, training=True)
    if evaluate is None:
        return stage_plan
    calls = tuple(call_cost.call for call_cost in find_call_costs(model, evaluate))
    if any(call not in stage_of for call in calls):
        raise PlanError(
            ASKED,
            "an evaluation calls blocks that training does not: the model leaves some out by chance (layerdrop)",
            OTHER_AXIS,
        )
    stage_plan = replace(stage_plan, calls={**stage_plan.calls, False: calls})
    return _with_needs(model, stage_plan, evaluate, training=False)


def _with_needs(model: StagedModel, stage_plan: StagePlan, compute: Callable[[], Any], *, training: bool) -> StagePlan:
    """Completes `stage_plan` by what each stage receives."""
    for stage in reversed(range(stage_plan.stages)):
        model.stage_as(stage_plan)
        run = _Discovery(model, stage, training=training)
        _run(model, run, compute)
        needs = [*stage_plan.stage_inputs[training]]
        needs[stage] = tuple(run.needs)
        stage_plan = replace(stage_plan, stage_inputs={**stage_plan.stage_inputs, training: tuple(needs)})
    return stage_plan


def _run(model: StagedModel, run: _DiscoveryRun | _Discovery, compute: Callable[[], Any]) -> None:
    calls = BlockCalls(model.blocks, model.device, model.call)
    model.running = run
    try:
        between = Between(run) if isinstance(run, StageRun) else nullcontext()
        with running_fake(), calls.drawing(0), torch.enable_grad(), between:
            run.end(compute())
    except _LeftOver:
        pass
    except EvenlyError:
        raise
    except Exception as problem:
        raise _refusal(problem) from problem
    finally:
        model.running = None
        calls.close()


def _refusal(problem: Exception) -> PlanError:
    operation = operation_of(problem)
    if not operation:
        return PlanError(ASKED, f"the model's code does not run on fake tensors: {describe(problem)}", OTHER_AXIS)
    return PlanError(ASKED, f"{operation} needs numbers that another stage has", OTHER_AXIS)


@dataclass(eq=False)
class _Draft:
    """The cost of a call, while it is found; `kept` are the tensors whose memory stays until the backward."""

    call: CallOf
    tensors: set[str] = field(default_factory=set[str])
    kept: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    counter: CostCounter = field(default_factory=CostCounter)

    def cost(self, model: StagedModel) -> CallCost:
        forms = [model.known[name].form for name in self.tensors]
        return CallCost(
            call=self.call,
            tensors=frozenset(self.tensors),
            flops=self.counter.flops,
            moved_bytes=self.counter.moved_bytes,
            weight_bytes=sum(form.nbytes for form in forms),
            kept_bytes=sum(tensor.untyped_storage().nbytes() for tensor in self.kept.values()),
        )


class _DiscoveryRun:
    """A run in which every parameter is remote."""

    def __init__(self, model: StagedModel) -> None:
        self._model = model
        self._shown: dict[str, RemoteTensor] = {}
        self._names = {id(tensor): known.name for tensor, known in model.real()}
        self._weights = {memory_key(known.form) for known in model.known.values()}
        self._before = _Draft(("", 0))  # the first call
        self.call_costs: list[_Draft] = []

    @property
    def watching(self) -> AbstractContextManager[object]:
        """Counts, and notes what is kept for the backward."""
        return _Watching(self._now, self._weights)

    @property
    def _now(self) -> _Draft:
        return self.call_costs[-1] if self.call_costs else self._before

    def value_of(self, tensor: RemoteTensor) -> None:
        """Nothing has numbers."""

    def note_inputs(self, tensors: list[torch.Tensor]) -> None:
        """Notes the parameters among these."""
        self._now.tensors |= {name for tensor in tensors if (name := self._names.get(id(tensor))) is not None}

    def shown(self, module: nn.Module, name: str, known: Known) -> RemoteTensor:
        """One remote tensor for each that is known."""
        if known.name not in self._shown:
            made = self._shown[known.name] = remote(known.form, self)
            self._names[id(made)] = known.name
        return self._shown[known.name]

    def begin(self) -> None:
        """Nothing to note."""

    def call(self, call: BlockCall) -> Any:
        """Begins the cost of a call, and runs the block."""
        self.call_costs.append(_Draft((call.block.name, call.number)))
        if len(self.call_costs) == 1:
            first, before = self.call_costs[0], self._before
            first.tensors, first.kept, first.counter = before.tensors, before.kept, before.counter
        return call.run(*call.args, **call.kwargs)

    def end(self, result: Any) -> None:
        """The forward is over."""


class _Watching:
    """Around one function: what it costs, and what it keeps, goes to `draft`."""

    def __init__(self, draft: _Draft, weights: set[int]) -> None:
        self._draft, self._weights = draft, weights
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> None:
        self._hooks.__enter__()
        self._draft.counter.__enter__()

    def __exit__(self, *problem: Any) -> None:
        self._draft.counter.__exit__(*problem)
        self._hooks.__exit__(*problem)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = memory_key(tensor)
        if key not in self._weights:
            self._draft.kept[key] = tensor
        return tensor


class _LeftOver(Exception):
    """A stage came to its end."""


class _Discovery(StageRun):
    """A run of one stage in which what it lacks is found, and stood in for by fake tensors."""

    def __init__(self, model: StagedModel, stage: int, *, training: bool) -> None:
        super().__init__(model, stage, [None] * len(model.stage_plan.stage_inputs[training][stage]), training=training)
        self.needs: list[TensorSite] = []
        self._placed: dict[int, tuple[RemoteTensor, TensorSite]] = {}

    def value_of(self, tensor: RemoteTensor) -> torch.Tensor | None:
        """What is asked for once the stage is entered has to be received, if it is known where it is met."""
        if not self.entered:
            return None
        if (found := super().value_of(tensor)) is not None:
            return found
        place = self._placed.get(id(tensor))
        if place is None:
            return None
        self.needs.append(place[1])
        return tensor.form.clone()  # no leaf: the code may overwrite it

    def shown(self, module: nn.Module, name: str, known: Known) -> torch.Tensor | None:
        """The stage's own parameters, as fake tensors."""
        found = super().shown(module, name, known)
        return known.form if found is None else found

    def _note(self, call: CallOf, side: str, nest: Any) -> None:
        for path, tensor in tensors_by_path(nest):
            self._note_at(TensorSite(call, side, path), tensor)

    def _note_at(self, place: TensorSite, tensor: torch.Tensor) -> None:
        super()._note_at(place, tensor)
        if not self.entered and isinstance(tensor, RemoteTensor):
            self._placed.setdefault(id(tensor), (tensor, place))

    def _enter(self, call: BlockCall) -> None:
        for path, tensor in tensors_by_path((call.args, call.kwargs)):
            if isinstance(tensor, RemoteTensor):
                self._placed[id(tensor)] = (tensor, TensorSite(None, "in", path))
        super()._enter(call)
        map_tensors(present, (call.args, call.kwargs))  # all of them are asked for

    def call(self, call: BlockCall) -> Any:
        """As it will be, without what is sent."""
        stage = self._model.stage_plan.stage_of[call.block.name, call.number]
        if stage > self.stage:
            if not self.entered:
                self._enter(call)
            self._payload(call)
            raise _LeftOver
        return super().call(call)

    def _check(self, nest: Any, call: BlockCall | None) -> None:
        for path, tensor in tensors_by_path(nest):
            if is_remote(tensor):
                where = f"block {call.block.name}" if call is not None else "the loss"
                raise PlanError(
                    ASKED,
                    f"{where} needs (at {path}) what an earlier stage computes inside a block and does not return, "
                    f"of shape {tuple(tensor.shape)}",
                    f"return it from the block, or {OTHER_AXIS}",
                )
