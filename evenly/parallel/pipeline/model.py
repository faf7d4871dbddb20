"""A model of which each rank holds and runs some stages, every one by the model's own code.

A *run* is one forward of one stage. It executes the job's loss from its beginning. The blocks of earlier stages are
skipped, and return remote tensors. At its own first block the stage is *entered*: received tensors fill the remote
ones, and its parameters have data from there on. At the first block of the next stage the run ends, with the inputs of
that stage. The last stage runs to the end and has the loss.

A rank holds the parameters of its own stages; the others are hidden, and take no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, get_args

import torch
from torch import nn

from evenly.data.nest import has_tensor, map_tensors, tensors_by_path
from evenly.errors import PathError
from evenly.model.blocks import find_blocks
from evenly.parallel.core.argument_containers import carried_over
from evenly.parallel.core.calls import BlockCall, ForwardEnded
from evenly.parallel.core.parameter_views import ViewedParameters, ask_again, dicts_in, leave_unasked, viewed_tensors
from evenly.parallel.core.statistics import changing_buffers
from evenly.parallel.pipeline.messages import Payload
from evenly.parallel.pipeline.needs import Needs
from evenly.parallel.pipeline.remote_tensor import (
    OTHER_PLAN,
    RemoteTensor,
    check_received,
    fake_like,
    is_remote,
    materialized,
    remote,
    write_refusal,
)
from evenly.parallel.pipeline.result_forms import ResultForms, form_of
from evenly.parallel.pipeline.result_sites import ResultRecorder, ResultSites
from evenly.parallel.pipeline.skipped import SkippedBlocks
from evenly.parallel.pipeline.stages import CallId, StagePlan, TensorSite
from evenly.torch_private import TensorDict, operation_of, tensor_dict, without_function_mode


class ModelRun(Protocol):
    """A run of the model's code under way."""

    def view_of(self, module: nn.Module, name: str, stage_tensor: StageTensor) -> torch.Tensor | None:
        """What the code sees as attribute `name` of `module`; None for the tensor itself."""

    def begin(self) -> None: ...

    def call(self, call: BlockCall) -> Any:
        """Runs or skips a call of a block; returns its result."""


class StageEnd(ForwardEnded):
    """Raised through the model's code at the first block of the next stage, to end the run of a stage."""

    def __init__(self, run: StageRun, payload: Payload) -> None:
        super().__init__("the stage ends here")
        self.run, self.payload = run, payload


@dataclass(eq=False)
class StageTensor:
    """A parameter, or a buffer that belongs to a stage; tied ones are one, under their first name."""

    name: str
    fake: torch.Tensor


