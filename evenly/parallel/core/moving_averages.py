"""Buffers that a forward keeps for itself: moving averages and counters, r <- a r + b, b from the microbatch alone.

Where the factor a is one number and the forward makes no use of r, what the microbatches of a step leave follows as
with running statistics: r_N = a^N r_0 + sum_k a^(N - k) b_k. Both are found out before the first step, by forwards from
several values of the buffers (`Probe`), and looked at again in the steps 2, 4, 8 and so on. During a step each forward
begins with r_0, and b = r_1 - a r_0 is recorded.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from evenly.errors import RunError
from evenly.parallel.core.buffer_rules import LOOK, BufferRule, Term

Values = dict[str, torch.Tensor]  # of buffers, by full name

DIGITS = 6  # of a factor as people write it


class MovingAverage(BufferRule):
    """The buffer `name` of `module`, itself named `prefix`; a: its factor."""

    def __init__(self, prefix: str, module: nn.Module, name: str, a: float) -> None:
        super().__init__(prefix, module)
        self._name, self._a = name, a
        self._start: torch.Tensor | None = None  # as the step began; None before the first forward
        self._records: list[tuple[int, torch.Tensor]] = []

    @property
    def full_name(self) -> str:
        """Name of the buffer in the model."""
        return f"{self.name}.{self._name}".lstrip(".")

    @property
    def buffers(self) -> list[str]:
        return [self._name]

    @property
    def device(self) -> torch.device:
        return self._buffer.device

    @property
    def width(self) -> int:
        return self._buffer.numel()

    @property
    def _buffer(self) -> torch.Tensor:
        return getattr(self.module, self._name)

    def attach(self) -> list[Any]:
        return []

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Around the forward of an evaluation. Raises `RunError` where it changes the buffer."""
        before = self._buffer.detach().clone()
        yield
        if not torch.equal(before, self._buffer):
            raise RunError(
                f"buffer {self.full_name} changes in an evaluation",
                "each rank would change it by its own microbatches only",
                "change it while the model trains only (self.training), or run on one device",
            )

    def begin(self, microbatch: int | None) -> None:
        super().begin(microbatch)
        if microbatch == LOOK:
            return  # whoever looks puts back what it finds
        if self._start is None:
            self._start = self._buffer.detach().clone()
        self._put(self._start)  # a recomputation in between has changed it

    def end(self) -> None:
        if self._start is None:  # of a look
            return super().end()
        now = self._buffer.detach()
        if now.shape != self._start.shape or now.dtype != self._start.dtype:
            raise RunError(
                f"buffer {self.full_name}",
                f"it was {tuple(self._start.shape)} of {self._start.dtype} and is {tuple(now.shape)} of {now.dtype}",
                "keep its shape and type, or run on one device",
            )
        if self.microbatch is not None:
            self._records.append((self.microbatch, (now.double() - self._a * self._start.double()).flatten()))
        self._put(self._start)
        return super().end()

    def calls(self, microbatch: int) -> int:
        return sum(one == microbatch for one, _ in self._records)

    def drop(self) -> None:
        if self._start is not None:
            self._put(self._start)  # a recomputation may have changed it
        self._records.clear()
        self._start = None

    def merge(self, other: MovingAverage) -> None:
        self._records += [(number, b.to(self.device, copy=True)) for number, b in other._records]
        other._records.clear()
        other._start = None

    def terms(self, calls: Sequence[int]) -> list[Term]:
        return [(self._a ** sum(calls[number + 1 :]), b) for number, b in self._records]

    @classmethod
    def apply(cls, rules: Sequence[Any], sums: Sequence[torch.Tensor], calls: Sequence[Sequence[int]]) -> None:
        for rule, summed, own in zip(rules, sums, calls, strict=True):
            rule._set(summed, own)

    def _set(self, summed: torch.Tensor, calls: Sequence[int]) -> None:
        start = self._buffer.detach() if self._start is None else self._start
        found = self._a ** sum(calls) * start.double() + summed.view(start.shape)
        self._put((found if start.is_floating_point() else found.round()).to(start.dtype))
        self._records.clear()
        self._start = None

    def _put(self, value: torch.Tensor) -> None:
        if self._buffer.requires_grad:  # it was set to something that was computed
            setattr(self.module, self._name, value.clone())
            return
        with torch.no_grad():
            self._buffer.copy_(value)


class Probe:
    """Forwards of one microbatch from several values of `buffers`, which are full names and where they are found."""

    def __init__(self, buffers: Mapping[str, tuple[nn.Module, str]]) -> None:
        self._buffers = buffers
        self.starts: list[Values] = []
        self.ends: list[Values] = []
        self.saved: list[list[float]] = []  # sums of what each forward keeps for its backward

    @contextmanager
    def forward(self) -> Generator[None]:
        """Around a forward; the first begins with the values that are there, each of the others with values drawn."""
        start = {name: getattr(*place).detach().clone() for name, place in self._buffers.items()}
        start = self.starts[0] if self.starts else start
        if self.starts:
            draw = torch.Generator().manual_seed(len(self.starts))
            start = {name: _moved(value, draw) for name, value in start.items()}
        self._set(start)
        saved: list[float] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta:
                numbers = tensor.detach() if tensor.dtype is torch.bool else tensor.detach().abs()
                saved.append(float(numbers.sum(dtype=torch.float64)))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self.starts.append(start)
        self.ends.append({name: getattr(*place).detach().clone() for name, place in self._buffers.items()})
        self.saved.append(saved)
        self._set(self.starts[0])

    def _set(self, values: Values) -> None:
        for name, (module, own) in self._buffers.items():
            setattr(module, own, values[name].clone())

    def factors(self) -> dict[str, float | None]:
        """By name the factor of a buffer, None where it has not one."""
        return {name: self._factor(name) for name in self._buffers}

    def _factor(self, name: str) -> float | None:
        starts, ends = [one[name] for one in self.starts], [one[name] for one in self.ends]
        if starts[0].dtype is torch.bool or starts[0].is_complex() or not starts[0].numel():
            return None
        if any(end.shape != starts[0].shape or end.dtype != starts[0].dtype for end in ends):
            return None
        given = torch.cat([(one.double() - starts[0].double()).flatten() for one in starts[1:]])
        found = torch.cat([(one.double() - ends[0].double()).flatten() for one in ends[1:]])
        if not bool(found.isfinite().all()):
            return None
        a = float((given * found).sum() / (given * given).sum())
        a = round(a, DIGITS) if abs(a - round(a, DIGITS)) < _tolerance(starts[0]) else a
        largest = float(given.abs().max()) + max(float(one.double().abs().max()) for one in ends)
        return a if float((found - a * given).abs().max()) <= _tolerance(starts[0]) * largest else None


def _moved(value: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Other values, as large or larger."""
    if not value.is_floating_point():
        return value + torch.randint(2, 60, value.shape, generator=draw).to(value)
    moved = torch.randn(value.shape, dtype=torch.float64, generator=draw).to(value)
    return value + moved * (1 + value.abs().max() if value.numel() else 1)


def _tolerance(value: torch.Tensor) -> float:
    """Rounding of a few operations."""
    return 64 * torch.finfo(value.dtype).eps if value.is_floating_point() else 1e-12
