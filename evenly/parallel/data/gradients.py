"""The data axis with full gradients on every rank: microbatch gradients are accumulated in buckets, and the buckets
are all-reduced once per step, while the last backward is still running.

Vocabulary. A *slot* is a parameter's place in a *bucket*, one flat tensor. A gradient is *accumulated* into its slot as
soon as autograd has finished it, and freed; the slot is then the parameter's `grad`, to which autograd adds those of
further microbatches by itself, unless sums are exact. A *small* one begins a step as that, with zeros, so that no hook
is called for its first gradient either. Buckets are filled roughly in the order in which a backward finishes
parameters (the reverse of their definition) and are *sent* strictly by index, so that all ranks agree on the order of
collectives whatever their own order of events. A bucket is summed over its *group*: the data axis, or fewer
ranks for parameters that not all of those replicate. Of several ranks, the last bucket is one of float64 and ends in
the *tail*: first one *flag* per parameter of the group, which says how many ranks used it in this step, since a
parameter that no rank used keeps `grad=None` (an optimizer does more with a gradient of zeros than with none: weight
decay, momentum); then, in the very last, numbers of the caller's, which so need no collective of their own.

Exactness. With `accumulate_float64` sums are exact (`comm.exact_sum`), over microbatches and over ranks, and rounded
once: the same bits whoever added what, at any magnitude. Float64 alone would not do: a sum of float32 numbers may lie
next to a tie of float32, nearer than float64 can tell, and the order of additions then decides where it is rounded to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from evenly.comm.collectives import all_reduce
from evenly.comm.exact_reduce import exact_norm
from evenly.comm.groups import Group
from evenly.comm.host_numbers import on_device
from evenly.comm.transport import Pending
from evenly.errors import RunError, UserError
from evenly.parallel.core.memory import MemoryCounter
from evenly.parallel.data.buckets import (
    Bucket,
    ExactBucket,
    Slot,
    fill_buckets,
    find_small,
    has_changed,
    share_low_terms,
)
from evenly.parallel.data.gradient_hooks import GradientHook, check_dtype, check_gradient
from evenly.parallel.data.grouping import IN_FLIGHT
from evenly.parallel.data.last_outputs import LastOutputs
from evenly.parallel.data.ownership import Ownership
from evenly.parallel.data.squares import sum_of_squares
from evenly.torch_private import without_subclasses

# Of a norm, relative: a square goes through at most 2**17 additions, each off by 2**-53; the root halves that.
NORM_ERROR = 2.0**-36


class Gradients(ABC):
    """Adds the gradients of a model over the microbatches of a step and over ranks.

    One step is: `begin`; for each microbatch its backward and `finish_backward`, with `expect_last` before the last;
    `start_reduce`; `finish_reduce`; `norm`; `divide` and `scale`; the optimizer's step over `named_gradients`;
    `all_gather_parameters`.

    counting: False while the backward of a filler microbatch runs, whose gradients must not count. outputs: of the
    last forward, where all ranks have to run its backward. dropped: names of parameters that count as unused.
    """

    counting = True
    dropped: frozenset[str] = frozenset()
    outputs: LastOutputs | None = None
    unit_order = 0  # a hash of what was gathered since `forget_order`, in order

    def forget_order(self) -> None:
        """Begins a new order of units."""
        self.unit_order = 0

    def drop(self, names: frozenset[str]) -> None:
        """From the next step on, gradients of these parameters are dropped, as if they required none."""
        self.dropped = names

    @abstractmethod
    def begin(self, *, numbers: int = 0, rounds: int = 1) -> None:
        """Begins a step: drops the last gradients.

        numbers: length of what `start_reduce` will be given, on every rank. rounds: the most microbatches of any rank.
        """

    def survey(self, forward: Callable[[], object]) -> None:  # noqa: B027
        """Called before the first forward of a run with what runs one, on all ranks alike, to learn from it."""

    def gather(self) -> None:  # noqa: B027
        """Called before an evaluation."""

    @abstractmethod
    def expect_last(self) -> None:
        """Called before this rank's last backward of the step."""

    def zero(self) -> torch.Tensor | None:
        """A zero whose backward runs what all ranks have to run together; None where that is nothing, or not known."""
        return None if self.outputs is None else self.outputs.zero()

    def finish_backward(self) -> None:
        """Called after a microbatch's backward, or a part of it, also where it had none to run."""
        self.collect()
        self.forget_forward()

    def forget_forward(self) -> None:
        """Lets go of what the last forward has left for its backward."""
        if self.outputs is not None:
            self.outputs.clear()

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
    def add(self, earlier: Mapping[str, torch.Tensor]) -> None:
        """Adds what `named_gradients` had of earlier passes of the same step, by name; after `finish_reduce`."""

    @abstractmethod
    def norm(self) -> torch.Tensor:
        """Norm of all reduced gradients, before `divide`: a scalar, the same on all ranks.

        Added up in float64, in an order that depends on how gradients are cut: off by less than `NORM_ERROR`.
        """

    @abstractmethod
    def exact_norm(self) -> float:
        """The same whatever the order, rounded once; takes much longer. Where sums are exact."""

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
        self._splits = ownership is not None and ownership.tensor_group is not None
        self._pipelined = ownership is not None and ownership.pipeline_group is not None
        named, self._frozen = trainable(model, required=ownership is None or ownership.pipeline_group is None)
        by_group: dict[Group, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in named:
            by_group.setdefault((groups or {}).get(name, group), []).append((name, parameter))
        by_group[group] = by_group.pop(group, [])  # the last, whose tail carries the caller's numbers
        filled = {one: fill_buckets(some, one, accumulate_float64=accumulate_float64) for one, some in by_group.items()}
        slots = {one: [slot for bucket in buckets for slot in bucket.slots] for one, buckets in filled.items()}
        self._tails = [(buckets[-1], slots[one]) for one, buckets in filled.items() if one.size > 1]
        last = {bucket for bucket, _ in self._tails}
        self.buckets = [bucket for buckets in filled.values() for bucket in buckets if bucket not in last]
        self.buckets += [bucket for bucket, _ in self._tails]
        self._alone = [slot for one, found in slots.items() if one.size == 1 for slot in found]
        self._sums_numbers = group.size > 1
        self._slots = [slot for bucket in self.buckets for slot in bucket.slots]
        self._counts_all = ownership is not None and ownership.counts_all(slot.name for slot in self._slots)
        self._last, self._looked, self._sent = False, False, 0
        self._exact = accumulate_float64
        if not self._exact:
            find_small(self._slots, model)
        both = [(bucket, slot) for bucket in self.buckets for slot in bucket.slots]
        self._small = [(bucket, slot) for bucket, slot in both if slot.small]
        self._others = [(bucket, slot) for bucket, slot in both if not slot.small]
        self._hooks = {
            slot: GradientHook(slot.parameter, self._hook(bucket, slot))
            for bucket, slot in both
            if not slot.small or bucket.group.size > 1
        }  # the others' buckets are not sent as they fill up

    def begin(self, *, numbers: int = 0, rounds: int = 1) -> None:
        self._last, self._looked, self._sent = False, False, 0
        once = rounds == 1 and not self._pipelined  # a pipeline may run a microbatch's backward in several pieces
        for bucket, slots in self._tails:
            own = numbers if self._sums_numbers and bucket is self.buckets[-1] else 0
            bucket.resize_tail(len(slots) + self._exact + own)
        with without_subclasses():  # this rank's parts
            for slot in self._slots:
                slot.used, slot.left, slot.parameter.grad = False, False, None
            for bucket in self.buckets:
                bucket.begin(once=once)
                bucket.begin_small(self.dropped)
            for _, slot in self._small if self._hooks else ():
                if (hook := self._hooks.get(slot)) is not None:
                    (hook.pause if slot.left else hook.resume)()

    def expect_last(self) -> None:
        """Begins to send buckets as they fill up."""
        self._last = True
        for bucket in self.buckets:
            bucket.waiting = len(bucket.slots)
            for slot in bucket.slots if bucket.group.size > 1 else ():
                self._hooks[slot].resume()

    def start_reduce(self, numbers: Sequence[float] | torch.Tensor = ()) -> None:
        refuse_unfrozen(self._frozen)
        self._look_at_small()
        if not self._last:  # this rank has no microbatches
            self.expect_last()
        self._send_until(len(self.buckets) - len(self._tails))
        for bucket, slots in self._tails:
            flags = [float(slot.used) for slot in slots]
            low_terms = [float(self._has_low_terms(bucket.group))] if self._exact else []
            bucket.tail[: len(flags + low_terms)].copy_(on_device(flags + low_terms, bucket.device))
        self._given = numbers
        if self._sums_numbers:
            self._numbers().copy_(on_device(numbers, self.buckets[-1].device))
        self._send_until(len(self.buckets))

    def _numbers(self) -> torch.Tensor:
        bucket, slots = self._tails[-1]
        return bucket.tail[len(slots) + self._exact :]

    def _has_low_terms(self, group: Group) -> bool:
        return any(not bucket.once and len(bucket.low_pairs()) for bucket in self._exact_buckets(group))

    def _exact_buckets(self, group: Group) -> list[ExactBucket]:
        return [bucket for bucket in self.buckets if isinstance(bucket, ExactBucket) and bucket.group is group]

    def merge(self, other: GradientSum) -> None:
        """Adds the sums of `other`, of a replica of the model; before `start_reduce`."""
        self._look_at_small()
        other._look_at_small()
        for bucket, from_bucket in zip(self.buckets, other.buckets, strict=True):
            for mine, theirs in zip(bucket.slots, from_bucket.slots, strict=True):
                if theirs.used:
                    bucket.accumulate(mine, from_bucket.part_of(theirs).to(mine.sum.device, copy=True))
            if isinstance(bucket, ExactBucket) and isinstance(from_bucket, ExactBucket):
                bucket.exact.add_pairs(from_bucket.low_pairs().to(bucket.device))

    def finish_reduce(self) -> list[float]:
        for bucket in self.buckets:
            bucket.receive()
        for bucket, slots in self._tails:
            if self._exact and bucket.tail[len(slots)].item() > 0:
                share_low_terms(self._exact_buckets(bucket.group), bucket.group)
        for bucket in self.buckets:
            bucket.begin_gather()
        for bucket in self.buckets:
            bucket.finish()
        rest: list[float] = []
        with without_subclasses():
            for slot in self._alone:
                slot.parameter.grad = slot.gradient if slot.used else None
            for bucket, slots in self._tails:
                rest = bucket.tail.tolist()  # the caller's numbers too, at once: a host that asks a GPU waits for it
                for slot, users in zip(slots, rest, strict=False):
                    slot.parameter.grad = slot.gradient if users > 0 else None
                rest = rest[len(slots) + self._exact :]
        if self._sums_numbers:
            return rest
        return self._given.tolist() if isinstance(self._given, torch.Tensor) else [*self._given]

    def used(self) -> set[str]:
        self._look_at_small()
        return {slot.name for slot in self._slots if slot.used}

    def mark_used(self, names: Container[str]) -> None:
        for bucket in self.buckets:
            for slot in bucket.slots:
                if slot.name in names and not slot.used:
                    bucket.part_of(slot).zero_()
                    slot.used = True

    def collect(self) -> None:
        with without_subclasses():  # this rank's parts
            for bucket, slot in self._others:
                if (gradient := slot.parameter.grad) is not slot.gradient and gradient is not None:
                    self._take(bucket, slot, slot.parameter, leaves_sum=False)

    def _look_at_small(self) -> None:
        """Finds out, once a step, which small ones were used; accumulates what a backward has put in a sum's place."""
        if self._looked:
            return
        self._looked = True
        with without_subclasses():
            for bucket, slot in self._small:
                gradient = slot.parameter.grad
                if gradient is slot.gradient:
                    if has_changed(slot):
                        check_dtype(slot.name, slot.parameter.dtype, bucket.dtype)
                        slot.used = True
                elif gradient is not None:
                    slot.parameter.grad = None
                    self._add(bucket, slot, gradient, leaves_sum=False)

    def add(self, earlier: Mapping[str, torch.Tensor]) -> None:
        for slot in self._slots:
            if (gradient := earlier.get(slot.name)) is None:
                continue
            if slot.parameter.grad is None:
                slot.parameter.grad = slot.gradient.copy_(gradient)
            else:
                slot.gradient.add_(gradient)

    def norm(self) -> torch.Tensor:
        owned = self._ownership
        if owned is None:
            return sum_of_squares(self._in_buckets()).sqrt()
        return owned.norm((("", one) for one in self._in_buckets()) if self._counts_all else self.named_gradients())

    def exact_norm(self) -> float:
        return exact_norm(self._in_buckets(), None)

    def divide(self, divisor: float) -> None:
        for gradients in self._in_buckets():
            gradients.div_(divisor)

    def scale(self, factor: float) -> None:
        for gradients in self._in_buckets():
            gradients.mul_(factor)

    def _in_buckets(self) -> list[torch.Tensor]:
        return [bucket.gradients for bucket in self.buckets if bucket.slots]

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        with without_subclasses():
            return iter([(slot.name, slot.parameter.grad) for slot in self._slots])

    def track(self, counter: MemoryCounter, number: int = 0) -> None:
        for bucket in self.buckets:
            counter.track([bucket.gradients], "gradients", number)
            if bucket.sum_dtype is not bucket.dtype:
                counter.track([bucket.sums], "sums", number)

    def close(self) -> None:
        for hook in self._hooks.values():
            hook.remove()

    def _hook(self, bucket: Bucket, slot: Slot) -> Callable[[torch.Tensor], None]:
        """What autograd calls with each gradient of each microbatch; a small step feels every line of it."""
        return partial(self._take_part if self._splits else self._take, bucket, slot)

    def _take_part(self, bucket: Bucket, slot: Slot, parameter: torch.Tensor) -> None:
        with without_subclasses():  # this rank's part
            self._take(bucket, slot, parameter)

    def _take(self, bucket: Bucket, slot: Slot, parameter: torch.Tensor, leaves_sum: bool = True) -> None:
        gradient = parameter.grad
        assert gradient is not None  # autograd calls hooks with it in place
        if gradient is not slot.gradient or bucket.sending:
            parameter.grad = None
            self._add(bucket, slot, gradient, leaves_sum and bucket.leaves_sums and slot.lies_alike)
        else:  # autograd has added to the sum
            slot.used = True
        if self._last and bucket.group.size > 1:
            bucket.waiting -= 1
            if bucket.waiting == 0:
                self._send_full()

    def _add(self, bucket: Bucket, slot: Slot, gradient: torch.Tensor, leaves_sum: bool) -> None:
        sent = bucket.sending or (bucket.once and slot.used)
        if gradient.layout is not torch.strided or sent:
            check_gradient(slot.name, gradient, sent=sent)
        check_dtype(slot.name, gradient.dtype, bucket.dtype)
        if slot.name not in self.dropped:
            slot.used = slot.used and not slot.left  # else what is in `grad` is the sum
            bucket.accumulate(slot, gradient)
            slot.left = leaves_sum
            if leaves_sum:
                slot.parameter.grad = slot.gradient

    def _send_full(self) -> None:
        """Sends buckets while the next in order is full; those with a tail wait for `start_reduce`, which fills it."""
        ready = self._sent
        while ready < len(self.buckets) - len(self._tails) and self.buckets[ready].waiting <= 0:
            ready += 1
        self._send_until(ready)

    def _send_until(self, end: int) -> None:
        for number in range(self._sent, end):
            if self._exact and number >= IN_FLIGHT:
                self.buckets[number - IN_FLIGHT].receive()
            self.buckets[number].send()
        self._sent = max(self._sent, end)


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
                f'unfreeze it in the job\'s model, and give the job the steps to wait: frozen={{"{name}": 500}}',
            )


def begin_numbers(
    mine: Iterable[float], numbers: Sequence[float] | torch.Tensor, group: Group, last: torch.Tensor | None = None
) -> Pending[torch.Tensor]:
    """Begins to all-reduce [*mine, *numbers, last] over `group`; 1D, in float64."""
    if last is None and not isinstance(numbers, torch.Tensor):
        values = on_device([*mine, *numbers], group.device)
    else:
        pieces = ([*mine], numbers) if last is None else ([*mine], numbers, last.reshape(1))
        values = torch.cat([on_device(piece, group.device) for piece in pieces])
    return all_reduce.begin(values, group, label="losses and weights")