class StageRun:
    """One forward of `stage`, which received `inbox`.

    forms: of what the blocks of the stages before return, as far as these have said.
    found_forms: takes the forms of what blocks return, up to the next stage; None where nobody asks.
    """

    discovers = False  # finds out what the stage has to receive

    def __init__(
        self,
        model: StagedModel,
        stage: int,
        inbox: Payload,
        *,
        training: bool,
        stage_plan: StagePlan | None = None,
        forms: ResultForms | None = None,
        found_forms: ResultForms | None = None,
    ) -> None:
        stage_plan = stage_plan or model.stage_plan
        self._model, self.stage = model, stage
        self._forms, self._found_forms = forms or [], found_forms
        self.entered = stage == 0
        self._calls = stage_plan.calls[training]
        self._stage_inputs = stage_plan.stage_inputs[training]
        self._ends_early = not self._calls or stage_plan.stage_of[self._calls[-1]] < stage_plan.stages - 1
        self._sent_sites = {
            site for inputs in self._stage_inputs[stage + 1 :] for site in inputs if site.call is not None
        }
        self._inbox = dict(zip(self._stage_inputs[stage], inbox, strict=True)) if stage else {}
        self._notes_calls = bool(self._sent_sites) or any(site.call is not None for site in self._inbox)
        self.records_results = stage_plan.records_results(training=training)
        self._draws = training in stage_plan.mixed_draws
        self._runs_through = training in stage_plan.runs_through
        looks = self._notes_calls or self.records_results or self._runs_through or self._draws
        self._follows = looks or self.discovers  # where the code is
        self._unasked: Sequence[ViewedParameters] = ()
        self.shaped = 0  # times that a shape followed from numbers
        self._count = 0  # calls so far
        self._sites = ResultSites(inside=self._runs_through)
        self._written, self._early = stage_plan.written, stage_plan.early
        self._tensors: dict[TensorSite, torch.Tensor] = {}  # those that this stage receives or sends
        self._remote: dict[str, RemoteTensor] = {}
        self._remote_places: dict[int, tuple[nn.Module, str, StageTensor]] = {}  # by id of the remote tensor

    def release(self) -> None:
        """Drops all tensors: the run and its remote tensors reference each other."""
        for tensors in (self._inbox, self._tensors, self._remote, self._remote_places, self._sites):
            tensors.clear()
        ask_again(self._unasked)

    # ------------------------------------------------------------------------------- TensorOwner
    @property
    def function_context(self) -> AbstractContextManager[object] | None:
        return None

    def value_of(self, tensor: RemoteTensor) -> torch.Tensor | None:
        """The parameter itself, if this stage owns it and is entered; None for a tensor that was not received."""
        site = self._remote_places.get(id(tensor))
        return getattr(site[0], site[1]) if site is not None and self._owns(site[2]) else None

    def note_inputs(self, tensors: list[torch.Tensor]) -> None:
        """Nothing to note."""

    def note_shaped(self) -> None:
        """What such a block returns is not that of another microbatch of the same shapes."""
        self.shaped += 1

    def draws(self) -> bool:
        """Blocks begin streams of their own, so that draws matter between them, or in one that is run through."""
        place = self._sites.place
        return place is not None and (self._draws or place[1] == "inside")

    def refuses_write(self, target: torch.Tensor, function: str) -> Exception:
        return write_refusal(function)

    def note_write(self, target: RemoteTensor) -> None:
        """Nothing to note."""

    def want_numbers(self, tensors: list[RemoteTensor]) -> None:
        """Called where the code asks for numbers of remote tensors, before that fails."""

    # ------------------------------------------------------------------------------------------------ parameters
    def view_of(self, module: nn.Module, name: str, stage_tensor: StageTensor) -> torch.Tensor | None:
        if self._owns(stage_tensor):
            return None
        if stage_tensor.name not in self._remote:
            new = self._remote[stage_tensor.name] = remote(stage_tensor.fake, self)
            self._remote_places[id(new)] = module, name, stage_tensor
        return self._remote[stage_tensor.name]

    def _owns(self, stage_tensor: StageTensor) -> bool:
        return self.entered and self.stage in self._model.stage_plan.owners[stage_tensor.name]

    # ----------------------------------------------------------------------------------------------------- calls
    def call(self, call: BlockCall) -> Any:
        """Runs or skips a call of a block; raises `StageEnd` at the first of the next stage."""
        now = (call.block.name, call.number)
        if self._count >= len(self._calls) or self._calls[self._count] != now:
            raise self._unexpected_call(now)
        self._count += 1
        if (stage := self._model.stage_plan.stage_of[now]) < self.stage:
            return self._skip(call, now)
        if not self.entered:
            self._enter(call)
        if stage > self.stage:
            raise self._ended(call)
        return self._run(call, now)

    def _ended(self, call: BlockCall | None) -> Exception:
        """Ends the run: the next stage begins at `call`; None if it has none, at the end of the last."""
        return StageEnd(self, self._payload(call))

    def begin(self) -> None:
        """Called at the start of the model's forward; tensors that its hooks returned do not count."""
        self._sites.begin()
        self._end_early()

    def note_results(self, function: str, results: Any, *, new: bool) -> Any:
        """Called after every torch function that the model's code calls."""
        for site, tensor in self._sites.add(function, results):
            if new and not self.entered and site in self._written:
                results = tensor = remote(fake_like(tensor, self._model.device), self)
            self._note_at(site, tensor)
        return results

    def _skip(self, call: BlockCall, now: CallId) -> Any:
        self._note(now, "in", (call.args, call.kwargs))
        self._sites.move(now, "inside")
        form = self._forms[self._count - 1] if 0 < self._count <= len(self._forms) else None
        result = self._model.skipped.result(call, self, runs_through=self._runs_through, form=form)
        if self._found_forms is not None:
            self._found_forms.append(form or form_of(result, (call.args, call.kwargs)))
        self._call_ended(now, result)
        call.skip()
        self._end_early()
        return result

    def _end_early(self) -> None:
        """Begins, or ends, a stage of which this microbatch calls no block, after the last block that it calls."""
        if self._ends_early and self._count == len(self._calls):
            if not self.entered:
                self._enter(None)
            if self.stage < self._model.stage_plan.stages - 1:
                raise self._ended(None)

    def _enter(self, call: BlockCall | None) -> None:
        """Fills remote tensors with the received ones; call: the first of the stage, if it has any."""
        self.entered = True
        for path, tensor in () if call is None else tensors_by_path((call.args, call.kwargs)):
            if is_remote(tensor):
                self._tensors[TensorSite(None, "in", path)] = tensor
        for site in self._inbox:
            self._fill(site, self._tensors.get(site))

    def _fill(self, site: TensorSite, tensor: torch.Tensor | None) -> None:
        if (value := self._inbox.get(site)) is not None and isinstance(tensor, RemoteTensor):
            check_received(site, tensor, value)
            tensor.fill(value)

    def _run(self, call: BlockCall, now: CallId) -> Any:
        args, kwargs = call.args, call.kwargs
        fills = bool(self.stage or self._remote) and has_tensor(RemoteTensor, (args, kwargs))
        if fills:
            args, kwargs = map_tensors(materialized, (args, kwargs))
            self._check((args, kwargs), call)
        if self._follows:
            self._note(now, "in", (args, kwargs))
            self._sites.move(now, "inside")
        if fills:
            with carried_over((call.args, call.kwargs), (args, kwargs)):
                result = self._run_block(call, args, kwargs)
        else:
            result = self._run_block(call, args, kwargs)
        if self._found_forms is not None:
            self._found_forms.append(form_of(result, (args, kwargs)))
        if self._follows:
            self._call_ended(now, result)
        if self._ends_early:
            self._end_early()
        return result

    def _run_block(self, call: BlockCall, args: Any, kwargs: Any) -> Any:
        if not self._unasked:
            self._unasked = self._model.own_views(self.stage)
            leave_unasked(self._unasked)
        if self._runs_through or not self.records_results:
            return call.run(*args, **kwargs)
        with without_function_mode(ResultRecorder):  # nothing inside counts; compiled code is not to see a mode
            return call.run(*args, **kwargs)

    def _call_ended(self, now: CallId, result: Any) -> None:
        self._note(now, "out", result)
        for site, tensor in self._sites.leave(now):
            self._note_at(site, tensor)
        self._sites.move(now, "between")

    def _payload(self, call: BlockCall | None) -> Payload:
        arguments = () if call is None else tensors_by_path((call.args, call.kwargs))
        here = {TensorSite(None, "in", path): tensor for path, tensor in arguments}
        found = [here.get(site, self._tensors.get(site)) for site in self._stage_inputs[self.stage + 1]]
        sent = [None if tensor is None else materialized(tensor) for tensor in found]
        self._check(sent, call)
        return sent

    def _note(self, call: CallId, side: str, nest: Any) -> None:
        if self._notes_calls:
            for path, tensor in tensors_by_path(nest):
                self._note_at(TensorSite(call, side, path), tensor)

    def _note_at(self, site: TensorSite, tensor: torch.Tensor) -> None:
        if site in self._sent_sites or site in self._inbox:
            self._tensors[site] = tensor
        if site in self._early and not self.entered and is_remote(tensor):
            self._fill(site, tensor)

    def end(self, result: Any) -> None:
        """Called with the loss when the model's code has ended."""
        self._check(result, None)

    def _check(self, nest: Any, call: BlockCall | None) -> None:
        for path, tensor in tensors_by_path(nest):
            if is_remote(tensor):
                where = f"block {call.block.name}" if call is not None else "the loss"
                raise self.not_sent_error(f"{where} needs a tensor of an earlier stage (at {path})")

    def not_sent_error(self, found: str) -> PathError:
        """The error for a tensor that this microbatch needs and no stage has sent."""
        return PathError(
            f"running stage {self.stage} of the model",
            f"{found} that was not sent: the first microbatches did without it",
            OTHER_PLAN,
        )

    def _unexpected_call(self, now: CallId) -> PathError:
        expected = self._calls[self._count][0] if self._count < len(self._calls) else "no block"
        return PathError(
            f"running stage {self.stage} of the model",
            f"it calls {now[0]} where the first microbatches called {expected}",
            f"have them call what later ones do (put such samples into the first batch), or {OTHER_PLAN}",
        )


