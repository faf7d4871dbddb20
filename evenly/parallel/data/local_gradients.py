"""Gradients of a rank that has no parameter in common with any other: what autograd has added up in `grad`.

Nothing is sent, so nothing is copied into buckets: the first gradient of a step becomes the sum, and takes memory from
then on. But on a CPU small ones have a place in a bucket, in which a step begins with zeros: dividing many and taking
their norm takes one call instead of one for each. A GPU is given lists of tensors, in one call too.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

import torch
from torch import nn

from evenly.comm.exact_reduce import exact_norm
from evenly.comm.groups import Group
from evenly.parallel.core.memory import MemoryCounter
from evenly.parallel.data.buckets import Bucket, Slot, fill_buckets, find_small, has_changed, is_small
from evenly.parallel.data.gradient_hooks import check_dtype, check_gradient
from evenly.parallel.data.gradients import Gradients, refuse_unfrozen, trainable
from evenly.parallel.data.ownership import Ownership
from evenly.parallel.data.squares import sum_of_squares
from evenly.torch_private import divide_each, scale_each, without_subclasses


class LocalGradients(Gradients):
    """The sums of `model` over the microbatches of a step, on this rank alone.

    Whoever writes to `grad` during a backward adds to what is there, and leaves there what nothing else shares, as
    autograd does.
    """

    def __init__(self, model: nn.Module, *, ownership: Ownership | None = None) -> None:
        """ownership: what this rank has of the model, where it is not all."""
        self._ownership = ownership
        named, self._frozen = trainable(model, required=ownership is None or ownership.pipeline_group is None)
        small = [(name, p) for name, p in named if p.device.type == "cpu" and is_small(p.numel())]
        self._buckets: list[Bucket] = fill_buckets(small, Group.alone(), accumulate_float64=False)
        self._slots: list[tuple[Bucket, Slot]] = [(bucket, slot) for bucket in self._buckets for slot in bucket.slots]
        self._by_name = {slot.name: slot for _, slot in self._slots}
        find_small(self._by_name.values(), model)
        self._others = [(name, p, p.dtype) for name, p in named if name not in self._by_name]
        self._named = named
        self._counts_all = ownership is not None and ownership.counts_all(name for name, _ in named)
        self._looked = False
        self._numbers: Sequence[float] | torch.Tensor = ()

    def begin(self, *, numbers: int = 0, rounds: int = 1) -> None:
        self._looked = False
        with without_subclasses():  # this rank's parts
            for _, parameter in self._named:
                parameter.grad = None
            for bucket in self._buckets:
                for slot in bucket.slots:
                    slot.used, slot.left = False, False
                bucket.begin()
                bucket.begin_small(self.dropped)

    def expect_last(self) -> None:
        """Nothing is sent."""

    def collect(self) -> None:
        """Drops gradients that are to be dropped; all others are where they belong."""
        with without_subclasses():
            for name, parameter in self._named if self.dropped else ():
                if name in self.dropped:
                    parameter.grad = None

    def start_reduce(self, numbers: Sequence[float] | torch.Tensor = ()) -> None:
        refuse_unfrozen(self._frozen)
        self._look()
        with without_subclasses():
            for name, parameter, dtype in self._others:
                if (gradient := parameter.grad) is not None:
                    check_dtype(name, gradient.dtype, dtype)
                    check_gradient(name, gradient, sent=False)
        self._numbers = numbers

    def finish_reduce(self) -> list[float]:
        return self._numbers.tolist() if isinstance(self._numbers, torch.Tensor) else [*self._numbers]

    def _look(self) -> None:
        """Finds out, once a step, which small ones were used; what autograd has put elsewhere goes to its bucket."""
        if self._looked:
            return
        self._looked = True
        with without_subclasses():
            for bucket, slot in self._slots:
                parameter = slot.parameter
                gradient = parameter.grad
                slot.used = has_changed(slot) if gradient is slot.gradient else gradient is not None
                if slot.used:
                    check_dtype(slot.name, parameter.dtype, bucket.dtype)
                if gradient is None:
                    slot.gradient.zero_()
                elif gradient is not slot.gradient:
                    check_gradient(slot.name, gradient, sent=False)
                    slot.gradient.copy_(gradient)
                parameter.grad = slot.gradient if slot.used else None

    def used(self) -> set[str]:
        self._look()
        with without_subclasses():
            return {name for name, parameter in self._named if parameter.grad is not None}

    def mark_used(self, names: Container[str]) -> None:
        self._look()
        with without_subclasses():
            for name, parameter in self._named:
                if name in names and parameter.grad is None:
                    self._fill(name, parameter, torch.zeros_like(parameter))

    def add(self, earlier: Mapping[str, torch.Tensor]) -> None:
        with without_subclasses():
            for name, parameter in self._named:
                if (gradient := earlier.get(name)) is None:
                    continue
                if parameter.grad is None:
                    self._fill(name, parameter, gradient.clone())
                else:
                    parameter.grad.add_(gradient)

    def _fill(self, name: str, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Gives a parameter that had none `gradient`, which nothing else shares."""
        slot = self._by_name.get(name)
        parameter.grad = gradient if slot is None else slot.gradient.copy_(gradient)

    def _all(self) -> list[torch.Tensor]:
        """Each gradient once; small ones in buckets, zeros of unused ones included."""
        with without_subclasses():
            others = [gradient for _, parameter, _ in self._others if (gradient := parameter.grad) is not None]
        return [bucket.gradients for bucket in self._buckets] + others

    def norm(self) -> torch.Tensor:
        owned = self._ownership
        if owned is None:
            return sum_of_squares(self._all()).sqrt()
        return owned.norm((("", one) for one in self._all()) if self._counts_all else self.named_gradients())

    def exact_norm(self) -> float:
        return exact_norm(self._all(), None)

    def divide(self, divisor: float) -> None:
        if found := self._all():  # torch wants at least one
            divide_each(found, divisor)

    def scale(self, factor: float) -> None:
        if found := self._all():
            scale_each(found, factor)

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        with without_subclasses():
            return iter([(name, parameter.grad) for name, parameter in self._named])

    def track(self, counter: MemoryCounter, number: int = 0) -> None:
        counter.track(self._all(), "gradients", number)

    def close(self) -> None:
        """Parameters have no hooks."""
