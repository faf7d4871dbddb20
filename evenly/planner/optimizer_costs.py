"""What an optimizer keeps of each parameter and needs for its step, found out on small parameters of its own kind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from evenly.data.nest import tensors_in
from evenly.errors import UserError, describe
from evenly.parallel.core.optimizer_kinds import is_separable, steps_elements
from evenly.torch_private import TorchDispatchMode

SHAPE = (17, 13)  # of the small parameters: no product of one's lengths is the other's
STEPS = 2  # the state is there after the first


@dataclass(frozen=True)
class StateOf:
    """Of one parameter: bytes of state per element, per row (all dims but the last), per column, and apart from that.

    temporary: bytes per element that its step needs for a while. together: whether those of all parameters of a group
    are needed at once.
    """

    element: float
    row: float
    column: float
    apart: float
    temporary: float
    together: bool

    def bytes(self, shape: Sequence[int]) -> int:
        """The state of a parameter of `shape`."""
        elements, last = math.prod(shape), shape[-1] if shape else 1
        return round(elements * self.element + elements / max(1, last) * self.row + last * self.column + self.apart)


@dataclass(frozen=True)
class OptimizerCosts:
    """By name of the parameter what the optimizer keeps of it; those that it was not given have nothing.

    dealt: whether zero deals it whole parameters, each to one rank; elementwise: whether it gets pieces.
    """

    states: Mapping[str, StateOf] = field(default_factory=dict[str, StateOf])
    dealt: bool = False
    elementwise: bool = True

    def bytes(self, shapes: Mapping[str, Sequence[int]]) -> int:
        """The state of all parameters; shapes: by name, of what is stepped of each."""
        return sum(self.states[name].bytes(shape) for name, shape in shapes.items() if self._stepped(name, shape))

    def _stepped(self, name: str, shape: Sequence[int]) -> bool:
        return name in self.states and math.prod(shape) > 0

    def temporary_bytes(self, elements: Mapping[str, int]) -> int:
        """What a step needs for a while; elements: that are stepped of each parameter."""
        found = [(self.states[name], count) for name, count in elements.items() if name in self.states]
        alone = max((state.temporary * count for state, count in found if not state.together), default=0.0)
        return round(max(alone, sum(state.temporary * count for state, count in found if state.together)))


def optimizer_costs(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> OptimizerCosts:
    """What `optimizer` keeps; names: of its parameters, by id.

    Raises `UserError` where its class cannot be built for other parameters, as those of torch.optim can.
    """
    states: dict[str, StateOf] = {}
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        by_dtype: dict[torch.dtype, StateOf] = {}
        for parameter in group["params"]:
            if parameter.dtype not in by_dtype:
                by_dtype[parameter.dtype] = _probe(type(optimizer), settings, parameter.dtype)
            if id(parameter) in names:
                states[names[id(parameter)]] = by_dtype[parameter.dtype]
    elementwise = steps_elements(optimizer)
    return OptimizerCosts(states, dealt=not elementwise and is_separable(optimizer), elementwise=elementwise)


def _probe(kind: type[torch.optim.Optimizer], settings: dict[str, Any], dtype: torch.dtype) -> StateOf:
    elements = math.prod(SHAPE)
    try:
        optimizer, one = _stepped(kind, settings, dtype, 1)
        two = _stepped(kind, settings, dtype, 2)[1]
    except Exception as problem:
        raise UserError(
            f"finding what optimizer {kind.__name__} keeps", describe(problem), "use an optimizer of torch.optim"
        ) from problem
    state = next(iter(optimizer.state.values()), {})
    sizes = [(tensor.numel(), tensor.element_size()) for tensor in tensors_in(state)]
    kinds = {elements: "element", SHAPE[0]: "row", SHAPE[1]: "column"}
    found = {"element": 0.0, "row": 0.0, "column": 0.0, "apart": 0.0}
    for count, size in sizes:
        found[kinds.get(count, "apart")] += size if count in kinds else count * size
    return StateOf(**found, temporary=one // (elements * 2) * 2 if one else 0.0, together=two >= 1.9 * one > 0)


def _stepped(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any], dtype: torch.dtype, count: int
) -> tuple[torch.optim.Optimizer, int]:
    """The optimizer after its steps, and the most that the last of them allocated at once."""
    parameters = [nn.Parameter(torch.ones(SHAPE, dtype=dtype)) for _ in range(count)]
    optimizer = kind([{"params": parameters, **settings}], **_needed(kind, settings))  # pyright: ignore
    most = 0
    for _ in range(STEPS):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        with _Rise() as rise:
            optimizer.step()
        most = rise.most
    return optimizer, most


def _needed(kind: type[torch.optim.Optimizer], settings: dict[str, Any]) -> dict[str, Any]:
    import inspect

    wanted = list(inspect.signature(kind).parameters.values())[1:]
    needed = [one.name for one in wanted if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    return {name: settings[name] for name in needed if name in settings}


class _Rise(TorchDispatchMode):
    """The most bytes that the operations within hold at once of what they made."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs or {}))}
        results = func(*args, **(kwargs or {}))
        for tensor in tensors_in(results):
            self._follow(tensor, given)
        return results

    def _follow(self, tensor: torch.Tensor, given: set[int]) -> None:
        import weakref

        storage = tensor.untyped_storage()
        if id(storage) in self._known or id(storage) in given:
            return
        self._known.add(id(storage))
        weakref.finalize(storage, self._freed, id(storage), storage.nbytes())
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
