"""The data axis with full gradients on every rank: microbatch gradients are accumulated in buckets, and the buckets
are all-reduced once per step, while the last backward is still running.

Vocabulary. A *slot* is a parameter's place in a *bucket*, one flat tensor. A gradient is *accumulated* into its slot as
soon as autograd has finished it, and freed. Buckets are filled roughly in the order in which a backward finishes
parameters (the reverse of their definition) and are *sent* strictly by index, so that all ranks agree on the order
of collectives whatever their own order of events. A bucket is summed over its *group*: the data axis, or fewer ranks
for parameters that not all of those replicate. The last bucket of a group is always one of float64 and ends in the
*tail*: first one *flag* per parameter of the group, which says how many ranks used it in this step, since a parameter
that no rank used keeps `grad=None` (an optimizer does more with a gradient of zeros than with none: weight decay,
momentum); then, in the very last, numbers of the caller's, which so need no collective of their own.

Exactness. With `accumulate_float64` buckets float32 gradients are added in float64. A sum of float32 numbers whose
magnitudes lie within a factor of 2**28 of each other has no rounding at all in float64, in any order, and what rounding
is left beyond that is 2**29 times finer than the float32 number it is rounded to: the result has the same bits
whoever added what.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import nn

from evenly.comm.collectives import all_reduce
from evenly.comm.groups import Group
from evenly.comm.transport import Pending, add
from evenly.errors import RunError, UserError
from evenly.parallel.core.memory import MemoryCounter
from evenly.parallel.data.grouping import bucket_members, needs_tail_bucket

SQUARED_AT_ONCE = 1 << 16  # elements per chunk of a sum of squares; a chunk stays in a core's cache


class Gradients(ABC):
    """Adds the gradients of a model over the microbatches of a step and over ranks.

    One step is: `begin`; for each microbatch its backward and `finish_backward`, with `expect_last` before the last;
    `start_reduce`; `finish_reduce`; `norm`; `divide` and `scale`; the optimizer's step over `named_gradients`;
    `all_gather_parameters`.

    counting: False while the backward of a filler microbatch runs, whose gradients must not count.
    """

    counting = True

    @abstractmethod
    def begin(self, *, numbers: int = 0, rounds: int = 1) -> None:
        """Begins a step: drops the last gradients.

        numbers: length of what `start_reduce` will be given, on every rank. rounds: the most microbatches of any rank.
        """

    def survey(self, forward: Callable[[], object]) -> None:  # noqa: B027
        """Called before the forward of each microbatch with what runs it: the first may be run to learn from it."""

    def gather(self) -> None:  # noqa: B027
        """Called before an evaluation."""

    @abstractmethod
    def expect_last(self) -> None:
        """Called before this rank's last backward of the step."""

    def finish_backward(self) -> None:  # noqa: B027
        """Called after a microbatch's backward, also where it had none to run."""

    @abstractmethod
    def start_reduce(self, numbers: Sequence[float] | torch.Tensor = ()) -> None:
        """Begins to reduce what the last backward has not yet sent; `numbers` (float64) are summed with it."""

    @abstractmethod
    def finish_reduce(self) -> list[float]:
        """Waits for the reduction; returns the sums of `numbers`.

        The gradient of every parameter that any rank used is then the sum over ranks; all others are None.
        """

    @abstractmethod
    def used(self) -> set[str]:
        """Names of the parameters that got a gradient on this rank in this step."""

    @abstractmethod
    def mark_used(self, names: Container[str]) -> None:
        """Counts `names` as used, with zeros as their gradient here: other ranks that hold them have used them."""

    @abstractmethod
    def collect(self) -> None:
        """Accumulates gradients that a backward wrote to `grad` without calling autograd's hooks."""

    @abstractmethod
    def norm(self) -> torch.Tensor:
        """Norm of all reduced gradients, before `divide`: a scalar, the same on all ranks.

        Computed in float64, so that any order of summation gives the same when rounded to float32.
        """

    @abstractmethod
    def divide(self, divisor: float) -> None:
        """Divides every gradient by `divisor`."""

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Multiplies every gradient by `factor`."""

    @abstractmethod
    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """(name of the parameter, this rank's gradient or shard of it) for each parameter."""

    def all_gather_parameters(self) -> None:  # noqa: B027
        """Called after an update: sends the updated shards to the ranks that need them."""

    def reshard(self) -> None:  # noqa: B027
        """Called after an evaluation: frees gathered parameters that a step expects to be sharded."""

    @abstractmethod
    def track(self, counter: MemoryCounter, number: int = 0) -> None:
        """Lets `counter` count the memory of gradients and their sums as that of device `number`."""

    @abstractmethod
    def close(self) -> None:
        """Removes the hooks from the parameters."""


@dataclass(eq=False)
class Slot:
    """One parameter's place in a bucket."""

    name: str
    parameter: nn.Parameter
    sum: torch.Tensor = field(init=False)  # view of the bucket's `sums`, shaped as the parameter
    gradient: torch.Tensor = field(init=False)  # view of the bucket's `gradients`, shaped as the parameter
    used: bool = False  # in this step, on this rank


class Bucket:
    """Neighbouring parameters of one dtype and device, added up and summed over the ranks of `group` together.

    sums:      1D, of the dtype that gradients are added in.
    tail:      what numbers lie behind the sums, 1D; `sent` is both.
    gradients: 1D, of the parameters' dtype; the same memory as `sums` where the dtypes are the same.
    waiting:   slots whose last gradient of this step is still to come.
    """

    def __init__(
        self, slots: list[Slot], group: Group, *, dtype: torch.dtype, sum_dtype: torch.dtype, device: torch.device
    ) -> None:
        self.slots, self.group, self.device = slots, group, device
        self.dtype, self.sum_dtype = dtype, sum_dtype
        self.waiting = 0
        self.pending: Pending[torch.Tensor] | None = None
        self.label = f"gradient of {slots[0].name} to {slots[-1].name}" if slots else ""
        self.length = sum(slot.parameter.numel() for slot in slots)
        self._allocate(tail=0)

    def resize_tail(self, tail: int) -> None:
        """Resizes the tail to `tail` numbers; the sums are lost."""
        if self.length + tail > self._buffer.numel():
            self._allocate(tail=2 * tail)
        if self.tail.numel() != tail:
            self.sent = self._buffer[: self.length + tail]
            self.tail = self.sent[self.length :]

    def _allocate(self, *, tail: int) -> None:
        self._buffer = torch.zeros(self.length + tail, dtype=self.sum_dtype, device=self.device)
        self.sums = self.sent = self._buffer[: self.length]
        self.tail = self._buffer[self.length : self.length]
        same = self.sum_dtype is self.dtype
        self.gradients = self.sums if same else torch.zeros(self.length, dtype=self.dtype, device=self.device)
        start = 0
        for slot in self.slots:
            end = start + slot.parameter.numel()
            slot.sum = self.sums[start:end].view(slot.parameter.shape)
            slot.gradient = self.gradients[start:end].view(slot.parameter.shape)
            start = end


class GradientSum(Gradients):
    """Adds the gradients of `model` over the microbatches of a step and over the ranks of `group`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        group: Group,
        accumulate_float64: bool,
        ownership: Ownership | None = None,
        groups: Mapping[str, Group] | None = None,
    ) -> None:
        """ownership: what this rank has of the model, where it is not all.

        groups: by name, of the parameters that not all ranks of `group` replicate, the ranks that do.
        """
        self._ownership = ownership
        named, self._frozen = trainable(model, required=ownership is None or ownership.pipeline_group is None)
        by_group: dict[Group, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in named:
            by_group.setdefault((groups or {}).get(name, group), []).append((name, parameter))
        by_group[group] = by_group.pop(group, [])  # the last, whose tail carries the caller's numbers
        filled = [fill_buckets(some, one, accumulate_float64=accumulate_float64) for one, some in by_group.items()]
        self.buckets = [*chain.from_iterable(buckets[:-1] for buckets in filled), *(buckets[-1] for buckets in filled)]
        self._tails = [(buckets[-1], [slot for bucket in buckets for slot in bucket.slots]) for buckets in filled]
        self._slots = [slot for bucket in self.buckets for slot in bucket.slots]
        self._last = False
        self._sent = 0
        self._handles = [
            slot.parameter.register_post_accumulate_grad_hook(self._hook(bucket, slot))
            for bucket in self.buckets
            for slot in bucket.slots
        ]

    def begin(self, *, numbers: int = 0, rounds: int = 1) -> None:
        self._last, self._sent = False, 0
        for bucket in self.buckets:
            bucket.pending = None
        for slot in self._slots:
            slot.used, slot.parameter.grad = False, None
        for bucket, slots in self._tails:
            bucket.resize_tail(len(slots) + (numbers if bucket is self.buckets[-1] else 0))

    def expect_last(self) -> None:
        """Begins to send buckets as they fill up."""
        self._last = True
        for bucket in self.buckets:
            bucket.waiting = len(bucket.slots)

    def start_reduce(self, numbers: Sequence[float] | torch.Tensor = ()) -> None:
        refuse_unfrozen(self._frozen)
        if not self._last:  # this rank has no microbatches
            self.expect_last()
        self._send_until(len(self.buckets) - len(self._tails))
        for bucket, slots in self._tails:
            bucket.tail[: len(slots)].copy_(torch.tensor([float(slot.used) for slot in slots]))
        tail = self.buckets[-1].tail
        tail[len(self._tails[-1][1]) :].copy_(torch.as_tensor(numbers, dtype=torch.float64))
        self._send_until(len(self.buckets))

    def merge(self, other: GradientSum) -> None:
        """Adds the sums of `other`, of a replica of the model; before `start_reduce`."""
        for mine, theirs in zip(self._slots, other._slots, strict=True):
            if not theirs.used:
                continue
            added = theirs.sum.to(mine.sum.device, copy=True)
            if mine.used:
                mine.sum.add_(added)
            else:
                mine.sum.copy_(added)
                mine.used = True

    def finish_reduce(self) -> list[float]:
        for bucket in self.buckets:
            assert bucket.pending is not None
            bucket.pending.wait()
        for bucket in self.buckets:
            if bucket.sum_dtype is not bucket.dtype:
                bucket.gradients.copy_(bucket.sums)
        for bucket, slots in self._tails:
            for slot, users in zip(slots, bucket.tail[: len(slots)].tolist(), strict=True):
                slot.parameter.grad = slot.gradient if users > 0 else None
        return self.buckets[-1].tail[len(self._tails[-1][1]) :].tolist()

    def used(self) -> set[str]:
        return {slot.name for slot in self._slots if slot.used}

    def mark_used(self, names: Container[str]) -> None:
        for slot in self._slots:
            if slot.name in names and not slot.used:
                slot.sum.zero_()
                slot.used = True

    def collect(self) -> None:
        for bucket in self.buckets:
            for slot in bucket.slots:
                if slot.parameter.grad is not None:
                    self._hook(bucket, slot)(slot.parameter)

    def norm(self) -> torch.Tensor:
        if self._ownership is not None:
            return self._ownership.norm(self.named_gradients())
        return sum_of_squares(bucket.gradients for bucket in self.buckets).sqrt()

    def divide(self, divisor: float) -> None:
        for bucket in self.buckets:
            bucket.gradients.div_(divisor)

    def scale(self, factor: float) -> None:
        for bucket in self.buckets:
            bucket.gradients.mul_(factor)

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        return ((slot.name, slot.parameter.grad) for slot in self._slots)

    def track(self, counter: MemoryCounter, number: int = 0) -> None:
        for bucket in self.buckets:
            counter.track([bucket.gradients], "gradients", number)
            if bucket.sum_dtype is not bucket.dtype:
                counter.track([bucket.sums], "sums", number)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, bucket: Bucket, slot: Slot) -> Callable[[torch.Tensor], None]:
        def accumulate(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None  # autograd calls the hook with the gradient in place
            self._accumulate(bucket, slot, gradient)
            parameter.grad = None

        return accumulate

    def _accumulate(self, bucket: Bucket, slot: Slot, gradient: torch.Tensor) -> None:
        check_gradient(slot.name, gradient, sent=bucket.pending is not None)
        if slot.used:
            add(slot.sum, gradient)
        else:
            slot.sum.copy_(gradient)
            slot.used = True
        if self._last:
            bucket.waiting -= 1
            if bucket.waiting == 0:
                self._send_full()

    def _send_full(self) -> None:
        """Sends buckets while the next in order is full; those with a tail wait for `start_reduce`, which fills it."""
        ready = self._sent
        while ready < len(self.buckets) - len(self._tails) and self.buckets[ready].waiting <= 0:
            ready += 1
        self._send_until(ready)

    def _send_until(self, end: int) -> None:
        for bucket in self.buckets[self._sent : end]:
            for slot in bucket.slots:
                if not slot.used:
                    slot.sum.zero_()
            bucket.pending = all_reduce.begin(bucket.sent, bucket.group, label=bucket.label)
        self._sent = end


def trainable(
    model: nn.Module, *, required: bool = True
) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    """The parameters of `model` by name: those that require gradients, and the others.

    required: whether to raise `UserError` if none requires gradients.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named and required:
        raise UserError("training this model", "none of its parameters requires a gradient", "unfreeze some")
    return named, [(name, p) for name, p in model.named_parameters() if not p.requires_grad]


def refuse_unfrozen(frozen: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raises `RunError` where one of the `frozen` parameters now requires a gradient."""
    for name, parameter in frozen:
        if parameter.requires_grad or parameter.grad is not None:
            raise RunError(
                f"parameter {name} was frozen when the run started",
                "it now requires a gradient",
                "unfreeze it in the job's model; to change it midway, start a second run from a checkpoint",
            )


def begin_numbers(
    mine: Iterable[float], numbers: Sequence[float] | torch.Tensor, group: Group, last: torch.Tensor | None = None
) -> Pending[torch.Tensor]:
    """Begins to all-reduce [*mine, *numbers, last] over `group`; 1D, in float64."""
    if last is None and not isinstance(numbers, torch.Tensor):
        values = torch.tensor([*mine, *numbers], dtype=torch.float64, device=group.device)
    else:
        first, then = (torch.as_tensor(one, dtype=torch.float64) for one in ([*mine], numbers))
        pieces = (first, then) if last is None else (first, then, last.reshape(1))
        values = torch.cat([piece.to(group.device) for piece in pieces])
    return all_reduce.begin(values, group, label="losses and weights")


def norm_of_shards(gradients: Iterable[torch.Tensor], group: Group) -> torch.Tensor:
    """Norm of the `gradients` of all ranks of `group`, each with its own shards; a scalar in float64."""
    squares = sum_of_squares(gradients).to(group.device)
    return all_reduce(squares, group, label="norm of the gradient").sqrt()


@dataclass(frozen=True)
class Ownership:
    """Which of a model's parameters this rank has, and whole or in part.

    split_names, tensor_group: parameters that are split over `tensor_group`; it replicates all others.
    pipeline_group:    ranks that hold the other stages' parameters; None without pipeline.
    counted_elsewhere: tied parameters whose gradient another rank of `pipeline_group` counts in the norm.
    """

    split_names: Container[str] = ()
    tensor_group: Group | None = None
    pipeline_group: Group | None = None
    counted_elsewhere: Container[str] = ()

    def norm(
        self, gradients: Iterable[tuple[str, torch.Tensor | None]], shard_group: Group | None = None
    ) -> torch.Tensor:
        """Norm of the gradients of the full parameters; a scalar in float64.

        gradients: this rank's, by name. shard_group: the ranks that they are sharded over, if they are.
        """
        found = [(name, g) for name, g in gradients if g is not None and name not in self.counted_elsewhere]
        sums = [sum_of_squares(g for name, g in found if (name in self.split_names) is part) for part in (True, False)]
        squares = torch.stack([one.to(sums[0].device) for one in sums])
        if shard_group is not None:
            squares = all_reduce(squares.to(shard_group.device), shard_group, label="norm of the gradient")
        if (group := self.tensor_group) is not None:
            squares = squares.to(group.device, copy=True)
            if group.position > 0:  # replicated gradients count once
                squares[1] = 0.0
            squares = all_reduce(squares, group, label="norm of the gradient")
        total = squares.sum()
        if (group := self.pipeline_group) is not None:
            total = all_reduce(total.to(group.device, copy=True), group, label="norm of the gradient")
        return total.sqrt()


def sum_of_squares(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum over all elements of all tensors, a scalar in float64."""
    total: torch.Tensor | None = None
    for part in chain.from_iterable(map(_chunks, tensors)):
        if part.is_cuda:
            square = torch.linalg.vector_norm(part, dtype=torch.float64) ** 2
        else:
            doubles = part.double()  # vector_norm converts element by element, four times as slow
            square = torch.dot(doubles, doubles)
        total = square if total is None else total.to(square.device).add_(square)
    return torch.zeros((), dtype=torch.float64) if total is None else total


def _chunks(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    flat = tensor.flatten()
    return (flat,) if flat.is_cuda or flat.numel() <= SQUARED_AT_ONCE else flat.split(SQUARED_AT_ONCE)


def check_gradient(name: str, gradient: torch.Tensor, *, sent: bool) -> None:
    """Raises `RunError` for a gradient that cannot be accumulated; sent: whether its bucket is already sent."""
    if gradient.layout is not torch.strided:
        raise RunError(f"gradient of {name}", f"its layout is {gradient.layout}", "use dense gradients")
    if sent:
        raise RunError(
            f"gradient of {name}",
            "it arrived a second time within one backward",
            "checkpoint with use_reentrant=False, and leave calling backward to evenly",
        )


def in_backward_order(named: Iterable[tuple[str, nn.Parameter]]) -> list[list[tuple[str, nn.Parameter]]]:
    """The parameters of each bucket, of one dtype and device, in the order in which a backward finishes them."""
    found = list(named)
    buckets = bucket_members(((p.dtype, p.device), p.numel() * p.element_size()) for _, p in found)
    return [[found[number] for number in bucket] for bucket in buckets]


def fill_buckets(named: Iterable[tuple[str, nn.Parameter]], group: Group, *, accumulate_float64: bool) -> list[Bucket]:
    """Buckets over `group` for `named` parameters in the order in which a backward finishes them; the last is of
    float64.
    """
    filled = [[Slot(name, p) for name, p in some] for some in in_backward_order(named)] or [[]]
    last = filled[-1]
    widened = accumulate_float64 or not last or last[0].parameter.dtype is torch.float64
    device = last[0].parameter.device if last else group.device
    if needs_tail_bucket(sum(slot.parameter.nbytes for slot in last), widened=widened):
        filled.append([])
    return [
        _bucket(slots, group, accumulate_float64=accumulate_float64 or slots is filled[-1], device=device)
        for slots in filled
    ]


def _bucket(slots: list[Slot], group: Group, *, accumulate_float64: bool, device: torch.device) -> Bucket:
    """A bucket of `slots`, which share their dtype and device; an empty one is on `device`."""
    dtype, device = (slots[0].parameter.dtype, slots[0].parameter.device) if slots else (torch.float64, device)
    return Bucket(slots, group, dtype=dtype, sum_dtype=torch.float64 if accumulate_float64 else dtype, device=device)
