"""Collectives for the units of `fully_shard`: it allocates their buffers by them, and calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from evenly.comm.collectives import exchange, reduce_scatter
from evenly.comm.exact_reduce import begin_exact_all_reduce
from evenly.comm.exact_sum import ExactSum
from evenly.comm.groups import Group
from evenly.comm.transport import WorkOfMessages, as_bytes, enter, is_timed, post_all_gather


class NewMemory:
    """A collective for `fully_shard` with new buffers for each call."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class AsyncAllGather(NewMemory):
    """An all-gather that waits on the CPU only where the result is needed."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        own, whole = as_bytes(input_tensor), as_bytes(output_tensor)
        # A unit costs enough without a record of each gather.
        serial = enter(self._group, "all_gather", own, label="parameters") if is_timed(self._group) else 0
        works, polled = post_all_gather(own, whole, self._group)
        return WorkOfMessages(works, self._group, serial, polled=polled)


class SumReduceScatter(NewMemory):
    """A reduce-scatter that sends gradients in a narrower dtype than it sums them in.

    send_dtype: of the gradients as they are sent; None if they are sent in the dtype of the sum.
    """

    def __init__(self, group: Group, send_dtype: torch.dtype | None) -> None:
        self._group, self._send_dtype = group, send_dtype
        self._allocated = False  # whether the buffer to send is allocated; the next one is the result

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        is_result, self._allocated = self._allocated, True
        return super().allocate(size, dtype=dtype if is_result else self._send_dtype or dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self._allocated = False
        reduce_scatter(input_tensor, self._group, into=output_tensor)


class ExactReduceScatter(NewMemory):
    """A reduce-scatter whose results, added up by `fully_shard` over the microbatches of a step, are the exact sum.

    Its results are zeros, but for the first: `fully_shard` keeps that tensor and adds the others to it, and so it is
    the one in which gradients are added up here. In the last backward it becomes the rounded sum over all ranks, on the
    first of the ranks `across` that have the same shards, and zeros on the others. In a group of one rank `fully_shard`
    calls no collective and copies what it would have sent; that is replaced before it allocates the result.

    last: whether the next backward is the last of the step.
    """

    def __init__(self, group: Group, across: Group | None, send_dtype: torch.dtype | None) -> None:
        self._group, self._across, self._send_dtype = group, across, send_dtype
        self._sent: torch.Tensor | None = None  # the buffer to send, until the result is allocated
        self.begin()

    def begin(self) -> None:
        """Forgets the last step."""
        self._sum: ExactSum | None = None
        self.last = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self._sent is None:
            send_dtype = self._send_dtype if self._group.size > 1 else None
            self._sent = super().allocate(size, dtype=send_dtype or dtype, device=device)
            return self._sent
        if self._group.size == 1:
            self._add(self._sent.view(1, -1), self._sent)
        self._sent = None
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self._add(exchange(input_tensor.view(self._group.size, -1), self._group), output_tensor)

    def _add(self, rows: torch.Tensor, output: torch.Tensor) -> None:
        """Adds the `rows` (ranks x elements), and sets `output`, the memory of the row in a group of one rank."""
        if self._sum is None:
            self._sum = ExactSum(output if self._group.size > 1 else output.clone())
            self._sum.set(rows)
        else:
            for row in rows:
                self._sum.add(row)
        total = self._sum.high
        if self.last:
            self._round()
        if output is not total:
            output.copy_(total) if self.last and self._group.size == 1 else output.zero_()

    def _round(self) -> None:
        """Turns the sum into the result, and ends the step."""
        assert self._sum is not None
        if self._across is not None:
            begin_exact_all_reduce(self._sum, self._across, label="gradients of shards")()
        if self._across is None or self._across.position == 0:
            self._sum.high.copy_(self._sum.rounded())
        else:
            self._sum.high.zero_()
        self._sum = None
