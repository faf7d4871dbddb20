"""The data axis with full parameters on every rank; gradients and optimizer state sharded over ranks (ZeRO 1 and 2).

Every parameter is cut along dim 0 into one *piece* per rank of a *shard group*, as torch's DTensor does it: pieces have
equally many rows, except for shorter or empty ones at the end. A rank keeps gradient and optimizer state of its own
pieces and steps those; then the ranks all-gather the parameters. Scalar parameters are replicated.

    zero=1   full gradients are accumulated over the microbatches of a step, then reduce-scattered
    zero=2   the gradients of every microbatch are reduce-scattered as soon as they are computed

With shard groups smaller than the data axis (hybrid sharding) the groups hold the same pieces, and all-reduce their
gradients once per step.

Vocabulary. A *bucket* is a run of parameters that are reduced together, *packed* into one row per rank: all pieces of
rank 0, then those of rank 1, and so on, each padded with zeros to the same length. A *round* is one reduction of all
buckets, strictly in their order, so that all ranks agree; a rank that runs fewer microbatches than others sends zeros
in the remaining rounds. Nothing else in a step depends on what other ranks run.

Exactness is as in `gradients`: with `accumulate_float64` sums are in float64, rounded once, and divided by the weight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from evenly.comm.collectives import adds_here, all_gather, all_reduce, reduce_scatter
from evenly.comm.transport import Pending, add
from evenly.comm.world import World
from evenly.parallel.core.memory import MemoryCounter
from evenly.parallel.data.gradients import (
    Gradients,
    Ownership,
    begin_numbers,
    check_gradient,
    in_backward_order,
    norm_of_shards,
    refuse_unfrozen,
    trainable,
)
from evenly.parallel.data.mesh import groups_of, shard_mesh
from evenly.parallel.data.optimizer import OwnedRows

IN_FLIGHT = 3  # reductions of buckets at a time; bounds their memory
NOTHING = torch.empty(0)


@dataclass(frozen=True)
class RowLayout:
    """Where the pieces of a parameter are in the rows of its packed bucket.

    rows: of the parameter. row_shape: of one of its rows. offset: of its piece in each packed row, in elements.
    """

    rows: int
    piece_rows: int
    row_shape: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, shape: Sequence[int], ranks: int, offset: int = 0) -> RowLayout:
        """The layout of a parameter of `shape`, with at least one dim."""
        rows, *row_shape = shape
        return cls(rows, max(1, -(-rows // ranks)), tuple(row_shape), offset)

    @property
    def length(self) -> int:
        """The elements of a piece."""
        return self.piece_rows * torch.Size(self.row_shape).numel()

    def own(self, position: int) -> slice:
        """The rows of the piece at `position`."""
        return slice(min(position * self.piece_rows, self.rows), min((position + 1) * self.piece_rows, self.rows))

    def pack(self, tensor: torch.Tensor | None, packed: torch.Tensor) -> None:
        """Copies the pieces of `tensor`, or zeros, into `packed` (ranks x elements)."""
        region = packed[:, self.offset : self.offset + self.length]
        if tensor is None or region.shape[0] * self.piece_rows > self.rows:
            region.zero_()
        if tensor is not None:
            self._copy_pieces(tensor, packed, lambda piece, target: target.copy_(piece))

    def unpack(self, packed: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copies the pieces in `packed` (ranks x elements) into `tensor`."""
        self._copy_pieces(tensor, packed, lambda piece, target: piece.copy_(target))

    def piece(self, row: torch.Tensor, position: int) -> torch.Tensor:
        """The piece at `position`, without padding, as a view of its rank's packed `row`."""
        rows = self.own(position)
        region = row[self.offset : self.offset + self.length]
        return region.unflatten(0, (self.piece_rows, *self.row_shape))[: rows.stop - rows.start]

    def _copy_pieces(
        self, tensor: torch.Tensor, packed: torch.Tensor, copy: Callable[[torch.Tensor, torch.Tensor], object]
    ) -> None:
        """Calls `copy` with rows of `tensor` and their region of `packed`: all full pieces at once, then the last."""
        region = packed[:, self.offset : self.offset + self.length].unflatten(1, (self.piece_rows, *self.row_shape))
        full, remainder = divmod(self.rows, self.piece_rows)
        if full:
            copy(tensor[: full * self.piece_rows].unflatten(0, (full, self.piece_rows)), region[:full])
        if remainder:
            copy(tensor[full * self.piece_rows :], region[full, :remainder])


@dataclass(eq=False)
class RowRange:
    """One parameter of a bucket.

    layout: of its pieces. total: sum of this rank's gradients that are not sent yet.
    used:   whether it got a gradient in this step: on this rank, and after `finish_reduce` on any.
    """

    name: str
    parameter: nn.Parameter
    layout: RowLayout
    total: torch.Tensor | None = None
    used: bool = False


