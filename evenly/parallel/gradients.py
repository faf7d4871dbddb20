"""The data axis with whole gradients on every rank: microbatch gradients are added up in buckets, and the buckets
are summed over the ranks once per step, while the last backward is still running.

Vocabulary. A *slot* is a parameter's place in a *bucket*, one flat tensor. A gradient is *folded* into its slot as
soon as autograd has finished it, and freed. Buckets are filled roughly in the order in which a backward finishes
parameters (the reverse of their definition) and are *sent* strictly by index, so that all ranks agree on the order
of collectives whatever their own order of events. The last bucket ends in one *flag* per parameter that says how
many ranks used it in this step: a parameter that no rank used keeps `grad=None`, since an optimizer does more with
a gradient of zeros than with none (weight decay, momentum).

Exactness. With `wide` buckets float32 gradients are added in float64. A sum of float32 numbers whose magnitudes
lie within a factor of 2**28 of each other has no rounding at all in float64, in any order, and what rounding is
left beyond that is 2**29 times finer than the float32 number it is rounded to: the result has the same bits
whoever added what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from evenly.comm.collectives import Pending, sum_later
from evenly.errors import RunError, UserError

# Small enough that the first is sent early in the last backward, large enough that latency does not count: the
# sizes that torch's DistributedDataParallel arrived at.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


@dataclass(eq=False)
class Slot:
    """One parameter's place in a bucket."""

    name: str
    parameter: nn.Parameter
    start: int
    number: int  # of its flag
    sum: torch.Tensor = field(init=False)  # view of the bucket's `sums`, shaped as the parameter
    gradient: torch.Tensor = field(init=False)  # view of the bucket's `gradients`, shaped as the parameter
    used: bool = False  # in this step, on this rank


@dataclass(eq=False)
class Bucket:
    """Neighbouring parameters of one dtype and device, added up and sent together."""

    slots: list[Slot]
    sums: torch.Tensor  # 1D, of the dtype that gradients are added in; ends in flags where `flags` is not empty
    gradients: torch.Tensor  # 1D, of the parameters' dtype; the same memory as `sums` unless that is wider
    flags: torch.Tensor  # 1D view of the end of `sums`
    waiting: int = 0  # slots whose last gradient of this step is still to come
    pending: Pending | None = None


