"""Buckets of gradients that are reduced together; see `gradients` for the vocabulary.

A `Bucket` is added up in the parameters' type, as autograd does. An `ExactBucket` adds up exactly, over microbatches
and over ranks, which no all-reduce does: each rank sums one *region* over the ranks, from their parts of it, rounds it,
and sends it to all. That moves 12 bytes an element where an all-reduce of float64 moves 16. Where no rank has more than
one microbatch, parts are gradients, sent in their own type: 8 bytes of float32. A bucket with a tail is small: there
every rank gets all and sums all, which takes one collective.

What a rank's part is beyond that (the low terms of `ExactSum`) is not sent along, since there hardly ever is any. The
tail tells all ranks whether there is, and then they exchange it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from evenly.comm.collectives import all_gather, all_reduce, exchange
from evenly.comm.exact_reduce import pairs_of_others
from evenly.comm.exact_sum import ExactSum
from evenly.comm.groups import Group
from evenly.comm.transport import Pending
from evenly.parallel.data.grouping import bucket_members, needs_tail_bucket
from evenly.torch_private import version

SMALL = 1 << 14  # elements; to zero more of them, and to read the zeros, takes longer than to call a hook


@dataclass(eq=False)
class Slot:
    """One parameter's place in a bucket."""

    name: str
    parameter: nn.Parameter
    start: int = field(init=False)  # in the bucket, in elements
    sum: torch.Tensor = field(init=False)  # view of the bucket's `sums`, shaped as the parameter
    gradient: torch.Tensor = field(init=False)  # view of the bucket's `gradients`, shaped as the parameter
    used: bool = False  # in this step, on this rank
    left: bool = False  # to autograd, as the parameter's `grad`
    lies_alike: bool = field(init=False)  # in memory as the parameter, as autograd wants it of a gradient
    small: bool = False  # so that autograd may add the first gradient of a step by itself, to zeros
    version: int = 0  # of `gradient`, before anything was added in this step


