"""The data axis with full parameters on every rank; gradients and optimizer state sharded over ranks (ZeRO 1 and 2).

Every parameter is cut along dim 0 into one *piece* per rank of a *shard group*, as torch's DTensor does it: pieces have
equally many rows, except for shorter or empty ones at the end. A rank keeps gradient and optimizer state of its own
pieces and steps those; then the ranks all-gather the parameters. Scalar parameters are replicated.

    zero=1   full gradients are accumulated over the microbatches of a step, then reduce-scattered
    zero=2   the gradients of every microbatch are reduce-scattered as soon as they are computed

With shard groups smaller than the data axis (hybrid sharding) the groups hold the same pieces, and all-reduce their
gradients once per step.

Vocabulary. A *bucket* is a run of parameters that are reduced together, *packed* into one row per rank: all pieces of
rank 0, then those of rank 1, and so on, each padded with zeros to the same length (`row_layout`). A *round* is one
reduction of all buckets, strictly in their order, so that all ranks agree; a rank that runs fewer microbatches than
others sends zeros in the remaining rounds. Nothing else in a step depends on what other ranks run.

Exactness. With `accumulate_float64` sums are exact and rounded once, as in `gradients`, and then divided by the weight.
The ranks exchange what they have, and each adds up its pieces itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from evenly.comm.collectives import adds_here, all_gather, all_reduce, exchange, reduce_scatter
from evenly.comm.exact_reduce import begin_exact_all_reduce, exact_norm, pairs_of_others
from evenly.comm.exact_sum import ExactSum
from evenly.comm.groups import Group
from evenly.comm.transport import Pending, add
from evenly.comm.world import World
from evenly.parallel.core.memory import MemoryCounter
from evenly.parallel.data.buckets import in_backward_order
from evenly.parallel.data.gradient_hooks import check_gradient, taken, taken_of_part
from evenly.parallel.data.gradients import Gradients, begin_numbers, refuse_unfrozen, trainable
from evenly.parallel.data.grouping import IN_FLIGHT
from evenly.parallel.data.mesh import groups_of, shard_mesh
from evenly.parallel.data.optimizer import OwnedRows
from evenly.parallel.data.ownership import Ownership, norm_of_shards
from evenly.parallel.data.row_layout import RowLayout, RowPacker
from evenly.torch_private import without_subclasses

NOTHING = torch.empty(0)


@dataclass(eq=False)
class RowRange:
    """One parameter of a bucket.

    layout: of its pieces. rows: how many of them this rank's piece has.
    total:  sum of this rank's gradients that are not sent yet; exact: the same, exactly.
    used:   whether it got a gradient in this step: on this rank, and after `finish_reduce` on any.
    """

    name: str
    parameter: nn.Parameter
    layout: RowLayout
    rows: int
    total: torch.Tensor | None = None
    exact: ExactSum | None = None
    used: bool = False

    def accumulate(self, gradient: torch.Tensor, dtype: torch.dtype, *, exact: bool) -> None:
        """Adds `gradient` to the total, which the first one makes, of `dtype`; exact: whether that adds up exactly."""
        self.used = True
        if self.total is None:
            self.total = gradient if gradient.dtype is dtype else gradient.to(dtype)
            self.exact = ExactSum(self.total.view(-1)) if exact else None
        elif self.exact is None:
            add(self.total, gradient)
        else:
            self.exact.add(gradient.reshape(-1))


@dataclass(eq=False)
class Scalar:
    """A parameter without dims; its gradient is accumulated in float64 and reduced with the numbers.

    total: None too where sums are exact, which are kept for all scalars together.
    """

    name: str
    parameter: nn.Parameter
    total: torch.Tensor | None = None
    used: bool = False


class ShardedBucket:
    """A run of parameters of one dtype and device, whose pieces are on the ranks of `group`.

    sums:       1D, in sum_dtype: this rank's pieces of the gradients, summed over ranks; from the first round on.
    gradients:  1D, the same in the parameters' dtype, then divided by the weight; until the next step.
    send_dtype: of the packed gradients.
    waiting:    number of parts whose gradient of this round is still to come.
    """

    def __init__(self, parts: list[RowRange], group: Group, *, accumulate_float64: bool, send_narrow: bool) -> None:
        first, last = parts[0], parts[-1]
        self.parts, self.dtype, self.device = parts, first.parameter.dtype, first.parameter.device
        self.group = group
        self.sum_dtype = torch.float64 if accumulate_float64 else self.dtype
        self.send_dtype = self.dtype if send_narrow else self.sum_dtype
        self.length = last.layout.offset + last.layout.length  # of a rank's row
        self._layouts = [part.layout for part in parts]
        self._lengths = [layout.length for layout in self._layouts]
        self._addresses: list[int] = []  # of the parameters that `_packer` copies
        self.sums = self.gradients = NOTHING
        self.exact = ExactSum(NOTHING) if accumulate_float64 else None  # over `sums`
        self.pairs: list[torch.Tensor] = []  # low terms of the packed gradients that this rank has sent
        self.waiting = 0
        self.label = f"gradient of {first.name} to {last.name}"

    def begin(self) -> None:
        self.sums = self.gradients = NOTHING
        self.pairs.clear()

    def reduce(self, packed: torch.Tensor) -> Pending[Any]:
        """Begins to sum the ranks' `packed` gradients into `sums`."""
        group = self.group
        adding = self.sums is not NOTHING
        if not adding:
            self.sums = torch.empty(self.length, dtype=self.sum_dtype, device=self.device)
        if self.exact is None:
            return reduce_scatter.begin(packed.view(-1), group, into=self.sums, adding=adding, label=self.label)
        if not adding:
            self.exact = ExactSum(self.sums)
        rows = exchange.begin(packed, group, label=self.label)
        return Pending(group, 0, (), lambda: self._add_rows(rows.wait(), adding=adding))

    def _add_rows(self, rows: torch.Tensor, *, adding: bool) -> None:
        assert self.exact is not None
        if not adding:
            self.exact.set(rows)
            return
        for row in rows:
            self.exact.add(row)

    def share_low_terms(self) -> None:
        """Adds what the sums of the ranks, as they were packed, had lost."""
        assert self.exact is not None
        group = self.group
        own = torch.cat([torch.empty(0, 2, dtype=torch.float64, device=self.device), *self.pairs])
        first = group.position * self.length
        for pairs in (own, pairs_of_others(own, group)):
            inside = (pairs[:, 0] >= first) & (pairs[:, 0] < first + self.length)
            self.exact.add_pairs(pairs[inside] - pairs.new_tensor([first, 0.0]))

    def pack(self) -> torch.Tensor:
        """This rank's gradients of the round (ranks x elements); drops the totals."""
        packed = torch.empty((self.group.size, self.length), dtype=self.send_dtype, device=self.device)
        self._packer_of([part.total for part in self.parts]).pack(packed)
        for part in self.parts:
            if part.exact is not None and part.exact.has_low_terms:
                pairs = part.exact.pairs()
                pairs[:, 0] = part.layout.packed_index(pairs[:, 0].long(), self.length).double()
                self.pairs.append(pairs)
            part.total = part.exact = None
        return packed

    def finish_sums(self) -> None:
        """Turns the sums into gradients."""
        if self.exact is None:
            self.gradients = self.sums.to(self.dtype)
        else:
            self.gradients = torch.empty_like(self.sums, dtype=self.dtype)
            self.exact.round_into(self.gradients)
            self.exact = ExactSum(NOTHING)
        self.sums = NOTHING

    def named_pieces(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """This rank's pieces of the gradients, as views; None for a parameter that no rank has used."""
        if self.gradients is NOTHING:
            yield from ((part.name, None) for part in self.parts)
            return
        regions = self.gradients.split_with_sizes(self._lengths)
        for part, region in zip(self.parts, regions, strict=True):
            yield part.name, part.layout.shaped(region, part.rows) if part.used else None

    def begin_gather(self) -> Pending[torch.Tensor]:
        """Begins to all-gather the parameters, packed."""
        addresses = [part.parameter.data_ptr() for part in self.parts]
        if addresses != self._addresses:  # in the first step, and where the job has given a parameter other memory
            self._packer = self._packer_of([part.parameter.detach() for part in self.parts])
            self._addresses = addresses
        row = torch.empty(self.length, dtype=self.dtype, device=self.device)
        self._packer.pack_own(row)
        sizes, label = [self.length] * self.group.size, self.label.removeprefix("gradient of ")
        return all_gather.begin(row, self.group, sizes=sizes, label=label)

    def finish_gather(self, pending: Pending[torch.Tensor]) -> None:
        """Waits for what `begin_gather` began, and copies it into the parameters."""
        self._packer.unpack(pending.wait().view(self.group.size, self.length))

    def _packer_of(self, tensors: Sequence[torch.Tensor | None]) -> RowPacker:
        return RowPacker(self._layouts, tensors, self.group.size, self.group.position)


class PartitionedGradients(Gradients):
    """Sums the gradients of `model` over the microbatches of a step and over ranks, and keeps this rank's pieces.

    zero: the ZeRO stage, 1 or 2. shard: size of the shard groups. ownership: what this rank has of the model, where it
    is not all. `share`: fraction of the parameters' elements that is sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        world: World,
        zero: int,
        shard: int,
        accumulate_float64: bool,
        ownership: Ownership | None = None,
    ) -> None:
        named, self._frozen = trainable(model, required=ownership is None or ownership.pipeline_group is None)
        self._all, self._zero, self._ownership = world.group("data"), zero, ownership
        self._exact = accumulate_float64
        mesh = shard_mesh(world, shard)
        self._group, self._across = groups_of(mesh, self._all)
        self._position = self._group.position
        self._scalars = [Scalar(name, p) for name, p in named if p.dim() == 0]
        self._scalar_sums = ExactSum(torch.zeros(len(self._scalars), dtype=torch.float64, device=self._all.device))
        cut = in_backward_order((name, p) for name, p in named if p.dim() > 0)
        # A round has one microbatch: nothing is lost.
        send_narrow = zero == 2 and (accumulate_float64 or adds_here(self._group))
        self.buckets = [
            ShardedBucket(
                _parts(some, self._group), self._group, accumulate_float64=accumulate_float64, send_narrow=send_narrow
            )
            for some in cut
        ]
        self._parts = [part for bucket in self.buckets for part in bucket.parts]
        self.cuts = [_cut(part, part.layout.own(self._position), mesh) for part in self._parts]
        split = sum(part.parameter.numel() for part in self._parts if part.layout.length < part.parameter.numel())
        self.share = split / max(1, sum(p.numel() for _, p in named))
        self._sending, self._sent, self._rounds = False, 0, 0
        self._in_flight: deque[Pending[Any]] = deque()  # in the order in which they were begun
        self._tail: Pending[torch.Tensor] | None = None
        self._handles = [
            part.parameter.register_post_accumulate_grad_hook(self._hook(index, bucket, part))
            for index, bucket in enumerate(self.buckets)
            for part in bucket.parts
        ]
        self._handles += [
            scalar.parameter.register_post_accumulate_grad_hook(self._scalar_hook(number, scalar))
            for number, scalar in enumerate(self._scalars)
        ]

    # ------------------------------------------------------------------------------------------- a step
    def begin(self, *, numbers: int = 0, rounds: int = 1) -> None:
        self._rounds = rounds if self._zero == 2 else 1
        for bucket in self.buckets:
            bucket.begin()
        with without_subclasses():  # this rank's parts
            for one in (*self._parts, *self._scalars):
                one.used, one.total, one.parameter.grad = False, None, None
        for part in self._parts:
            part.exact = None
        self._scalar_sums.high.zero_()
        self._scalar_sums.clear()
        self._begin_round(sending=self._zero == 2)

    def expect_last(self) -> None:
        self._sending = True

    def finish_backward(self) -> None:
        super().finish_backward()
        if self._sending:
            self._finish_round()

    def start_reduce(self, numbers: Sequence[float] | torch.Tensor = ()) -> None:
        refuse_unfrozen(self._frozen)
        while self._rounds:
            self._finish_round()
        flags = [float(one.used) for one in (*self._parts, *self._scalars)]
        totals = [0.0 if scalar.total is None else float(scalar.total) for scalar in self._scalars]
        low_terms = float(any(bucket.pairs for bucket in self.buckets))
        self._tail = begin_numbers([*flags, low_terms, *totals], numbers, self._all)

    def finish_reduce(self) -> list[float]:
        while self._in_flight:
            self._wait_oldest()
        assert self._tail is not None
        values = iter(self._tail.wait().tolist())
        for one in (*self._parts, *self._scalars):
            one.used = next(values) > 0
        if next(values) > 0:
            for bucket in self.buckets:
                bucket.share_low_terms()
        self._sum_across()
        exact_totals = self._exact_scalars()
        for scalar, exact_total in zip(self._scalars, exact_totals, strict=True):
            total = next(values) + exact_total
            scalar.parameter.grad = torch.full_like(scalar.parameter, total) if scalar.used else None
        for bucket in self.buckets:
            bucket.finish_sums()
        return list(values)

    def _exact_scalars(self) -> list[float]:
        """The exact sums of the scalars' gradients over the data axis, rounded; zeros where others are kept."""
        if not self._scalars:
            return []
        if self._exact:
            begin_exact_all_reduce(self._scalar_sums, self._all, label="gradients of scalars")()
        return self._scalar_sums.rounded().tolist()

    def _sum_across(self) -> None:
        """Sums the pieces over the ranks that have the same."""
        if (group := self._across) is None:
            return
        ends: list[Callable[[], object]] = [
            begin_exact_all_reduce(bucket.exact, group, label=bucket.label)
            if bucket.exact is not None
            else all_reduce.begin(bucket.sums, group, label=bucket.label).wait
            for bucket in self.buckets
        ]
        for end in ends:
            end()

    def used(self) -> set[str]:
        return {one.name for one in (*self._parts, *self._scalars) if one.used}

    def mark_used(self, names: Container[str]) -> None:
        for one in (*self._parts, *self._scalars):
            one.used = one.used or one.name in names

    def collect(self) -> None:
        with without_subclasses():  # this rank's parts
            for index, bucket in enumerate(self.buckets):
                for part in (one for one in bucket.parts if one.parameter.grad is not None):
                    self._hook(index, bucket, part)(part.parameter)
        for number, scalar in enumerate(self._scalars):
            if scalar.parameter.grad is not None:
                self._scalar_hook(number, scalar)(scalar.parameter)

    @torch.no_grad()
    def add(self, earlier: Mapping[str, torch.Tensor]) -> None:
        for bucket in self.buckets:
            for part in bucket.parts:
                if (gradient := earlier.get(part.name)) is not None:
                    piece = part.layout.piece(bucket.gradients, self._position)
                    piece.copy_(piece + gradient if part.used else gradient)
                    part.used = True
        for scalar in self._scalars:
            if (gradient := earlier.get(scalar.name)) is not None:
                now = scalar.parameter.grad
                scalar.parameter.grad = gradient if now is None else now + gradient

    def norm(self) -> torch.Tensor:
        if self._ownership is not None:
            named = self.named_gradients() if self._position == 0 else self._named_pieces()
            return self._ownership.norm(named, self._group)
        return norm_of_shards(self._counted(), self._group)

    def exact_norm(self) -> float:
        return exact_norm(self._counted(), self._group)

    def _counted(self) -> Iterable[torch.Tensor]:
        scalars = self._scalar_gradients() if self._position == 0 else ()  # all ranks have the same
        return (*(bucket.gradients for bucket in self.buckets), *scalars)

    def divide(self, divisor: float) -> None:
        for gradient in (*(bucket.gradients for bucket in self.buckets), *self._scalar_gradients()):
            gradient.div_(divisor)

    def scale(self, factor: float) -> None:
        for gradient in (*(bucket.gradients for bucket in self.buckets), *self._scalar_gradients()):
            gradient.mul_(factor)

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        yield from self._named_pieces()
        for scalar in self._scalars:
            yield scalar.name, scalar.parameter.grad

    def _named_pieces(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        for bucket in self.buckets:
            yield from bucket.named_pieces()

    @torch.no_grad()
    def all_gather_parameters(self) -> None:
        begun = deque[tuple[ShardedBucket, Pending[torch.Tensor]]]()
        with without_subclasses():  # this rank's parts
            for bucket in self.buckets:
                begun.append((bucket, bucket.begin_gather()))
                if len(begun) > 1:  # gather one while another is unpacked
                    earlier, pending = begun.popleft()
                    earlier.finish_gather(pending)
            for bucket, pending in begun:
                bucket.finish_gather(pending)

    def track(self, counter: MemoryCounter, number: int = 0) -> None:
        for bucket in self.buckets:
            totals = [part.total for part in bucket.parts if part.total is not None]
            added = "gradients" if bucket.sum_dtype is bucket.dtype else "sums"
            counter.track([bucket.sums, *totals], added, number)
            counter.track([bucket.gradients], "gradients", number)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    # ------------------------------------------------------------------------------------------- rounds
    def _begin_round(self, *, sending: bool) -> None:
        self._sending, self._sent = sending, 0
        for bucket in self.buckets:
            bucket.waiting = len(bucket.parts)

    def _finish_round(self) -> None:
        self._send_until(len(self.buckets))
        self._rounds -= 1
        self._begin_round(sending=self._rounds > 0)

    def _hook(self, index: int, bucket: ShardedBucket, part: RowRange) -> Callable[[torch.Tensor], None]:
        """What autograd calls with each gradient of each microbatch; a small step feels every line of it."""
        splits = self._ownership is not None and self._ownership.tensor_group is not None
        take = taken_of_part if splits else taken

        def accumulate(parameter: torch.Tensor) -> None:
            gradient = take(parameter)
            if gradient.layout is not torch.strided or index < self._sent:
                check_gradient(part.name, gradient, sent=index < self._sent)
            if part.name not in self.dropped:  # what is sent at once is converted when it is sent
                dtype = gradient.dtype if self._zero == 2 else bucket.sum_dtype
                part.accumulate(gradient, dtype, exact=self._exact and self._zero == 1)
            if self._sending:
                bucket.waiting -= 1
                if bucket.waiting == 0:
                    self._send_full()

        return accumulate

    def _scalar_hook(self, number: int, scalar: Scalar) -> Callable[[torch.Tensor], None]:
        def accumulate(parameter: torch.Tensor) -> None:
            gradient = taken_of_part(parameter)
            if scalar.name in self.dropped:
                return
            scalar.used = True
            if self._exact:
                self._scalar_sums.add(gradient.reshape(1).to(self._scalar_sums.high.device), number)
            else:
                scalar.total = gradient.double() if scalar.total is None else scalar.total + gradient.double()

        return accumulate

    def _send_full(self) -> None:
        """Sends buckets while the next in order is full."""
        ready = self._sent
        while ready < len(self.buckets) and self.buckets[ready].waiting <= 0:
            ready += 1
        self._send_until(ready)

    def _send_until(self, end: int) -> None:
        for bucket in self.buckets[self._sent : end]:
            if len(self._in_flight) == IN_FLIGHT:
                self._wait_oldest()
            self._in_flight.append(bucket.reduce(bucket.pack()))
        self._sent = max(self._sent, end)

    def _wait_oldest(self) -> None:
        self._in_flight.popleft().wait()

    def _scalar_gradients(self) -> list[torch.Tensor]:
        return [g for scalar in self._scalars if (g := scalar.parameter.grad) is not None]


def _parts(named: Iterable[tuple[str, nn.Parameter]], group: Group) -> list[RowRange]:
    parts: list[RowRange] = []
    offset = 0
    for name, parameter in named:
        layout = RowLayout.of(parameter.shape, group.size, offset)
        rows = layout.own(group.position)
        parts.append(RowRange(name, parameter, layout, rows.stop - rows.start))
        offset += layout.length
    return parts


def _cut(part: RowRange, rows: slice, mesh: DeviceMesh) -> OwnedRows:
    """This rank's shard of a parameter: a DTensor that shares memory with its `rows`."""
    whole = part.parameter.detach()
    placements, shape, stride = [Replicate(), Shard(0)], whole.shape, whole.stride()
    piece = DTensor.from_local(whole[rows], mesh, placements, run_check=False, shape=shape, stride=stride)
    return OwnedRows(part.name, part.parameter, nn.Parameter(piece), rows)
