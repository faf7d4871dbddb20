"""Rounding, added on purpose to a run on one device: how far it carries is what rounding does to this job.

Two plans that keep the contract differ in the order in which they add. Where only gradients of microbatches are added
in another order, the sums move by a unit in the last place (`sums`). Where a plan also adds in another order within the
forward, as the tensor axis does, everything that is computed from the weights moves so, as does every element of a
product by itself (samples that are alike come out unlike, which a norm over them enlarges without bound), and what a
model casts to a narrower type moves by a unit of that type (`forward`).
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from evenly.data.nest import tensors_in
from evenly.errors import EVENLY
from evenly.torch_private import PRODUCTS, TO_COPY, TorchDispatchMode

Disturbance = Literal["none", "sums", "forward"]
SAME_BITS: tuple[Any, ...] = (torch.Tensor.view, torch.frombuffer)  # whose type is how bits are read
STARTS = 1 << 12  # places at which the largest tensor may begin to read what was drawn


class Disturber:
    """Adds rounding of one kind to the microbatches of a run; draws from generators of its own.

    draw: other numbers are other rounding. cast_eps: unit in the last place of the narrowest type that the model has
    cast to, 0 if it has to none.
    """

    def __init__(self, kind: Disturbance = "none", draw: int = 1) -> None:
        self._kind, self._seed = kind, draw
        self.cast_eps = 0.0
        self._draw = random.Random(draw)
        self._factors: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    @contextmanager
    def around_microbatch(self, model: torch.nn.Module) -> Generator[None]:
        """Within, a microbatch's forward and backward run; gradients summed so far are disturbed at the end."""
        if self._kind == "none":
            yield
            return
        if self._kind == "sums":
            yield
        else:
            with self._disturbed_weights(model), _DisturbedResults(self.disturb, self._disturb_cast):
                yield
        for parameter in model.parameters():
            if parameter.grad is not None and not parameter.grad.is_sparse:
                self.disturb(parameter.grad)

    @torch.no_grad()
    def disturb(self, tensor: torch.Tensor) -> None:
        """Moves about half of the elements by one unit in the last place, in place, towards zero."""
        factors, size = self._factors_for(tensor), tensor.numel()
        start = self._draw.randrange(len(factors) - size)
        tensor.mul_(factors[start : start + size].view(tensor.shape))

    def _factors_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """1D, longer than `tensor` has elements; half of them are 1. Drawn once, and read from anywhere."""
        kind = (tensor.device, tensor.dtype)
        factors = self._factors.get(kind)
        if factors is None or len(factors) < tensor.numel() + STARTS:
            draw = torch.Generator(tensor.device).manual_seed(self._seed)
            size = tensor.numel() + STARTS
            moved = torch.randint(0, 2, (size,), generator=draw, device=tensor.device, dtype=torch.int8)
            factors = self._factors[kind] = 1 - torch.finfo(tensor.dtype).eps * moved.to(tensor.dtype)
        return factors

    def _disturb_cast(self, tensor: torch.Tensor) -> None:
        self.cast_eps = max(self.cast_eps, torch.finfo(tensor.dtype).eps)
        self.disturb(tensor)

    @contextmanager
    def _disturbed_weights(self, model: torch.nn.Module) -> Generator[None]:
        parameters = [p for p in model.parameters() if p.is_floating_point()]
        saved = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            self.disturb(parameter.detach())
        yield
        with torch.no_grad():
            for parameter, before in zip(parameters, saved, strict=True):
                parameter.copy_(before)


class LiftedCasts(TorchFunctionMode):
    """A context manager: within, code that asks torch for float32 gets float64, but for views of the same bits.

    count: how often the number was one of float64. The engine's own calls are as they are.
    """

    count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given, named = args, kwargs or {}
        asked = (
            func is torch.Tensor.float or torch.float32 in _dtypes(given) or torch.float32 in _dtypes(named.values())
        )
        if asked and func not in SAME_BITS and _is_called_outside(inspect.currentframe()):
            self.count += any(isinstance(one, torch.Tensor) and one.dtype is torch.float64 for one in given)
            func = torch.Tensor.double if func is torch.Tensor.float else func
            given = tuple(torch.float64 if one is torch.float32 else one for one in given)
            named = {name: torch.float64 if one is torch.float32 else one for name, one in named.items()}
        return func(*given, **named)


def _dtypes(values: Iterable[Any]) -> list[torch.dtype]:
    return [one for one in values if isinstance(one, torch.dtype)]


def _is_called_outside(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(EVENLY)


class _DisturbedResults(TorchDispatchMode):
    """A context manager: within, `disturb_cast` moves what is cast to a narrower type, `disturb` what products give."""

    def __init__(self, disturb: Callable[[torch.Tensor], None], disturb_cast: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._disturb, self._disturb_cast = disturb, disturb_cast

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result: Any = func(*args, **(kwargs or {}))
        if func.overloadpacket in PRODUCTS:
            for tensor in filter(torch.is_floating_point, tensors_in(result)):
                self._disturb(tensor)
        floating = func is TO_COPY.default and args[0].is_floating_point() and result.is_floating_point()
        if floating and result.element_size() < args[0].element_size():
            self._disturb_cast(result)
        return result
