"""One process, several devices: a replica of the model on each, fed by one thread.

Replicas run microbatches in *rounds*, one each: first every forward and loss, then every backward, so that GPUs
compute side by side while the thread feeds one after the other. One thread and not one per device, because the
generators of Python, numpy and torch on the CPU belong to the process: threads would mix up the random streams of
their microbatches.

The outputs of a replica are *gathered* on one device, where the losses of all are computed (DataParallel, whose first
device so runs out of memory first), or *kept* where they are, and so is the loss (balanced DataParallel).

Each replica's gradients are added up on its own device; the first replica, which is the model itself, takes those of
the others after the last round, and they take its values before the next step.

On the CPU devices are virtual: one memory, with copies wherever GPUs would need them; `parallel.core.memory` tells them
apart.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from evenly.comm.groups import Group
from evenly.data.nest import map_tensors
from evenly.errors import PlanError
from evenly.parallel.core.memory import MemoryCounter, on
from evenly.parallel.data.gradients import Gradients, GradientSum


@dataclass(frozen=True)
class Replica:
    """A model on one device.

    number, device: which of the devices of this process.
    module:         the parameters and buffers.
    called:         what the job's loss calls.
    loss_number, loss_device: where the job's loss finds its batch and computes.
    """

    number: int
    device: str
    module: nn.Module
    called: nn.Module
    loss_number: int
    loss_device: str


class Replicas(Sequence[Replica]):
    """One of `modules` on each of `devices`; the first is the model itself, the others are built like it.

    They are built and not copied, since a copy loses what hangs together outside of parameters: an attribute that is
    a view of a weight.

    output_device: number of the device on which losses are computed; None leaves each to its own.
    """

    def __init__(
        self, modules: Sequence[nn.Module], devices: Sequence[str], *, output_device: int | None = None
    ) -> None:
        _check_apart(modules)
        self._replicas = [
            _replica(number, devices, module, number if output_device is None else output_device)
            for number, module in enumerate(modules)
        ]

    def __getitem__(self, index: Any) -> Any:
        return self._replicas[index]

    def __len__(self) -> int:
        return len(self._replicas)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    def refresh(self) -> None:
        """Gives every replica the values of the first."""
        first, *others = self._replicas
        with torch.no_grad():
            for other in others:
                with on(other.number, carrying=True):
                    for mine, value in zip(_tensors(other.module), _tensors(first.module), strict=True):
                        mine.copy_(value, non_blocking=True)


class ReplicaGradients(Gradients):
    """Adds gradients over microbatches, replicas and ranks; see `parallel.data.gradients` for the order of calls."""

    def __init__(self, replicas: Replicas, *, group: Group, accumulate_float64: bool) -> None:
        self._replicas = replicas
        self._sum, *self._others = (
            GradientSum(replica.module, group=group, accumulate_float64=accumulate_float64) for replica in replicas
        )

    def begin(self, *, numbers: int = 0, rounds: int = 1) -> None:
        """The replicas take over what the last update changed."""
        self._replicas.refresh()
        for number, gradients in enumerate((self._sum, *self._others)):
            with on(number):
                gradients.begin(numbers=numbers)

    def expect_last(self) -> None:
        """Nothing to do: nothing is sent before the replicas' sums are together."""

    def start_reduce(self, numbers: Sequence[float] | torch.Tensor = ()) -> None:
        """Adds the other replicas' sums to the first's, which is sent with `numbers`."""
        with on(0, carrying=True):
            for other in self._others:
                self._sum.merge(other)
        self._sum.start_reduce(numbers)

    def finish_reduce(self) -> list[float]:
        return self._sum.finish_reduce()

    def used(self) -> set[str]:
        return self._sum.used()

    def mark_used(self, names: Container[str]) -> None:
        self._sum.mark_used(names)

    def collect(self) -> None:
        self._sum.collect()

    def norm(self) -> torch.Tensor:
        return self._sum.norm()

    def divide(self, divisor: float) -> None:
        self._sum.divide(divisor)

    def scale(self, factor: float) -> None:
        self._sum.scale(factor)

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        return self._sum.named_gradients()

    def track(self, counter: MemoryCounter, number: int = 0) -> None:
        """The sums on each replica's device, from `number` on."""
        for place, gradients in enumerate((self._sum, *self._others), number):
            gradients.track(counter, place)

    def close(self) -> None:
        for gradients in (self._sum, *self._others):
            gradients.close()


class Gathered(nn.Module):
    """A replica that is called from another device: arguments are carried to it, outputs back.

    Everything but calling it is the replica's own.
    """

    def __init__(self, module: nn.Module, here: tuple[int, str], there: tuple[int, str]) -> None:
        super().__init__()
        self.module, self._here, self._there = module, here, there

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        carry = _carrier(self._there, self._here)
        args, kwargs = map_tensors(carry, args), map_tensors(carry, kwargs)
        with on(self._here[0]):
            outputs = self.module(*args, **kwargs)
        return map_tensors(_carrier(self._here, self._there), outputs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class _Carry(torch.autograd.Function):
    """A tensor from one device to another; its gradient comes back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, source: tuple[int, str], target: tuple[int, str]) -> torch.Tensor:
        ctx.source = source
        return _carried(tensor, target)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _carried(gradients[0], ctx.source), None, None


def _carrier(source: tuple[int, str], target: tuple[int, str]) -> Callable[[torch.Tensor], torch.Tensor]:
    def carry(tensor: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Carry.apply(tensor, source, target)  # pyright: ignore[reportAssignmentType]
        return result

    return carry


def _carried(tensor: torch.Tensor, target: tuple[int, str]) -> torch.Tensor:
    """A copy of `tensor` on `target`, also where both are the CPU."""
    number, device = target
    with on(number, carrying=True):
        return tensor.to(device, non_blocking=True, copy=True)


def _replica(number: int, devices: Sequence[str], module: nn.Module, loss_number: int) -> Replica:
    device, loss_device = devices[number], devices[loss_number]
    called = module
    if number != loss_number:
        called = Gathered(module, (number, device), (loss_number, loss_device))
    return Replica(number, device, module, called, loss_number, loss_device)


def _check_apart(modules: Sequence[nn.Module]) -> None:
    """Raises `PlanError` where modules that should be several share what they hold."""
    seen: dict[int, str] = {}
    for module in modules:
        mine = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
        if shared := [name for key, name in mine.items() if key in seen]:
            raise PlanError(
                f"{len(modules)} replicas of the model",
                f"{shared[0]} is the same tensor in all: the job's model returns what it returned before",
                "let it build a new module each time it is called",
            )
        seen |= mine


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]
