"""Whether every rank gathers the same units in the same order in each forward, as ZeRO 3 needs.

Each gather is a collective. A model that leaves blocks out by chance (layer drop) or by what it computed (early exit)
would have ranks wait for each other for ever, or gather each other's blocks; one that calls a block's `forward`, or
uses its parameters from outside, finds shards. One forward of the first microbatch tells: before each unit all ranks
compare which it is, and what could decide between blocks is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from evenly.comm.collectives import all_reduce
from evenly.comm.groups import Group
from evenly.data.generators import Position, position_past_torch
from evenly.errors import EvenlyError
from evenly.parallel.core.calls import ForwardEnded

READS: set[Any] = {
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.equal,
    torch.allclose,
    torch.is_nonzero,
}
END, FAILED = -1, -2  # in place of a unit's number: the forward has ended, by an exception


def order_may_differ(units: Sequence[tuple[str, nn.Module]], group: Group, forward: Callable[[], object]) -> bool:
    """Runs `forward`, unless ranks differ in it; whether they did, or may in another, or whether it failed.

    units: name and module of each. Returns the same on all ranks.
    """
    watch = _Watch([name.rpartition(".")[0] for name, _ in units], group)
    handles: list[Any] = []
    for number, (_, unit) in enumerate(units):
        handles.append(unit.register_forward_pre_hook(partial(watch.enter, number), prepend=True))
        handles.append(unit.register_forward_hook(partial(watch.leave, number)))
    try:
        watch.run(forward)
    except ForwardEnded:
        if not watch.differ:
            raise
        return True
    finally:
        for handle in handles:
            handle.remove()
    return float(all_reduce(torch.tensor([watch.decides()]).double().to(group.device), group, label="units")) > 0


class _Watch(TorchFunctionMode):
    """Notes whether numbers are read, or drawn past torch, between two units of one container.

    containers: name of the container of each unit. differ: whether ranks ran different units.
    """

    def __init__(self, containers: Sequence[str], group: Group) -> None:
        super().__init__()
        self._containers, self._group = containers, group
        self._last = {container: number for number, container in enumerate(containers)}
        self._called: set[int] = set()
        self._depth = 0
        self._left: int | None = None  # the unit that ended last
        self._read = False  # whether numbers were read since
        self._position: Position | None = None  # of generators, as the last unit ended
        self._decides = self.differ = False

    def run(self, forward: Callable[[], object]) -> None:
        """Raises `ForwardEnded` on all ranks where they differ."""
        try:
            with self:
                forward()
        except (ForwardEnded, EvenlyError):  # a refusal: all ranks run the same microbatch here
            raise
        except Exception:  # of a mistake in the job, which will be raised again, or of finding shards
            self._decides = True
            self.compare(FAILED)
        else:
            self.compare(END)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS and self._depth == 0 and self._left is not None:
            self._read = True
            self._decides |= self._left != self._last[self._containers[self._left]]
        return func(*args, **(kwargs or {}))

    def enter(self, number: int, *_: object) -> None:
        """Before a unit's forward."""
        if self._depth == 0:
            self.compare(number)
            again = self._left is not None and self._containers[self._left] == self._containers[number]
            self._decides |= again and (self._read or position_past_torch() != self._position)
            self._called.add(number)
        self._depth += 1

    def leave(self, number: int, *_: object) -> None:
        """After a unit's forward."""
        self._depth -= 1
        self._left, self._read, self._position = number, False, position_past_torch()

    def compare(self, number: int) -> None:
        """Raises `ForwardEnded` on all ranks unless all are at the same unit."""
        mine = torch.tensor([number + 3.0, (number + 3.0) ** 2], dtype=torch.float64, device=self._group.device)
        self._depth += 1  # what is read here decides nothing
        total, squares = all_reduce(mine, self._group, label="units").tolist()
        self._depth -= 1
        # n * sum(x^2) == (sum x)^2 holds if and only if all n numbers are equal.
        if squares * self._group.size != total**2:
            self.differ = True
            raise ForwardEnded

    def decides(self) -> bool:
        """Whether another forward may run other units: something decides, or one of a container's did not run."""
        ran = {self._containers[number] for number in self._called}
        return self._decides or any(
            container in ran and number not in self._called for number, container in enumerate(self._containers)
        )
