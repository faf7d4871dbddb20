"""A model of which each rank holds and runs some stages, every one by the model's own code.

A *run* is one forward of one stage. It executes all of the job's loss from the begin: the blocks of earlier stages are
passed by, and give remote tensors; at the stage's first block it is *entered*: what it received takes the place of what
is remote, and its parameters have numbers from there on; at the first block of the next stage it is *left*, with what
that stage needs. The last stage runs to the end and has the loss.

Held are the parameters of the rank's stages; the others are hidden, and without memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, get_args

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from evenly.data.nest import map_tensors, tensors_by_path
from evenly.errors import RunError
from evenly.model.blocks import find_blocks
from evenly.model.fake import shared_fake_mode
from evenly.parallel.core.calls import BlockCall, ForwardEnded
from evenly.parallel.core.parameter_views import ViewedParameters, viewed_tensors
from evenly.parallel.core.statistics import keeps_statistics
from evenly.parallel.pipeline.messages import Payload
from evenly.parallel.pipeline.remote_tensor import OTHER_AXIS, RemoteTensor, is_remote, key_of, present, remote
from evenly.parallel.pipeline.stages import BEGIN, CallOf, StagePlan, TensorSite
from evenly.torch_private import TensorDict, operation_of, tensor_dict


class Running(Protocol):
    """A run of the model's code under way."""

    def shown(self, module: nn.Module, name: str, known: Known) -> torch.Tensor | None:
        """What the code sees of `known`, which `module` has under `name`; None for the tensor itself."""
        ...

    def begin(self) -> None: ...

    def call(self, call: BlockCall) -> Any:
        """What a call of a block returns."""
        ...


class StageEnd(ForwardEnded):
    """Ends the run of a stage, through the model's code, at the first block of the next."""

    def __init__(self, run: StageRun, payload: Payload) -> None:
        super().__init__("the stage ends here")
        self.run, self.payload = run, payload


@dataclass(eq=False)
class Known:
    """A parameter, or a buffer that belongs to a stage; of tied ones one, under its first name."""

    name: str
    form: torch.Tensor


