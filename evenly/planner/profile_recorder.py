"""Profiles a model: its forward and backward run on tensors that take no memory, and every operation is recorded."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from evenly.data.nest import map_tensors, tensors_in
from evenly.errors import NOT_HERE, EvenlyError, UserError, describe, place_of
from evenly.model import lstm
from evenly.model.blocks import Block, find_blocks
from evenly.model.costs import flops_of, moves_bytes
from evenly.model.fake import fake_model, running_fake
from evenly.model.modes import in_training
from evenly.model.parts import Collective, Kind, OpCost
from evenly.planner.fake_results import FakeResults, Form
from evenly.planner.partly_fake import PartlyFake
from evenly.planner.profile import AFTER, MODEL, Bytes, Event, Interval, Parameter, Pass, Profile, ProfiledCall
from evenly.torch_private import (
    ATTENTION,
    ATTENTION_BACKWARD,
    ATTENTION_BACKWARD_ON_CPU,
    ATTENTION_ON_CPU,
    TO_COPY,
    engine_backward,
    operation_of,
    without_subclasses,
)

ASKED = "reading the model (it is run once on fake tensors)"
REMEDY = (
    "let shapes follow from the batch, not from what the model computes: no .item() of that, no mask of it as index"
)
_aten = torch.ops.aten
T = TypeVar("T")


def profile_module(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    batch: Any,
    *,
    change: Callable[[nn.Module, Sequence[Block]], AbstractContextManager[Any]] | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    collectives: Sequence[Collective] = (),
    without: Collection[str] = (),
    results: FakeResults | None = None,
) -> Profile:
    """What `loss(model, batch)`, a scalar, and its backward do. Neither the model nor a random state is changed.

    model: on any device, meta among them. batch: any nest of tensors; its numbers count only where shapes within the
    model follow from them.
    change: what a plan does to the model and its blocks, in place; around: within what forward and backward run.
    collectives: a list to which `change` appends those of the tensor axis, as they happen.
    without: names of modules to leave out. results: what operations make, as other runs have found.

    Raises `UserError`, naming the operation, where the code needs numbers or does not run without them.
    """
    mode = PartlyFake(known := results or FakeResults())
    with running_fake():
        try:
            faked = in_training(fake_model(model, mode.fakes, _discard, without=without))
            blocks, nest = find_blocks(faked), map_tensors(torch.clone, batch)
            changed = nullcontext() if change is None else change(faked, blocks)
            with mode, changed, torch.enable_grad():
                recorder = _ProfileRecorder(faked, blocks, mode, collectives, known.notes)
                return recorder.profile(partial(loss, faked, nest), nest, around)
        except EvenlyError:
            raise
        except Exception as problem:
            raise _refusal(problem) from problem


def _discard(*_: object) -> None:
    """The tensors of the copy need no record."""


@dataclass(eq=False)
class _ProfileRecorder:
    """Runs a model on fake tensors and records what it does."""

    model: nn.Module
    blocks: Sequence[Block]
    mode: PartlyFake
    collectives: Sequence[Collective] = ()
    known_works: dict[Form, list[OpCost]] = field(default_factory=dict[Form, list[OpCost]])
    calls: list[ProfiledCall] = field(default_factory=list[ProfiledCall])
    inside: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        self.names = {key: tuple(found) for key, found in names.items()}
        self.stage: Pass = "forward"
        self.place = -1  # where the model is
        self.used: dict[int, set[str]] = {}
        self.begun: set[int] = set()  # calls whose backward has begun
        self.ended: set[int] = set()
        self.turned = False  # whether the model's backward has begun
        self.returned: tuple[int, list[weakref.ref[torch.Tensor]]] = (MODEL, [])  # by the last call
        self.next: dict[int, int] = {}  # call -> the one that is given what it returned
        self.collectives_by_place: dict[tuple[Pass, int], list[Collective]] = {}
        self.collectives_before = len(self.collectives)
        self.output_bytes = 0
        self.memory = _Memory(self)

    def end_interval(self, event: Event) -> None:
        """Ends an interval; collectives in it belong to where the model was."""
        if new := self.collectives[self.collectives_before :]:
            self.collectives_by_place.setdefault((self.stage, self.place), []).extend(new)
            self.collectives_before += len(new)
        self.memory.end_interval(event)

    def profile(
        self, compute: Callable[[], torch.Tensor], batch: Any, around: Callable[[], AbstractContextManager[Any]]
    ) -> Profile:
        self.memory.exclude((*self.model.buffers(), *tensors_in(batch)))
        self.memory.exclude(self.model.parameters(), weights=True)
        parameters = {names[0]: self._parameter(names) for names in self.names.values()}
        buffers = {id(b.untyped_storage()): b.untyped_storage().nbytes() for b in self.model.buffers()}
        handles = self._hook()
        try:
            self.mode.note = self.memory.note
            with _Calls(self.memory), around():
                total = compute()
            self.end_interval(Event("", "forward"))
            self.stage, self.place = "backward", len(self.calls)
            _check(total)
            with around():
                # `total.backward()` is a function of torch, within which modes of functions are off; blocks that are
                # computed again need those of `around`.
                how = {"allow_unreachable": True, "accumulate_grad": True}
                engine_backward((total,), (torch.ones_like(total),), False, False, (), **how)
            for number in reversed(range(len(self.calls))):
                self._ended(number)
            self.end_interval(Event("end", "backward", MODEL))
            del total
            self.end_interval(Event("", "backward"))
        finally:
            self.mode.note = None
            for handle in handles:
                handle.remove()
        works, branches = self.memory.works(), self.memory.branch_bytes
        return Profile(
            intervals=tuple(self.memory.intervals),
            calls=tuple(self.calls),
            parameters=parameters,
            buffer_bytes=sum(buffers.values()),
            used={place: frozenset(names) for place, names in self.used.items()},
            works=self._joined(works),
            branch_bytes={place: sum(found) for (_, place), found in self._joined(branches).items()},
            collectives=self._joined(self.collectives_by_place),
            output_bytes=self.output_bytes,
            elements=sum(tensor.numel() for tensor in tensors_in(batch)),
        )

    def _joined(self, found: Mapping[tuple[Pass, int], Iterable[T]]) -> dict[tuple[Pass, int], tuple[T, ...]]:
        """With the code after a call counted to it, and that after the last apart."""
        joined: dict[tuple[Pass, int], tuple[T, ...]] = {}
        count = len(self.calls)
        for (stage, place), values in found.items():
            number = place if place < AFTER else place - AFTER if place - AFTER < count - 1 else count
            joined[stage, number] = (*joined.get((stage, number), ()), *values)
        return joined

    def _parameter(self, names: tuple[str, ...]) -> Parameter:
        parameter = self.model.get_parameter(names[0])
        return Parameter(names, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)

    def _hook(self) -> list[Any]:
        handles: list[Any] = []
        for block in self.blocks:
            handles.append(block.module.register_forward_pre_hook(self._enter(block), with_kwargs=True, prepend=True))
            handles.append(block.module.register_forward_hook(self._leave))
        handles.append(self.model.register_forward_pre_hook(self._enter_model))
        handles.append(self.model.register_forward_hook(self._leave_model))
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(self._finished))
        return handles

    def _enter_model(self, *_: Any) -> None:
        if self.stage == "forward":
            self.end_interval(Event("begin", "forward", MODEL))

    def _leave_model(self, _: nn.Module, __: Any, result: Any) -> None:
        if self.stage == "forward":
            self.end_interval(Event("end", "forward", MODEL))
            self.place = len(self.calls)
            with without_subclasses():
                self.output_bytes = sum(map(_bytes, tensors_in(result)))
                for tensor in _with_gradient(result):
                    tensor.register_hook(self._model_begun)

    def _model_begun(self, _: torch.Tensor) -> None:
        if not self.turned:
            self.turned = True
            self.end_interval(Event("begin", "backward", MODEL))

    def _enter(self, block: Block) -> Callable[..., None]:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self.stage == "backward" or self.inside:
                return  # recomputed, or a block within its own call
            with without_subclasses():
                self._called(block, _with_gradient((args, kwargs)))

        return enter

    def _called(self, block: Block, given: Sequence[torch.Tensor]) -> None:
        number = len(self.calls)
        self.calls.append(ProfiledCall(block.name, sum(map(_bytes, given))))
        self.end_interval(Event("begin", "forward", number))
        self.inside.append(number)
        self.place = number
        if given and any(one() is given[0] for one in self.returned[1]):
            self.next[self.returned[0]] = number
        for tensor in given[:1]:
            tensor.register_hook(partial(self._ended, number))  # the gradient of the call's input is there

    def _leave(self, module: nn.Module, _: Any, result: Any) -> None:
        if self.stage == "backward" or not self.inside:
            return
        number = self.inside.pop()
        with without_subclasses():
            given = _with_gradient(result)
            self.calls[number] = replace(self.calls[number], output_bytes=sum(map(_bytes, given)))
            self.end_interval(Event("end", "forward", number))
            self.place = AFTER + number
            self.returned = number, [weakref.ref(tensor) for tensor in given]
            for tensor in given:
                tensor.register_hook(partial(self._begun, number))

    def _begun(self, number: int, _: torch.Tensor) -> None:
        if number in self.next:
            self._ended(self.next[number])
        if number not in self.begun and number not in self.ended:
            self.begun.add(number)
            self.end_interval(Event("begin", "backward", number))
            self.place = number

    def _ended(self, number: int, _: torch.Tensor | None = None) -> None:
        if number not in self.ended:
            self.ended.add(number)
            self.end_interval(Event("end", "backward", number))
            self.place = number - 1

    def _finished(self, parameter: torch.Tensor) -> None:
        name = self.names[id(parameter)][0]
        self.used.setdefault(self.place, set()).add(name)
        self.end_interval(Event("gradient", "backward", self.place, name))
        parameter.grad = None
        self.end_interval(Event("freed", "backward", self.place, name))


class _Calls(TorchFunctionMode):
    """Tells `memory` of every call of torch from Python, not of those that it makes within."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._memory.called = True
        return func(*args, **(kwargs or {}))


