"""One process, several devices: a replica of the model on each, fed by one thread.

Replicas run microbatches in *rounds*, one each: first every forward and loss, then every backward, so that GPUs
compute side by side while the thread feeds one after the other. One thread and not one per device, because the
generators of Python, numpy and torch on the CPU belong to the process: threads would mix up the random streams of
their microbatches.

The outputs of a replica are *gathered* on one device, where all losses are computed (DataParallel, whose first device
therefore runs out of memory first), or stay on the replica's device, which computes its loss (balanced DataParallel).

Each replica's gradients are accumulated on its own device. After the last round they are added to those of the first
replica, which is the model itself; before the next step its parameters are copied to the others.

On the CPU devices are virtual: one memory, with copies wherever GPUs would need them; `parallel.core.memory` counts
each by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
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

    number, device: index and name among the devices of this process.
    module:         has the parameters and buffers.
    called:         the module that the job's loss is given.
    loss_number, loss_device: where the batch is placed and the loss computed.
    """

    number: int
    device: str
    module: nn.Module
    called: nn.Module
    loss_number: int
    loss_device: str


class Replicas(Sequence[Replica]):
    """One of `modules` on each of `devices`; the first is the model itself.

    The others are built by the job and not copied from it, since a copy breaks aliases, such as an attribute that is a
    view of a weight.

    output_device: number of the device on which losses are computed; None leaves each to its own.
    """

    def __init__(
        self, modules: Sequence[nn.Module], devices: Sequence[str], *, output_device: int | None = None
    ) -> None:
        _check_distinct(modules)
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
        """Copies parameters and buffers of the first replica to the others."""
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

    def drop(self, names: frozenset[str]) -> None:
        for gradients in (self._sum, *self._others):
            gradients.drop(names)

    def begin(self, *, numbers: int = 0, rounds: int = 1) -> None:
        """Copies the updated parameters to the other replicas, and begins a step."""
        self._replicas.refresh()
        for number, gradients in enumerate((self._sum, *self._others)):
            with on(number):
                gradients.begin(numbers=numbers, rounds=rounds)

    def expect_last(self) -> None:
        """Does nothing: nothing can be sent before the replicas' sums are merged."""

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
        for number, gradients in enumerate((self._sum, *self._others)):
            with on(number):
                gradients.collect()

    def add(self, earlier: Mapping[str, torch.Tensor]) -> None:
        self._sum.add(earlier)

    def norm(self) -> torch.Tensor:
        return self._sum.norm()

    def exact_norm(self) -> float:
        return self._sum.exact_norm()

    def divide(self, divisor: float) -> None:
        self._sum.divide(divisor)

    def scale(self, factor: float) -> None:
        self._sum.scale(factor)

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        return self._sum.named_gradients()

    def track(self, counter: MemoryCounter, number: int = 0) -> None:
        """Counts each replica's sums on its device, from `number` on."""
        for place, gradients in enumerate((self._sum, *self._others), number):
            gradients.track(counter, place)

    def close(self) -> None:
        for gradients in (self._sum, *self._others):
            gradients.close()


class GatheredReplica(nn.Module):
    """A replica that is called from another device: copies arguments to it and outputs back.

    All attributes are the replica's own.
    """

    def __init__(self, module: nn.Module, own: tuple[int, str], caller: tuple[int, str]) -> None:
        super().__init__()
        self.module, self._own, self._caller = module, own, caller

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        transfer = _transfer_to(self._caller, self._own)
        args, kwargs = map_tensors(transfer, args), map_tensors(transfer, kwargs)
        with on(self._own[0]):
            outputs = self.module(*args, **kwargs)
        return map_tensors(_transfer_to(self._own, self._caller), outputs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class _Transfer(torch.autograd.Function):
    """Copies a tensor to another device, and its gradient back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, source: tuple[int, str], target: tuple[int, str]) -> torch.Tensor:
        ctx.source = source
        return _copy_to(tensor, target)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _copy_to(gradients[0], ctx.source), None, None


def _transfer_to(source: tuple[int, str], target: tuple[int, str]) -> Callable[[torch.Tensor], torch.Tensor]:
    def transfer(tensor: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Transfer.apply(tensor, source, target)  # pyright: ignore[reportAssignmentType]
        return result

    return transfer


def _copy_to(tensor: torch.Tensor, target: tuple[int, str]) -> torch.Tensor:
    """A copy of `tensor` on `target`, also where source and target are the CPU."""
    number, device = target
    with on(number, carrying=True):
        return tensor.to(device, non_blocking=True, copy=True)


def _replica(number: int, devices: Sequence[str], module: nn.Module, loss_number: int) -> Replica:
    device, loss_device = devices[number], devices[loss_number]
    called = module
    if number != loss_number:
        called = GatheredReplica(module, (number, device), (loss_number, loss_device))
    return Replica(number, device, module, called, loss_number, loss_device)


def _check_distinct(modules: Sequence[nn.Module]) -> None:
    """Raises `PlanError` where replicas share a parameter or buffer."""
    seen: dict[int, str] = {}
    for module in modules:
        mine = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
        if shared := [name for key, name in mine.items() if key in seen]:
            raise PlanError(
                f"{len(modules)} replicas of the model",
                f"{shared[0]} is the same tensor in all: the job's `model` returns the same module each time",
                "let it build a new module each time it is called",
            )
        seen |= mine


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]