class StageRun:
    """One forward of `stage`, of which `inbox` was received."""

    def __init__(self, model: StagedModel, stage: int, inbox: Payload, *, training: bool) -> None:
        stage_plan = model.stage_plan
        self._model, self.stage = model, stage
        self.entered = stage == 0
        self._calls = stage_plan.calls[training]
        self._needs = stage_plan.stage_inputs[training]
        self._wanted = {place for needs in self._needs[stage + 1 :] for place in needs if place.call is not None}
        self._inbox = dict(zip(self._needs[stage], inbox, strict=True)) if stage else {}
        self._count = 0  # calls so far
        self._begun = 0  # how often the model's forward has begun
        self._after: CallOf | None = (BEGIN, 0)  # the last call; None inside of one
        self._made: dict[str, int] = {}  # tensors that the model's code has made since, by function
        self._met: dict[TensorSite, torch.Tensor] = {}  # tensors where a later stage, or this one, may want them
        self._shown: dict[str, RemoteTensor] = {}
        self._places: dict[int, tuple[nn.Module, str, Known]] = {}  # of remote parameters, by id

    def forget(self) -> None:
        """Lets go of what was received and met: the run and the remote tensors that it made hold each other."""
        for held in (self._inbox, self._met, self._shown, self._places):
            held.clear()

    # ------------------------------------------------------------------------------- as a remote tensor's owner
    @property
    def watching(self) -> AbstractContextManager[object] | None:
        return None

    def value_of(self, tensor: RemoteTensor) -> torch.Tensor | None:
        """The parameter itself once the stage that holds it is entered; nothing of what was not received."""
        place = self._places.get(id(tensor))
        if place is None or not self._holds(place[2]):
            return None
        return getattr(place[0], place[1])

    def note_inputs(self, tensors: list[torch.Tensor]) -> None:
        """Nothing to note."""

    # ------------------------------------------------------------------------------------------------ parameters
    def shown(self, module: nn.Module, name: str, known: Known) -> torch.Tensor | None:
        """What the model's code sees of a parameter; None for the parameter itself."""
        if self._holds(known):
            return None
        if known.name not in self._shown:
            made = self._shown[known.name] = remote(known.form, self)
            self._places[id(made)] = module, name, known
        return self._shown[known.name]

    def _holds(self, known: Known) -> bool:
        return self.entered and self.stage in self._model.stage_plan.owners[known.name]

    # ----------------------------------------------------------------------------------------------------- calls
    def call(self, call: BlockCall) -> Any:
        """What a call of a block returns in this run; raises `StageEnd` at the first of the next stage."""
        now = (call.block.name, call.number)
        if self._count >= len(self._calls) or self._calls[self._count] != now:
            raise self._other_call(now)
        self._count += 1
        stage = self._model.stage_plan.stage_of[now]
        if stage < self.stage:
            return self._skip(call, now)
        if not self.entered:
            self._enter(call)
        if stage > self.stage:
            raise StageEnd(self, self._payload(call))
        return self._run(call, now)

    def begin(self) -> None:
        """The model's forward begins: what its hooks have made does not count."""
        self._begun += 1
        self._after = (BEGIN, self._begun)
        self._made.clear()

    def made(self, function: str, results: Any) -> None:
        """The model's code has called a function of torch, which gave `results`."""
        if self._after is None:
            return
        for tensor in results if isinstance(results, list | tuple) else [results]:
            if isinstance(tensor, torch.Tensor):
                number = self._made[function] = self._made.get(function, 0) + 1
                self._note_at(TensorSite(self._after, "between", f"{function} {number}"), tensor)

    def _skip(self, call: BlockCall, now: CallOf) -> Any:
        self._note(now, "in", (call.args, call.kwargs))
        self._after = None
        result = self._model.skipped(self, call)
        self._ended(now, result)
        call.skip()
        return result

    def _enter(self, call: BlockCall) -> None:
        """What was received takes the place of what is remote."""
        self.entered = True
        for path, tensor in tensors_by_path((call.args, call.kwargs)):
            if is_remote(tensor):
                self._met[TensorSite(None, "in", path)] = tensor
        for place, value in self._inbox.items():
            met = self._met.get(place)
            if value is not None and isinstance(met, RemoteTensor):
                _check_form(place, met, value)
                met.fill(value)

    def _run(self, call: BlockCall, now: CallOf) -> Any:
        args, kwargs = map_tensors(present, (call.args, call.kwargs))
        self._check((args, kwargs), call)
        self._note(now, "in", (args, kwargs))
        self._after = None
        result = call.run(*args, **kwargs)
        self._ended(now, result)
        return result

    def _ended(self, now: CallOf, result: Any) -> None:
        self._after = now
        self._made.clear()
        self._note(now, "out", result)

    def _payload(self, call: BlockCall) -> Payload:
        """Returns what the next stage needs."""
        here = {TensorSite(None, "in", path): tensor for path, tensor in tensors_by_path((call.args, call.kwargs))}
        found = [here.get(place, self._met.get(place)) for place in self._needs[self.stage + 1]]
        sent = [None if tensor is None else present(tensor) for tensor in found]
        self._check(sent, call)
        return sent

    def _note(self, call: CallOf, side: str, nest: Any) -> None:
        if self._wanted or any(place.call is not None for place in self._inbox):
            for path, tensor in tensors_by_path(nest):
                self._note_at(TensorSite(call, side, path), tensor)

    def _note_at(self, place: TensorSite, tensor: torch.Tensor) -> None:
        if place in self._wanted or place in self._inbox:
            self._met[place] = tensor

    def end(self, result: Any) -> None:
        """The model's code has come to its end, with the loss."""
        self._check(result, None)

    def _check(self, nest: Any, call: BlockCall | None) -> None:
        for path, tensor in tensors_by_path(nest):
            if is_remote(tensor):
                where = f"block {call.block.name}" if call is not None else "the loss"
                raise self.not_sent(f"{where} needs a tensor of an earlier stage (at {path})")

    def not_sent(self, found: str) -> RunError:
        """What was `found` is needed in this microbatch."""
        return RunError(
            f"running stage {self.stage} of the model",
            f"{found} that was not sent: the first microbatch did without it",
            OTHER_AXIS,
        )

    def _other_call(self, now: CallOf) -> RunError:
        expected = self._calls[self._count][0] if self._count < len(self._calls) else "no block"
        return RunError(
            f"running stage {self.stage} of the model",
            f"it calls {now[0]} where the first microbatch called {expected}",
            f"have the model run all blocks in one order for every microbatch (no layerdrop), or {OTHER_AXIS}",
        )