class StagedModel:
    """A model whose code, while a stage runs, sees that stage's parameters only.

    `keep_stages` reduces it to the stages of this rank. device: of the model. `blocks`: all blocks of the model.
    """

    def __init__(self, model: nn.Module, device: str) -> None:
        self.model, self.device = model, device
        self.running: ModelRun | None = None
        self._stage_plan: StagePlan | None = None
        self.skipped = SkippedBlocks(self)
        self.needs = Needs()
        self.by_path: dict[tuple[Hashable, ...], StagePlan] = {}  # of what was met in training
        self._places: list[tuple[ViewedParameters, str, StageTensor]] = []
        self._names: dict[int, list[str]] = {}  # of the tensors in a dict of a module, by its id
        self._own_views: dict[int, list[ViewedParameters]] = {}  # as `own_views`
        self.blocks = find_blocks(model)
        # Runs after the hooks that gather parameters, which are always prepended.
        model.register_forward_pre_hook(self._begin)
        by_id = _stage_tensors(model, device)
        self.stage_tensors = {one.name: one for one in by_id.values()}
        for module in model.modules():
            for kind in get_args(TensorDict):
                self._add_view(module, kind, by_id)

    @property
    def stage_plan(self) -> StagePlan:
        """The stages; set by `stage_as`."""
        assert self._stage_plan is not None  # set before any stage runs
        return self._stage_plan

    def set_stage_plan(self, stage_plan: StagePlan) -> None:
        """Sets the stages."""
        if stage_plan is not self._stage_plan:
            self._own_views.clear()
        self._stage_plan = stage_plan

    def move(self, device: str) -> None:
        """Makes remote tensors report `device` from now on."""
        self.device = device
        for stage_tensor in self.stage_tensors.values():
            stage_tensor.fake = fake_like(stage_tensor.fake, device)

    def local_tensors(self) -> Iterable[tuple[torch.Tensor, StageTensor]]:
        return ((views[name], stage_tensor) for views, name, stage_tensor in self._places)

    def local_types(self) -> dict[str, torch.dtype]:
        return {one.name: tensor.dtype for tensor, one in self.local_tensors()}

    def own_views(self, stage: int) -> list[ViewedParameters]:
        """The dicts whose tensors all belong to `stage`, in which code finds them as they are once that is entered."""
        if stage not in self._own_views:
            owners = self.stage_plan.owners
            others = {id(views) for views, _, one in self._places if stage not in owners[one.name]}
            self._own_views[stage] = [*{id(v): v for v, _, _ in self._places if id(v) not in others}.values()]
        return self._own_views[stage]

    def names_in(self, module: nn.Module) -> set[str]:
        return {name for inside in dicts_in(module) for name in self._names.get(inside, ())}

    def keep_stages(self, stage_plan: StagePlan, own: Sequence[int]) -> dict[str, torch.Tensor]:
        """Frees all tensors but those of the stages `own`; returns placeholders for the freed ones, by name.

        All ranks visit all tensors in the same order: reading one may gather it from their shards.
        """
        self.set_stage_plan(stage_plan)
        placeholders: dict[str, torch.Tensor] = {}
        tensors = {one.name: views[name] for views, name, one in reversed(self._places)}
        for name in self.stage_tensors:
            tensor = tensors.pop(name)
            whole = tensor.detach().unsqueeze(0)
            if set(stage_plan.owners[name]) & set(own):
                tensor.data = whole.squeeze(0).clone()
            del tensor, whole
        for views, name, one in self._places:
            if not set(stage_plan.owners[one.name]) & set(own):
                views.hide(name, placeholders.setdefault(one.name, _placeholder(views[name])))
        return placeholders

    def _add_view(self, module: nn.Module, kind: TensorDict, by_id: Mapping[int, StageTensor]) -> None:
        mine = {name: by_id[id(tensor)] for name, tensor in tensor_dict(module, kind).items() if id(tensor) in by_id}
        if not mine:
            return
        views = viewed_tensors(module, kind, strict=True)
        self._places += [(views, name, one) for name, one in mine.items()]
        self._names[id(views)] = [one.name for one in mine.values()]

        def view(name: str, _: torch.Tensor | None) -> torch.Tensor | None:
            if self.running is None or name not in mine:
                return None
            return self.running.view_of(module, name, mine[name])

        views.add_view(view, first=True)

    def forward(
        self,
        stage: int,
        inbox: Payload,
        compute: Callable[[], Any],
        *,
        training: bool,
        stage_plan: StagePlan | None = None,
        forms: ResultForms | None = None,
        found_forms: ResultForms | None = None,
    ) -> tuple[Payload | None, Any]:
        """Runs `stage`; returns (inputs of the next stage, None), or (None, what `compute` returned) of the last.

        stage_plan: for this microbatch; the model's by default. forms, found_forms: as in `StageRun`.
        """
        stage_plan = stage_plan or self.stage_plan
        run = StageRun(
            self, stage, inbox, training=training, stage_plan=stage_plan, forms=forms, found_forms=found_forms
        )
        try:
            return self._forward(run, compute)
        finally:
            run.release()

    def _forward(self, run: StageRun, compute: Callable[[], Any]) -> tuple[Payload | None, Any]:
        self.running = run
        try:
            with ResultRecorder(run) if run.records_results else nullcontext():
                result = compute()
        except StageEnd as ended:
            if ended.run is not run:
                raise
            return ended.payload, None
        except Exception as problem:
            if not (operation := operation_of(problem)):
                raise
            raise run.not_sent_error(f"{operation} needs numbers of an earlier stage") from problem
        finally:
            self.running = None
        if run.stage < self.stage_plan.stages - 1:
            raise PathError(
                f"running stage {run.stage} of the model",
                "the model's code came to its end before the next stage began",
                f"let it run all blocks, and not catch every exception, or {OTHER_PLAN}",
            )
        run.end(result)
        return None, result

    def parameters(self, stage: int) -> list[nn.Parameter]:
        owners = self.stage_plan.owners
        local = [views.local(name) for views, name, one in self._places if stage in owners[one.name]]
        return [*{id(one): one for one in local if isinstance(one, nn.Parameter)}.values()]

    def _begin(self, *_: Any) -> None:
        if self.running is not None:
            self.running.begin()

    def call(self, call: BlockCall) -> Any:
        """Runs or skips a call of a block in the current run."""
        assert self.running is not None  # blocks are called only while a stage runs
        return self.running.call(call)


def _stage_tensors(model: nn.Module, device: str) -> dict[int, StageTensor]:
    """By id, the parameters of `model` and the buffers that belong to a stage: of blocks, and what changes by a rule.

    Other buffers are few and small, such as masks and position tables; every stage keeps them.
    """
    inside = {id(buffer) for block in find_blocks(model) for buffer in block.module.buffers()}
    inside |= {id(buffer) for buffer in changing_buffers(model)}
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if id(buffer) in inside]
    return {
        id(tensor): StageTensor(name, fake_like(tensor, device))
        for name, tensor in (*model.named_parameters(), *buffers)
    }


def _placeholder(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor in place of a tensor of other ranks, so that an optimizer can sort it into a group."""
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
