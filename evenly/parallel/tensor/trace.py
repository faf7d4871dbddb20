"""What a model computes, as plain data: the calls of torch's functions in one forward, with shapes alone.

*value* a tensor that takes part: parameter, buffer, batch, constant or the result of a call · *call* one function of
torch as the model's code calls it. A function of `torch.nn.functional` is one call, whatever it calls in turn, but for
`multi_head_attention_forward`: it stands as the calls that it is made of.

The model's own code runs once, in training, on tensors that have a shape and a type but no numbers: no weight is
copied, and a model on the meta device will do. Code that asks for a number (`.item()`, a mask as index) runs a second
time, with numbers to ask for (`example_numbers`): the trace is then of one path among several. What makes tensors
by other means than torch's functions (compiled or scripted code, `vmap`) is one call that no rule describes. A trace of
code that fails ends there, and what it has seen by then stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name

from evenly.data.nest import map_tensors, tensors_in
from evenly.errors import EVENLY, PlanError, describe, place_of
from evenly.model.fake import Source, fake_model, fake_tensor, running_fake
from evenly.model.modes import in_training
from evenly.parallel.tensor.attention import multi_head_attention
from evenly.parallel.tensor.example_numbers import ExampleNumbers
from evenly.torch_private import fake_mode, operation_of, sets_gradients, unwrapped

INSIDE = (torch.__path__[0], EVENLY)  # code whose lines no message names
ASKED = "to find what of the model can be split (tensor=N)"
OTHER_AXIS = "use another axis for this model: plan ddp, zero3"

AnySource = Source | Literal["batch", "call"]

# Of a tensor's attributes those that are tensors.
TENSOR_ATTRIBUTES = ("T", "mT", "H", "mH", "data", "real", "imag", "grad")
OPAQUE = "code without functions of torch (compiled, scripted or mapped)"  # as a function's name
# Calls that change a tensor and return none.
SILENT = ("__setitem__", "__set__")
# `torch.embedding` takes its arguments in another order than `torch.nn.functional.embedding`.
MISNAMED = (torch.embedding,)


@dataclass(frozen=True)
class Value:
    """A tensor; `name` that of a parameter or a buffer, its first where it has several."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    source: AnySource
    name: str = ""

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class Ref:
    """A tensor among the arguments of a call: `Trace.values[index]`."""

    index: int


@dataclass(frozen=True)
class TracedCall:
    """One call.

    function:  `linear`, `add_`, `view`, `T`, ...: the plain name of what `torch`, `torch.Tensor` and
               `torch.nn.functional` hold; qualified (`torch.fft.rfft`) for all others.
    arguments: as given, every tensor a `Ref`; lists and tuples are tuples.
    outputs:   indices of the values it returned or changed.
    module:    name of the innermost module running, empty for the loss.
    hidden:    whether gradients, if there are any, are computed by other means: in a `torch.autograd.Function`.
    """

    function: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    outputs: tuple[int, ...]
    module: str
    hidden: bool

    @property
    def inputs(self) -> list[int]:
        """Indices of all values among the arguments."""
        return [ref.index for ref in refs_in((self.arguments, self.keywords))]

    @property
    def place(self) -> str:
        """`softmax in layers.0.attention`."""
        return f"{self.function} in {self.module}" if self.module else self.function


@dataclass(frozen=True)
class CallTrace:
    """One forward.

    values:     all tensors; the parameters come first, in order of definition.
    calls:      in the order in which they ran.
    parameters: every name of every parameter -> index of its value; of tied ones the same index.
    ended:      why it ends before the loss does; empty if it does not.
    """

    values: tuple[Value, ...]
    calls: tuple[TracedCall, ...]
    parameters: dict[str, int]
    ended: str = ""


def refs_in(arguments: Any) -> Iterator[Ref]:
    """Every tensor among (nested) arguments, in order."""
    if isinstance(arguments, Ref):
        yield arguments
    elif isinstance(arguments, tuple):
        for one in arguments:
            yield from refs_in(one)
    elif isinstance(arguments, dict):
        yield from refs_in(tuple(arguments.values()))
    elif isinstance(arguments, slice):
        yield from refs_in((arguments.start, arguments.stop, arguments.step))


def trace(model: nn.Module, loss: Callable[[nn.Module, Any], Any], batch: Any) -> CallTrace:
    """The calls of `loss(model, batch)` in training. Neither the model nor any random state is changed.

    model: on any device, meta among them. batch: any nest of tensors; its numbers are looked at only where code asks.

    Raises `PlanError`, naming the operation and its place, where the code cannot be followed up to a parameter.
    """
    recorder = _Recorder(fake_mode())
    problem = _record(recorder, model, loss, batch)
    if problem is not None:
        recorder = _Recorder(fake_mode(), with_numbers=True)
        problem = _record(recorder, model, loss, batch)
    traced = recorder.trace("" if problem is None else problem.found)
    if problem is not None and not {*traced.parameters.values()} & {i for call in traced.calls for i in call.inputs}:
        raise problem
    return traced