def _check_form(place: TensorSite, met: RemoteTensor, value: torch.Tensor) -> None:
    """What was sent must be what is met at the same place here."""
    if met.shape != value.shape or met.dtype is not value.dtype:
        raise RunError(
            f"receiving {place} from an earlier stage",
            f"it has shape {tuple(value.shape)} and type {value.dtype}, and here {tuple(met.shape)} and {met.dtype}",
            f"let the model's code do the same on every stage, or {OTHER_AXIS}",
        )


class Between(TorchFunctionMode):
    """Within, a run gets what the model's code makes."""

    def __init__(self, run: StageRun) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self._run.made(getattr(func, "__name__", ""), results)
        return results


class StagedModel:
    """Shows the code of `model`, while a stage of it runs, what that stage has; `keep_stages` leaves what this rank
    runs.

    device: where it is now. `blocks` are all of the model's.
    """

    def __init__(self, model: nn.Module, device: str) -> None:
        self.model, self.device = model, device
        self.running: Running | None = None
        self._stage_plan: StagePlan | None = None
        self._passed: dict[Any, _Passed] = {}
        self._places: list[tuple[ViewedParameters, str, Known]] = []
        self.blocks = find_blocks(model)
        # After hooks that gather parameters, which come first however late they are registered.
        model.register_forward_pre_hook(self._begin)
        known = _known_tensors(model, device)
        self.known = {one.name: one for one in known.values()}
        for module in model.modules():
            for kind in get_args(TensorDict):
                self._show(module, kind, known)

    @property
    def stage_plan(self) -> StagePlan:
        """The stages; set by `stage_as`."""
        assert self._stage_plan is not None  # it was given
        return self._stage_plan

    def stage_as(self, stage_plan: StagePlan) -> None:
        """From now on its stages are these."""
        self._stage_plan = stage_plan

    def move(self, device: str) -> None:
        """From now on remote tensors are those of `device`."""
        self.device = device
        for known in self.known.values():
            known.form = _form(known.form, device)

    def real(self) -> Iterable[tuple[torch.Tensor, Known]]:
        """The tensors that are shown otherwise, as they are held."""
        return ((shown[name], known) for shown, name, known in self._places)

    def keep_stages(self, stage_plan: StagePlan, own: Sequence[int]) -> dict[str, torch.Tensor]:
        """Keeps what the stages `own` hold; returns by name what stands for the rest.

        All ranks come by all tensors in the same order: each may have to be put together from what they hold.
        """
        self._stage_plan = stage_plan
        placeholders: dict[str, torch.Tensor] = {}
        held: dict[str, torch.Tensor] = {known.name: shown[name] for shown, name, known in reversed(self._places)}
        for name in self.known:
            tensor = held.pop(name)
            whole = tensor.detach().unsqueeze(0)
            if set(stage_plan.owners[name]) & set(own):
                tensor.data = whole.squeeze(0).clone()
            del tensor, whole
        for shown, name, known in self._places:
            if not set(stage_plan.owners[known.name]) & set(own):
                shown.hide(name, placeholders.setdefault(known.name, _placeholder(shown[name])))
        return placeholders

    def _show(self, module: nn.Module, kind: TensorDict, known: Mapping[int, Known]) -> None:
        mine = {name: known[id(tensor)] for name, tensor in tensor_dict(module, kind).items() if id(tensor) in known}
        if not mine:
            return
        shown = viewed_tensors(module, kind)
        self._places += [(shown, name, one) for name, one in mine.items()]

        def view(name: str, _: torch.Tensor | None) -> torch.Tensor | None:
            if self.running is None or name not in mine:
                return None
            return self.running.shown(module, name, mine[name])

        shown.add_view(view, first=True)

    def forward(
        self, stage: int, inbox: Payload, compute: Callable[[], Any], *, training: bool
    ) -> tuple[Payload | None, Any]:
        """Runs `stage`; `compute` runs the job's loss. What it sends on, or (None, the result) of the last stage."""
        run = StageRun(self, stage, inbox, training=training)
        try:
            return self._forward(run, compute, watching=self.stage_plan.receives_between(training=training))
        finally:
            run.forget()

    def _forward(self, run: StageRun, compute: Callable[[], Any], *, watching: bool) -> tuple[Payload | None, Any]:
        self.running = run
        try:
            with Between(run) if watching else nullcontext():
                result = compute()
        except StageEnd as leave:
            if leave.run is not run:
                raise
            return leave.payload, None
        except Exception as problem:
            if not (operation := operation_of(problem)):
                raise
            raise run.not_sent(f"{operation} needs numbers of an earlier stage") from problem
        finally:
            self.running = None
        if run.stage < self.stage_plan.stages - 1:
            raise RunError(
                f"running stage {run.stage} of the model",
                "the model's code came to its end before the next stage began",
                f"let it run all blocks, and not catch every exception, or {OTHER_AXIS}",
            )
        run.end(result)
        return None, result

    def parameters(self, stage: int) -> list[nn.Parameter]:
        """The parameters that `stage` holds."""
        held = {
            id(p): p
            for shown, name, known in self._places
            if stage in self.stage_plan.owners[known.name] and isinstance(p := shown.local(name), nn.Parameter)
        }
        return [*held.values()]

    def _begin(self, *_: Any) -> None:
        if self.running is not None:
            self.running.begin()

    def call(self, call: BlockCall) -> Any:
        """What a call of a block returns in the run that is under way."""
        assert self.running is not None  # blocks are called while a stage runs
        return self.running.call(call)

    def skipped(self, run: StageRun, call: BlockCall) -> Any:
        """What a block of an earlier stage returns, as remote tensors."""
        given = dict(tensors_by_path((call.args, call.kwargs)))
        key = key_of((call.block.name, call.block.module.training, call.args, call.kwargs))
        known = self._passed.get(key) if key is not None else None
        if known is None:
            result = type(call.block.module).forward(call.block.module, *call.args, **call.kwargs)
            known = _passed(result, {id(tensor): path for path, tensor in given.items()})
            if key is not None:
                self._passed[key] = known

        def again(form: torch.Tensor) -> torch.Tensor:
            path = known.same.get(id(form))
            return remote(form, run) if path is None else given[path]

        return map_tensors(again, known.nest)