class _Memory:
    """Follows every storage that is made within, and counts what operations cost."""

    def __init__(self, recorder: _ProfileRecorder) -> None:
        self._recorder = recorder
        self.called = False  # from Python, and no operation since
        self._known: dict[int, Any] = {}
        self._now = [0, 0]  # since the last event: what the forward has made, what the backward
        self._peak = (0, 0)
        self._works: dict[tuple[Pass, int], Counter[OpCost]] = {}
        self._weights: set[int] = set()  # storages of parameters, and of their copies in another type
        self.branch_bytes: dict[tuple[Pass, int], list[int]] = {}
        self.intervals: list[Interval] = []

    def exclude(self, tensors: Iterable[torch.Tensor], *, weights: bool = False) -> None:
        """These tensors' storages are not counted: they exist before the run."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._known[id(storage)] = storage
            if weights:
                self._weights.add(id(storage))

    def end_interval(self, event: Event) -> None:
        """Ends an interval."""
        self.intervals.append(Interval(Bytes(*self._peak), Bytes(*self._now), event))
        self._now, self._peak = [0, 0], (0, 0)

    def works(self) -> dict[tuple[Pass, int], list[OpCost]]:
        return {
            key: [replace(work, times=work.times * times) for work, times in found.items()]
            for key, found in self._works.items()
        }

    def note(self, func: Any, args: Any, kwargs: dict[str, Any], results: Any, key: Form | None) -> Any:
        """Notes an operation; returns its results. key: of those who cost the same; None for what is looked at."""
        if func.overloadpacket is lstm.FORWARD:
            results = lstm.with_workspace(results, args)
        for tensor in tensors_in(results):
            self._follow(tensor)
        if moves_bytes(func) and (works := self._works_of(key, func, args, kwargs, results)):
            if self.called:
                works = [*works, OpCost(kind="host")]
                self.called = False
            self._works.setdefault((self._recorder.stage, self._recorder.place), Counter()).update(works)
            if self._recorder.stage == "forward":
                self._note_weights(func, (args, kwargs), results)
        return results

    def _works_of(self, key: Form | None, func: Any, args: Any, kwargs: Any, results: Any) -> list[OpCost]:
        known = self._recorder.known_works
        if key is None or key not in known:
            works = _works_of(func, args, kwargs, results)
            return works if key is None else known.setdefault(key, works)
        return known[key]

    def _note_weights(self, func: Any, given: Any, results: Any) -> None:
        if not any(id(tensor.untyped_storage()) in self._weights for tensor in tensors_in(given)):
            return
        made = next(iter(tensors_in(results)), None)
        if made is not None and func.overloadpacket is TO_COPY:
            self._weights.add(id(made.untyped_storage()))
        elif made is not None:
            self.branch_bytes.setdefault(("forward", self._recorder.place), []).append(_bytes(made))

    def _follow(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        made_in = 0 if self._recorder.stage == "forward" else 1
        size = storage.nbytes()
        self._known[key] = None
        weakref.finalize(storage, self._freed, key, made_in, size)
        self._now[made_in] += size
        if sum(self._now) > sum(self._peak):
            self._peak = (self._now[0], self._now[1])

    def _freed(self, key: int, made_in: int, size: int) -> None:
        self._known.pop(key, None)
        self._weights.discard(key)
        self._now[made_in] -= size


def _works_of(func: Any, args: Any, kwargs: Any, results: Any) -> list[OpCost]:
    """What an operation costs; nothing where it touches nothing."""
    packet = func.overloadpacket
    moved = float(sum(map(_bytes, tensors_in((args, kwargs, results)))))
    if packet in (lstm.FORWARD, lstm.BACKWARD):
        return [*lstm.products(packet, args), OpCost(kind="memory", moved_bytes=moved, as_run=True)]
    flops = flops_of(func, args, kwargs, results)
    if not moved and not flops:
        return []
    kind: Kind = "memory"
    if packet in (*ATTENTION, *ATTENTION_BACKWARD):
        kind = "attention"
    elif flops:
        kind = "convolution" if "conv" in packet.__name__ else "matmul"
    rows, inner, columns = _sizes(packet, args) if kind == "matmul" else (0, 0, 0)
    work = OpCost(
        kind=kind,
        flops=flops,
        moved_bytes=moved,
        rows=rows,
        inner=inner,
        columns=columns,
        recomputed=kind == "memory",
        as_run=True,
        looked_at=_looked_at(packet, args) if kind == "attention" else 1.0,
        of_weights=packet is _aten.mm and _transposed(args[0]),
    )
    return [work]


def _looked_at(packet: Any, args: Any) -> float:
    query, causal = {ATTENTION_ON_CPU: (0, 4), ATTENTION_BACKWARD_ON_CPU: (1, 7)}.get(packet, (0, len(args)))
    if not any(args[causal : causal + 1]):
        return 1.0
    asked, known = args[query].shape[-2], args[query + 1].shape[-2]
    return asked / (2 * known) if asked <= known else 1 - known / (2 * asked)


def _transposed(left: torch.Tensor) -> bool:
    return left.stride(0) == 1 and left.stride(1) != 1


def _sizes(packet: Any, args: Any) -> tuple[int, int, int]:
    """Rows, inner and columns of a product; 0 for other operations."""
    first = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}.get(packet)
    if first is None:
        return 0, 0, 0
    left, right = args[first], args[first + 1]
    return int(left.shape[-2]), int(left.shape[-1]), int(right.shape[-1])


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _with_gradient(nest: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(nest) if tensor.requires_grad]


def _check(total: torch.Tensor) -> None:
    if not total.requires_grad:
        raise UserError(ASKED, "the loss does not depend on the model's parameters", "do not detach it")


def _refusal(problem: Exception) -> UserError:
    operation = operation_of(problem)
    if not operation:
        do = NOT_HERE if isinstance(problem, NotImplementedError) else REMEDY
        return UserError(ASKED, f"it does not run so: {describe(problem)}", do)
    return UserError(ASKED, f"{operation}{place_of(problem)} needs numbers", REMEDY)