def _record(
    recorder: _Recorder, model: nn.Module, loss: Callable[[nn.Module, Any], Any], batch: Any
) -> PlanError | None:
    """Runs `loss(model, batch)` under `recorder`; what kept it from its end."""
    fakes = recorder.fakes

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        fake = recorder.know(fake_tensor(tensor, fakes), "batch")
        recorder.give_numbers(fake, tensor)
        return fake

    with running_fake():
        try:
            faked = in_training(fake_model(model, fakes, recorder.stand_in))
            _give_buffers(recorder, model, faked)
            nest = map_tensors(stand_in, batch)
            with _names_of_modules(faked, recorder.running), fakes, recorder, torch.enable_grad():
                loss(faked, nest)
        except PlanError as problem:
            return problem
        except Exception as problem:
            return _refusal(problem, recorder)
    return None


def _give_buffers(recorder: _Recorder, model: nn.Module, faked: nn.Module) -> None:
    for real, fake in zip(model.buffers(), faked.buffers(), strict=True):
        recorder.give_numbers(fake, real)


# ------------------------------------------------------------------------------------------------------------ recording


@dataclass(eq=False)
class _Recorder(TorchFunctionMode):
    """Records every call while it is active."""

    fakes: Any
    with_numbers: bool = False
    calls: list[TracedCall] = field(default_factory=list[TracedCall])
    parameters: dict[str, int] = field(default_factory=dict[str, int])
    running: list[str] = field(default_factory=list[str])
    failed: tuple[Exception, TracedCall] | None = None  # the call that failed last
    records: bool = True  # whether gradients are recorded, as the model's code has it
    inside: bool | None = None  # in a `torch.autograd.Function`, whether its code has gradients recorded; else None
    _values: list[tuple[torch.Tensor, Value]] = field(default_factory=list[tuple[torch.Tensor, Value]])
    _index: dict[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        super().__init__()
        self._numbers = ExampleNumbers(partial(fake_tensor, fakes=self.fakes)) if self.with_numbers else None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the call, and notes it if it has to do with tensors."""
        keywords = kwargs or {}
        if func is nn.functional.multi_head_attention_forward:
            with self:  # records in turn
                result = multi_head_attention(*args, **keywords)
            if result is not NotImplemented:
                return result
        self._note_function()
        if sets_gradients(func):
            if self.inside is None:
                self.records = bool(args[0])
            else:
                self.inside = bool(args[0])
        call = TracedCall(name_of(func), (), {}, (), self.module, hidden=self.inside is not None)
        if _matters(func):
            arguments = _map(self._ref, (args, keywords))
            call = replace(call, arguments=arguments[0], keywords=arguments[1])
        try:
            result = func(*args, **keywords)
        except Exception as problem:
            self.failed = problem, call
            result = self._answer(problem, func, args, keywords)
            outputs = _changed_by(call, args, result)
        else:
            outputs = _changed_by(call, args, result)
            if self._numbers is not None and outputs:
                self._numbers.follow(func, args, keywords, outputs)
        if outputs:
            self.calls.append(replace(call, outputs=tuple(map(self._made, outputs))))
        return result

    def _note_function(self) -> None:
        """Notes where a Function has begun or ended, which switches the recording of gradients without a call."""
        recorded = torch.is_grad_enabled()
        if self.inside is None and self.records and not recorded:
            self.inside = False
        elif self.inside is not None and recorded != self.inside:
            self.inside = None

    def _answer(self, problem: Exception, func: Any, args: Any, keywords: Any) -> Any:
        """What the call returns of numbers; raises `problem` where there are none."""
        if self._numbers is None:
            raise problem
        try:
            return self._numbers.answer(func, args, keywords)
        except Exception:
            raise problem from None

    def give_numbers(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Code that asks for numbers of `fake` finds those of `real`."""
        if self._numbers is not None:
            self._numbers.know(fake, real)

    def know(self, tensor: torch.Tensor, source: AnySource, name: str = "") -> torch.Tensor:
        """Takes `tensor` among the values, if it is not there."""
        if self._index.get(id(tensor)) is None:
            self._index[id(tensor)] = len(self._values)
            # Its shape now: code may change it in place. The tensor outlives the trace, so that its id stays its own.
            self._values.append((tensor, Value(tuple(tensor.shape), tensor.dtype, False, source, name)))
        return tensor

    def stand_in(self, tensor: torch.Tensor, source: Source, name: str) -> None:
        """Takes the tensor of that name in the model that is run among the values."""
        self.know(tensor, source, name)
        if source == "parameter":
            self.parameters[name] = self.index_of(tensor)

    def index_of(self, tensor: torch.Tensor) -> int:
        return self._index[id(tensor)]

    def trace(self, ended: str) -> CallTrace:
        values = (
            Value(value.shape, value.dtype, tensor.requires_grad, value.source, value.name)
            for tensor, value in self._values
        )
        return CallTrace(tuple(values), tuple(self.calls), self.parameters, ended)

    @property
    def module(self) -> str:
        return self.running[-1] if self.running else ""

    def _ref(self, tensor: torch.Tensor) -> Ref:
        if id(tensor) not in self._index:
            if getattr(tensor, "fake_mode", None) is self.fakes or unwrapped(tensor) is not tensor:
                self._note_opaque(tensor)
            else:
                self.know(tensor, "constant")  # with numbers, so from before the forward
        return Ref(self._index[id(tensor)])

    def _note_opaque(self, tensor: torch.Tensor) -> None:
        """Takes among the calls the code that made `tensor` unseen, with what it was made of."""
        inner = unwrapped(tensor)
        inputs = {self._index[id(inner)]} if id(inner) in self._index else self._found_in_graph(tensor)
        arguments = tuple(map(Ref, sorted(inputs)))
        self.calls.append(TracedCall(OPAQUE, arguments, {}, (self._made(tensor),), self.module, True))

    def _found_in_graph(self, tensor: torch.Tensor) -> set[int]:
        """The values whose gradients autograd would compute first from that of `tensor`."""
        nodes: dict[Any, int] = {one.grad_fn: at for at, (one, _) in enumerate(self._values) if one.grad_fn is not None}
        found: set[int] = set()
        seen, ahead = set[Any](), [tensor.grad_fn]
        while ahead:
            node = ahead.pop()
            leaf = self._index.get(id(getattr(node, "variable", None)))
            if (at := nodes.get(node, leaf)) is not None:
                found.add(at)
            elif node is not None and node not in seen:
                ahead.extend(following for following, _ in node.next_functions)
            seen.add(node)
        return found

    def _made(self, tensor: torch.Tensor) -> int:
        known = self._index.get(id(tensor))
        if known is not None and self._values[known][1].shape != tuple(tensor.shape):
            del self._index[id(tensor)]
        return self.index_of(self.know(tensor, "call"))


def _matters(func: Any) -> bool:
    """Whether the arguments have to be known: asking a tensor for its shape or type tells nothing."""
    return getattr(func, "__name__", "") != "__get__" or getattr(func.__self__, "__name__", "") in TENSOR_ATTRIBUTES


def _changed_by(call: TracedCall, args: Any, result: Any) -> list[torch.Tensor]:
    outputs = [*tensors_in(result)]
    if not outputs and (call.function in SILENT or re.fullmatch(r"\w*[a-z]_", call.function)):
        return [*tensors_in(args[:1])]
    return outputs


def _map(change: Callable[[torch.Tensor], Any], nest: Any) -> Any:
    """Nested arguments with every tensor changed, lists as tuples."""
    if isinstance(nest, torch.Tensor):
        return change(nest)
    if isinstance(nest, list | tuple):
        return tuple(_map(change, one) for one in nest)
    if isinstance(nest, dict):
        return {key: _map(change, one) for key, one in nest.items()}
    if isinstance(nest, slice):
        return slice(_map(change, nest.start), _map(change, nest.stop), _map(change, nest.step))
    return nest


# ---------------------------------------------------------------------------------------------------------------- names


def name_of(func: Any) -> str:
    """The plain name of a function that `torch`, `torch.Tensor` or `torch.nn.functional` holds, else the qualified."""
    name: str = getattr(func, "__name__", "") or str(func)
    if name in ("__get__", "__set__"):
        attribute = getattr(func.__self__, "__name__", name)
        return attribute if name == "__get__" else name
    return name if _is_torchs(func) else resolve_name(func) or f"{getattr(func, '__module__', None)}.{name}"


def _is_torchs(func: Any) -> bool:
    try:
        return func in _torchs_functions()
    except TypeError:  # not hashable
        return False


@cache
def _torchs_functions() -> frozenset[Any]:
    homes: Iterable[Any] = (torch, torch.Tensor, nn.functional)
    found = (getattr(home, name, None) for home in homes for name in dir(home))
    return frozenset(one for one in found if callable(one) and not isinstance(one, type)) - {*MISNAMED}


@contextmanager
def _names_of_modules(model: nn.Module, running: list[str]) -> Generator[None]:
    """Within, `running` holds the names of the modules whose forward runs, the innermost last."""
    handles: list[Any] = []
    for name, module in model.named_modules():

        def enter(_: nn.Module, __: Any, name: str = name) -> None:
            running.append(name)

        def leave(*_: Any) -> None:
            running.pop()

        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# --------------------------------------------------------------------------------------------------------------- errors


def _refusal(problem: Exception, recorder: _Recorder) -> PlanError:
    failed = recorder.failed[1] if recorder.failed and recorder.failed[0] is problem else None
    operation = operation_of(problem)
    if not operation:
        what, line = describe(problem), place_of(problem, INSIDE)
        place = f" (in the call of {failed.place}{line})" if failed else "" if what.endswith(line) else line
        return PlanError(ASKED, f"it does not run on fake tensors: {what}{place}", OTHER_AXIS)
    place = (f" in {failed.module}" if failed and failed.module else "") + place_of(problem, INSIDE)
    return PlanError(ASKED, f"{operation}{place} needs numbers", OTHER_AXIS)