@dataclass(frozen=True)
class _Passed:
    """What a block gives, found once: `nest` of fake tensors; `same`: id of one -> the argument it is."""

    nest: Any
    same: dict[int, str]


def _passed(result: Any, paths: Mapping[int, str]) -> _Passed:
    same: dict[int, str] = {}

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        form = _form(tensor.form if isinstance(tensor, RemoteTensor) else tensor)
        if id(tensor) in paths:
            same[id(form)] = paths[id(tensor)]
        return form

    return _Passed(map_tensors(kept, result), same)


def _known_tensors(model: nn.Module, device: str) -> dict[int, Known]:
    """By id the parameters of `model`, and its buffers that belong to a stage: of blocks, and running statistics.

    Other buffers are few and small, such as masks and tables of positions, and every stage has them.
    """
    inside = {id(buffer) for block in find_blocks(model) for buffer in block.module.buffers()}
    inside |= {id(buffer) for module in model.modules() if keeps_statistics(module) for buffer in module.buffers()}
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if id(buffer) in inside]
    return {id(tensor): Known(name, _form(tensor, device)) for name, tensor in (*model.named_parameters(), *buffers)}


def _form(tensor: torch.Tensor, device: str | None = None) -> torch.Tensor:
    with shared_fake_mode(), torch.no_grad():
        form = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device)
    return form.requires_grad_(tensor.requires_grad)


def _placeholder(tensor: torch.Tensor) -> torch.Tensor:
    """What stands for a tensor of other ranks: its shape and type, for an optimizer to sort by."""
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