class GradientSum:
    """Adds the gradients of `model` over the microbatches of a step and over the ranks of `group`.

    One step is: `begin`, then for each microbatch its backward with `last` set before the last one (a rank
    without microbatches sets it at once), then `finish`. In between the hooks on the parameters do the work.
    """

    def __init__(self, model: nn.Module, *, group: Any, wide: bool) -> None:
        self._group = group
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise UserError("training this model", "none of its parameters requires a gradient", "unfreeze some")
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self.buckets = fill_buckets(named, wide=wide)
        self._slots = [slot for bucket in self.buckets for slot in bucket.slots]  # by number
        self._last = False
        self._sent = 0
        self._handles = [
            slot.parameter.register_post_accumulate_grad_hook(self._hook(bucket, slot))
            for bucket in self.buckets
            for slot in bucket.slots
        ]

    def begin(self) -> None:
        """Forgets the gradients of the step before."""
        self._last, self._sent = False, 0
        for bucket in self.buckets:
            bucket.pending = None
        for slot in self._slots:
            slot.used, slot.parameter.grad = False, None

    def expect_last(self) -> None:
        """The next backward is this rank's last of the step: from now on full buckets are sent."""
        self._last = True
        for bucket in self.buckets:
            bucket.waiting = len(bucket.slots)

    def finish(self, divisor: float) -> None:
        """Waits for the sums and leaves sum / `divisor` in every used parameter's `grad`, the same on all ranks."""
        self._refuse_thawed()
        if not self._last:
            self.expect_last()
        self._send_until(len(self.buckets))
        for bucket in self.buckets:
            assert bucket.pending is not None
            bucket.pending.wait()
        used = self.buckets[-1].flags.tolist()
        for bucket in self.buckets:
            torch.div(bucket.sums[: bucket.gradients.numel()], divisor, out=bucket.gradients)
            for slot in bucket.slots:
                slot.parameter.grad = slot.gradient if used[slot.number] else None

    def norm(self) -> torch.Tensor:
        """Norm of all gradients together, a scalar in float64; parameters without gradient count nothing."""
        norms = [torch.linalg.vector_norm(bucket.gradients).double() for bucket in self.buckets]
        return torch.linalg.vector_norm(torch.stack(norms))

    def scale(self, factor: float) -> None:
        """Multiplies every gradient by `factor`."""
        for bucket in self.buckets:
            bucket.gradients.mul_(factor)

    def close(self) -> None:
        """Takes the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, bucket: Bucket, slot: Slot) -> Callable[[torch.Tensor], None]:
        def fold(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None  # autograd calls the hook with the gradient in place
            self._fold(bucket, slot, gradient)
            parameter.grad = None

        return fold

    def _fold(self, bucket: Bucket, slot: Slot, gradient: torch.Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise RunError(f"gradient of {slot.name}", f"its layout is {gradient.layout}", "use dense gradients")
        if bucket.pending is not None:
            raise RunError(
                f"gradient of {slot.name}",
                "it arrived a second time within one backward",
                "checkpoint with use_reentrant=False, and leave calling backward to evenly",
            )
        if slot.used:
            slot.sum.add_(gradient)
        else:
            slot.sum.copy_(gradient)
            slot.used = True
        if self._last:
            bucket.waiting -= 1
            if bucket.waiting == 0:
                self._send_full()

    def _send_full(self) -> None:
        """Sends buckets while the next in order is full; the last waits for `finish`, which knows all flags."""
        ready = self._sent
        while ready < len(self.buckets) - 1 and self.buckets[ready].waiting <= 0:
            ready += 1
        self._send_until(ready)

    def _send_until(self, end: int) -> None:
        for bucket in self.buckets[self._sent : end]:
            for slot in bucket.slots:
                if not slot.used:
                    slot.sum.zero_()
            if len(bucket.flags):
                bucket.flags.copy_(torch.tensor([float(slot.used) for slot in self._slots]))
            bucket.pending = sum_later(bucket.sums, self._group)
        self._sent = end

    def _refuse_thawed(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad or parameter.grad is not None:
                raise RunError(
                    f"parameter {name} was frozen when the run started",
                    "it now requires a gradient",
                    "unfreeze it in the job's model; to change it midway, start a second run from a checkpoint",
                )


def fill_buckets(named: Iterable[tuple[str, nn.Parameter]], *, wide: bool) -> list[Bucket]:
    """Buckets for `named` parameters in the order in which a backward finishes them; flags end the last one."""
    groups: list[list[tuple[str, nn.Parameter]]] = []
    room, kind = 0, None
    for name, parameter in reversed(list(named)):
        size = parameter.numel() * parameter.element_size()
        if kind != (parameter.dtype, parameter.device) or (room < size and groups[-1]):
            room = BUCKET_BYTES if groups else FIRST_BUCKET_BYTES
            kind = (parameter.dtype, parameter.device)
            groups.append([])
        groups[-1].append((name, parameter))
        room -= size
    total = sum(map(len, groups))
    buckets: list[Bucket] = []
    number = 0
    for group in groups:
        flags = total if group is groups[-1] else 0
        buckets.append(_bucket(group, first_number=number, flags=flags, wide=wide))
        number += len(group)
    return buckets


def _bucket(group: list[tuple[str, nn.Parameter]], *, first_number: int, flags: int, wide: bool) -> Bucket:
    dtype, device = group[0][1].dtype, group[0][1].device
    length = sum(p.numel() for _, p in group)
    widened = wide and dtype is not torch.float64
    sums = torch.zeros(length + flags, dtype=torch.float64 if widened else dtype, device=device)
    gradients = torch.zeros(length, dtype=dtype, device=device) if widened else sums[:length]
    slots: list[Slot] = []
    start = 0
    for offset, (name, parameter) in enumerate(group):
        slot = Slot(name, parameter, start, first_number + offset)
        end = start + parameter.numel()
        slot.sum = sums[start:end].view(parameter.shape)
        slot.gradient = gradients[start:end].view(parameter.shape)
        slots.append(slot)
        start = end
    return Bucket(slots, sums, gradients, sums[length:])