@dataclass(eq=False)
class Scalar:
    """A parameter without dims; its gradient is accumulated in float64 and reduced with the numbers."""

    name: str
    parameter: nn.Parameter
    total: torch.Tensor | None = None
    used: bool = False


class ShardedBucket:
    """A run of parameters of one dtype and device.

    sums:       1D, in sum_dtype: this rank's pieces of the gradients, summed over ranks; from the first round on.
    gradients:  1D, the same in the parameters' dtype, then divided by the weight; until the next step.
    send_dtype: of the packed gradients.
    waiting:    number of parts whose gradient of this round is still to come.
    """

    def __init__(self, parts: list[RowRange], *, accumulate_float64: bool, send_narrow: bool) -> None:
        first, last = parts[0], parts[-1]
        self.parts, self.dtype, self.device = parts, first.parameter.dtype, first.parameter.device
        self.sum_dtype = torch.float64 if accumulate_float64 else self.dtype
        self.send_dtype = self.dtype if send_narrow else self.sum_dtype
        self.length = last.layout.offset + last.layout.length  # of a rank's row
        self.sums = self.gradients = NOTHING
        self.waiting = 0
        self.label = f"gradient of {first.name} to {last.name}"

    def begin(self) -> None:
        self.sums = self.gradients = NOTHING

    def pack(self, ranks: int) -> torch.Tensor:
        """This rank's gradients of the round (ranks x elements); drops the totals."""
        packed = torch.empty((ranks, self.length), dtype=self.send_dtype, device=self.device)
        for part in self.parts:
            part.layout.pack(part.total, packed)
            part.total = None
        return packed

    def finish_sums(self) -> None:
        """Turns the sums into gradients."""
        self.gradients, self.sums = self.sums.to(self.dtype), NOTHING


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
        mesh = shard_mesh(world, shard)
        self._group, self._across = groups_of(mesh, self._all)
        self._position = self._group.position
        self._scalars = [Scalar(name, p) for name, p in named if p.dim() == 0]
        cut = in_backward_order((name, p) for name, p in named if p.dim() > 0)
        send_narrow = zero == 2 and adds_here(self._group)  # a round has one microbatch: nothing is lost
        self.buckets = [
            ShardedBucket(
                _parts(group, self._group.size), accumulate_float64=accumulate_float64, send_narrow=send_narrow
            )
            for group in cut
        ]
        self._parts = [part for bucket in self.buckets for part in bucket.parts]
        self.cuts = [_cut(part, part.layout.own(self._position), mesh) for part in self._parts]
        split = sum(part.parameter.numel() for part in self._parts if part.layout.length < part.parameter.numel())
        self.share = split / max(1, sum(p.numel() for _, p in named))
        self._sending, self._sent, self._rounds = False, 0, 0
        self._in_flight: deque[Pending[torch.Tensor]] = deque()  # in the order in which they were begun
        self._tail: Pending[torch.Tensor] | None = None
        self._handles = [
            part.parameter.register_post_accumulate_grad_hook(self._hook(index, bucket, part))
            for index, bucket in enumerate(self.buckets)
            for part in bucket.parts
        ]
        self._handles += [
            scalar.parameter.register_post_accumulate_grad_hook(_add_to(scalar)) for scalar in self._scalars
        ]

    # ------------------------------------------------------------------------------------------- a step
    def begin(self, *, numbers: int = 0, rounds: int = 1) -> None:
        self._rounds = rounds if self._zero == 2 else 1
        for bucket in self.buckets:
            bucket.begin()
        for one in (*self._parts, *self._scalars):
            one.used, one.total, one.parameter.grad = False, None, None
        self._begin_round(sending=self._zero == 2)

    def expect_last(self) -> None:
        self._sending = True

    def finish_backward(self) -> None:
        if self._sending:
            self._finish_round()

    def start_reduce(self, numbers: Sequence[float] | torch.Tensor = ()) -> None:
        refuse_unfrozen(self._frozen)
        while self._rounds:
            self._finish_round()
        flags = [float(one.used) for one in (*self._parts, *self._scalars)]
        totals = [0.0 if scalar.total is None else float(scalar.total) for scalar in self._scalars]
        self._tail = begin_numbers([*flags, *totals], numbers, self._all)

    def finish_reduce(self) -> list[float]:
        while self._in_flight:
            self._wait_oldest()
        if self._across is not None:
            sums = [all_reduce.begin(bucket.sums, self._across, label=bucket.label) for bucket in self.buckets]
            for pending in sums:
                pending.wait()
        assert self._tail is not None
        values = iter(self._tail.wait().tolist())
        for one in (*self._parts, *self._scalars):
            one.used = next(values) > 0
        for scalar in self._scalars:
            total = next(values)
            scalar.parameter.grad = torch.full_like(scalar.parameter, total) if scalar.used else None
        for bucket in self.buckets:
            bucket.finish_sums()
        return list(values)

    def used(self) -> set[str]:
        return {one.name for one in (*self._parts, *self._scalars) if one.used}

    def mark_used(self, names: Container[str]) -> None:
        for one in (*self._parts, *self._scalars):
            one.used = one.used or one.name in names

    def collect(self) -> None:
        for index, bucket in enumerate(self.buckets):
            for part in bucket.parts:
                if part.parameter.grad is not None:
                    self._hook(index, bucket, part)(part.parameter)
        for scalar in self._scalars:
            if scalar.parameter.grad is not None:
                _add_to(scalar)(scalar.parameter)

    def norm(self) -> torch.Tensor:
        if self._ownership is not None:
            named = self.named_gradients() if self._position == 0 else self._named_pieces()
            return self._ownership.norm(named, self._group)
        scalars = self._scalar_gradients() if self._position == 0 else ()  # all ranks have the same
        return norm_of_shards((*(bucket.gradients for bucket in self.buckets), *scalars), self._group)

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
            for part in bucket.parts:
                yield part.name, part.layout.piece(bucket.gradients, self._position) if part.used else None

    @torch.no_grad()
    def all_gather_parameters(self) -> None:
        begun = deque[tuple[ShardedBucket, Pending[torch.Tensor]]]()
        for bucket in self.buckets:
            begun.append((bucket, self._gather(bucket)))
            if len(begun) > 1:  # gather one while another is unpacked
                self._unpack(*begun.popleft())
        for bucket, pending in begun:
            self._unpack(bucket, pending)

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
        def accumulate(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None  # autograd calls the hook with the gradient in place
            parameter.grad = None
            check_gradient(part.name, gradient, sent=index < self._sent)
            if part.total is not None:
                add(part.total, gradient)
            else:  # what is sent at once is converted when it is sent
                part.total = gradient if self._zero == 2 else gradient.to(bucket.sum_dtype)
            part.used = True
            if self._sending:
                bucket.waiting -= 1
                self._send_full()

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
            packed, adding = bucket.pack(self._group.size).view(-1), bucket.sums is not NOTHING
            if not adding:
                bucket.sums = torch.empty(bucket.length, dtype=bucket.sum_dtype, device=bucket.device)
            pending = reduce_scatter.begin(packed, self._group, into=bucket.sums, adding=adding, label=bucket.label)
            self._in_flight.append(pending)
        self._sent = max(self._sent, end)

    def _wait_oldest(self) -> None:
        self._in_flight.popleft().wait()

    # ------------------------------------------------------------------------------------------- helpers
    def _gather(self, bucket: ShardedBucket) -> Pending[torch.Tensor]:
        """Begins to all-gather the parameters of `bucket`, packed."""
        row = torch.empty(bucket.length, dtype=bucket.dtype, device=bucket.device)
        for part in bucket.parts:
            part.layout.piece(row, self._position).copy_(part.parameter[part.layout.own(self._position)])
        sizes, label = [bucket.length] * self._group.size, bucket.label.removeprefix("gradient of ")
        return all_gather.begin(row, self._group, sizes=sizes, label=label)

    def _unpack(self, bucket: ShardedBucket, pending: Pending[torch.Tensor]) -> None:
        rows = pending.wait().view(self._group.size, bucket.length)
        for part in bucket.parts:
            part.layout.unpack(rows, part.parameter)

    def _scalar_gradients(self) -> list[torch.Tensor]:
        return [g for scalar in self._scalars if (g := scalar.parameter.grad) is not None]


def _parts(named: Iterable[tuple[str, nn.Parameter]], ranks: int) -> list[RowRange]:
    """The parts of a bucket, laid out consecutively."""
    parts: list[RowRange] = []
    offset = 0
    for name, parameter in named:
        parts.append(RowRange(name, parameter, RowLayout.of(parameter.shape, ranks, offset)))
        offset += parts[-1].layout.length
    return parts


def _cut(part: RowRange, rows: slice, mesh: DeviceMesh) -> OwnedRows:
    """This rank's shard of a parameter: a DTensor that shares memory with its `rows`."""
    whole = part.parameter.detach()
    placements, shape, stride = [Replicate(), Shard(0)], whole.shape, whole.stride()
    piece = DTensor.from_local(whole[rows], mesh, placements, run_check=False, shape=shape, stride=stride)
    return OwnedRows(part.name, part.parameter, nn.Parameter(piece), rows)


def _add_to(scalar: Scalar) -> Callable[[torch.Tensor], None]:
    def accumulate(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None  # autograd calls the hook with the gradient in place
        parameter.grad, scalar.used = None, True
        scalar.total = gradient.double() if scalar.total is None else scalar.total + gradient.double()

    return accumulate