class Bucket:
    """Neighbouring parameters of one dtype and device, added up and summed over the ranks of `group` together.

    sums:      1D, of the dtype that is summed over ranks.
    tail:      what numbers lie behind the sums, 1D; `sent` is both.
    gradients: 1D, of the parameters' dtype; the same memory as `sums` where the dtypes are the same.
    waiting:   slots whose last gradient of this step is still to come.
    sending:   whether this step's sums have been sent.
    once:      whether nothing has to be added up before it is sent; then `gradients` is sent, and not `sums`.
    leaves_sums: whether autograd may add to a slot by itself, as the parameter's `grad`.
    """

    once = False

    def __init__(
        self, slots: list[Slot], group: Group, *, dtype: torch.dtype, sum_dtype: torch.dtype, device: torch.device
    ) -> None:
        self.slots, self.group, self.device = slots, group, device
        self.dtype, self.sum_dtype = dtype, sum_dtype
        self.waiting = 0
        self.sending = self.leaves_sums = False
        self.label = f"gradient of {slots[0].name} to {slots[-1].name}" if slots else ""
        self.length = self._padded(sum(slot.parameter.numel() for slot in slots))
        self._allocate(tail=0)

    def resize_tail(self, tail: int) -> None:
        """Resizes the tail to `tail` numbers; the sums are lost."""
        if self.length + tail > self._buffer.numel():
            self._allocate(tail=2 * tail)
        if self.tail.numel() != tail:
            self.sent = self._buffer[: self.length + tail]
            self.tail = self.sent[self.length :]

    def _padded(self, length: int) -> int:
        return length

    def _allocate(self, *, tail: int) -> None:
        self._buffer = torch.zeros(self.length + tail, dtype=self.sum_dtype, device=self.device)
        self.sums = self.sent = self._buffer[: self.length]
        self.tail = self._buffer[self.length : self.length]
        self.gradients = self.sums if self.sum_dtype is self.dtype else self._zeros(tail)
        start = 0
        for slot in self.slots:
            end = start + slot.parameter.numel()
            slot.start = start
            slot.sum = self.sums[start:end].view(slot.parameter.shape)
            # By `data`, so that it has a version of its own.
            slot.gradient = self.gradients[start:end].view(slot.parameter.shape).data
            slot.lies_alike = slot.gradient.stride() == slot.parameter.stride()
            start = end

    def _zeros(self, tail: int) -> torch.Tensor:
        """Memory of `gradients`."""
        return torch.zeros(self.length, dtype=self.dtype, device=self.device)

    # ------------------------------------------------------------------------------------------- a step
    def begin(self, *, once: bool = False) -> None:
        """Forgets the last step; once: whether every parameter gets at most one gradient on each rank in this one."""
        self.sending, self.leaves_sums = False, not once or self.group.size == 1

    def begin_small(self, dropped: Container[str]) -> None:
        """Leaves zeros to autograd, as the gradients of what is small, but of the names `dropped`."""
        left = [slot for slot in self.slots if slot.small and slot.name not in dropped] if self.leaves_sums else []
        if len(left) == len(self.slots):
            self.gradients.zero_()
        for slot in left:
            if len(left) < len(self.slots):
                slot.gradient.zero_()
            slot.left, slot.parameter.grad, slot.version = True, slot.gradient, version(slot.gradient)

    def part_of(self, slot: Slot) -> torch.Tensor:
        """Where this rank's gradients of `slot` are added up before `send`."""
        return slot.gradient

    def accumulate(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Adds `gradient`, shaped as the parameter, to this rank's sum."""
        if slot.used:
            self._add(slot, gradient)
        else:
            self.part_of(slot).copy_(gradient)
            slot.used = True

    def _add(self, slot: Slot, gradient: torch.Tensor) -> None:
        slot.gradient.add_(gradient)

    def send(self) -> None:
        """Begins to sum over ranks; zeros for what this rank did not use."""
        for slot in self.slots:
            if not slot.used:
                self.part_of(slot).zero_()
        self.sending = True
        self._begin_sum()

    def _begin_sum(self) -> None:
        if self.sum_dtype is not self.dtype:
            self.sums.copy_(self.gradients)
        if self.group.size > 1:
            self._pending = all_reduce.begin(self.sent, self.group, label=self.label)

    def receive(self) -> None:
        """Waits for what `send` began: then `tail` is summed over ranks."""
        if self.group.size > 1:
            self._pending.wait()

    def begin_gather(self) -> None:
        """Turns the sums into gradients."""
        if self.sum_dtype is not self.dtype:
            self.gradients.copy_(self.sums)

    def finish(self) -> None:
        """Waits until `gradients` are there."""


class ExactBucket(Bucket):
    """Of float64, whose sums are rounded once: the same bits, whatever the order and whatever the rank.

    exact: the sums over microbatches on this rank; from `receive` on, within the region, over ranks.
    """

    def _padded(self, length: int) -> int:
        multiple = 4 * self.group.size  # a tail of float64 can follow, whatever the type of the part
        return -(-length // multiple) * multiple

    def _allocate(self, *, tail: int) -> None:
        super()._allocate(tail=tail)
        self.exact = ExactSum(self.sums)
        self._rows: Pending[torch.Tensor] | None = None

    def _zeros(self, tail: int) -> torch.Tensor:
        behind = tail * self.sum_dtype.itemsize if self.group.size > 1 else 0  # the tail is sent with them
        self._bytes = torch.zeros(self.length * self.dtype.itemsize + behind, dtype=torch.uint8, device=self.device)
        return self._bytes[: self.length * self.dtype.itemsize].view(self.dtype)

    def begin(self, *, once: bool = False) -> None:
        super().begin()
        self.once, self.leaves_sums = once, False
        self.exact.clear()
        self._pairs: torch.Tensor | None = None

    def part_of(self, slot: Slot) -> torch.Tensor:
        return slot.gradient if self.once else slot.sum

    def _add(self, slot: Slot, gradient: torch.Tensor) -> None:
        assert not self.once
        self.exact.add(gradient.reshape(-1), slot.start)

    def low_pairs(self) -> torch.Tensor:
        """The low terms of this rank's part, as `ExactSum.pairs`; asked for before other ranks' parts are added."""
        if self._pairs is None:
            self._pairs = self.exact.pairs()
        return self._pairs

    def _begin_sum(self) -> None:
        self.low_pairs()
        ranks, position = self.group.size, self.group.position
        self._gathering: Pending[torch.Tensor] | None = None
        self._part = self.length // ranks if not self.tail.numel() else self.length
        self._first = position * self._part if self._part < self.length else 0
        if ranks == 1:
            return
        if self.tail.numel():
            self._rows = all_gather.begin(self._message().view(1, -1), self.group, sizes=[1] * ranks, label=self.label)
        else:
            sent = self.gradients if self.once else self.sums
            self._rows = exchange.begin(sent.view(ranks, -1), self.group, label=self.label)

    def _message(self) -> torch.Tensor:
        if not self.once or self.sum_dtype is self.dtype:
            return self.sent
        end = self.gradients.nbytes + self.tail.nbytes
        self._bytes[self.gradients.nbytes : end].view(self.tail.dtype).copy_(self.tail)
        return self._bytes[:end]

    def receive(self) -> None:
        """Waits for what `send` began, and adds it: then `tail` is summed over ranks."""
        if self._rows is None:
            return
        rows, self._rows = self._rows.wait(), None
        dtype = self.dtype if self.once else self.sum_dtype
        parts = rows.view(torch.uint8)[:, : self._part * dtype.itemsize].view(dtype)
        if self._few_numbers:
            torch.add(parts[0], parts[1], out=self._region())
        else:
            self.exact.set(parts, self._first)
        if self.tail.numel():
            torch.sum(rows.view(torch.uint8)[:, parts[0].nbytes :].view(self.tail.dtype), 0, out=self.tail)

    @property
    def _few_numbers(self) -> bool:
        return self.once and self.group.size <= 2

    def _region(self) -> torch.Tensor:
        return self.gradients[self._first : self._first + self._part]

    def add_pairs(self, pairs: torch.Tensor) -> None:
        """Adds low terms of other ranks, as `ExactSum.pairs` gives them, within the region."""
        self.exact.add_pairs(pairs, self._first, self._first + self._part)

    def begin_gather(self) -> None:
        own = self._region()
        if self._few_numbers:
            own.add_(0.0)  # -0.0 becomes 0.0
        else:
            self.exact.round_into(own, self._first)
        if self._part < self.length:
            self._gathering = all_gather.begin(
                own, self.group, sizes=[self._part] * self.group.size, label=self.label, into=self.gradients
            )

    def finish(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()


def share_low_terms(buckets: Sequence[ExactBucket], group: Group) -> None:
    """Adds the low terms of each rank's parts of `buckets` to the sums of all ranks of `group`."""
    for bucket in buckets if group.size > 1 else ():
        bucket.add_pairs(pairs_of_others(bucket.low_pairs(), group))


def is_small(elements: int) -> bool:
    """Whether autograd may add the first gradient of a parameter of so many elements to zeros."""
    return elements <= SMALL


def find_small(slots: Iterable[Slot], model: nn.Module) -> None:
    """Finds out which `slots` of parameters of `model` are small; sparse gradients are not, which are refused."""
    sparse = {id(p) for one in model.modules() if getattr(one, "sparse", False) for p in one.parameters()}
    for slot in slots:
        slot.small = slot.lies_alike and is_small(slot.parameter.numel()) and id(slot.parameter) not in sparse


def has_changed(slot: Slot) -> bool:
    """Whether anything was added to the zeros of a small one in this step."""
    return version(slot.gradient) != slot.version


def in_backward_order(named: Iterable[tuple[str, nn.Parameter]]) -> list[list[tuple[str, nn.Parameter]]]:
    """The parameters of each bucket, of one dtype and device, in the order in which a backward finishes them."""
    found = list(named)
    buckets = bucket_members(((p.dtype, p.device), p.numel() * p.element_size()) for _, p in found)
    return [[found[number] for number in bucket] for bucket in buckets]


def fill_buckets(named: Iterable[tuple[str, nn.Parameter]], group: Group, *, accumulate_float64: bool) -> list[Bucket]:
    """Buckets over `group` for `named` parameters in the order in which a backward finishes them.

    Among several ranks there is one that is summed in float64 and comes last.
    """
    filled = [[Slot(name, p) for name, p in some] for some in in_backward_order(named)]
    if group.size == 1:
        return [_bucket(slots, group, exact=accumulate_float64, widened=False, device=group.device) for slots in filled]
    filled = filled or [[]]
    last = filled[-1]
    widened = not accumulate_float64 and (not last or last[0].parameter.dtype is torch.float64)
    device = last[0].parameter.device if last else group.device
    if needs_tail_bucket(sum(slot.parameter.nbytes for slot in last), widened=widened):
        filled.append([])
    return [
        _bucket(slots, group, exact=accumulate_float64, widened=slots is filled[-1], device=device) for slots in filled
    ]


def _bucket(slots: list[Slot], group: Group, *, exact: bool, widened: bool, device: torch.device) -> Bucket:
    """A bucket of `slots`, which share their dtype and device; an empty one is on `device`."""
    dtype, device = (slots[0].parameter.dtype, slots[0].parameter.device) if slots else (torch.float64, device)
    kind, sum_dtype = ExactBucket if exact else Bucket, torch.float64 if exact or widened else dtype
    return kind(slots, group, dtype=dtype, sum_dtype=sum_dtype, device=device)
