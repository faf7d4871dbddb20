"""Where the pieces of a parameter that is cut along dim 0 are in a packed bucket, and copies of them there and back;
see `partition`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch


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

    @cached_property
    def length(self) -> int:
        return self.piece_rows * torch.Size(self.row_shape).numel()

    @cached_property
    def _piece_shape(self) -> tuple[int, ...]:
        return (self.piece_rows, *self.row_shape)

    def is_even(self, ranks: int) -> bool:
        return self.rows == ranks * self.piece_rows

    def own(self, position: int) -> slice:
        return slice(min(position * self.piece_rows, self.rows), min((position + 1) * self.piece_rows, self.rows))

    def pack(self, tensor: torch.Tensor | None, packed: torch.Tensor) -> None:
        """Copies the pieces of `tensor`, or zeros, into `packed` (ranks x elements)."""
        if tensor is None or packed.shape[0] * self.piece_rows > self.rows:
            packed.narrow(1, self.offset, self.length).zero_()
        if tensor is not None:
            self._copy_pieces(tensor, packed, lambda piece, target: target.copy_(piece))

    def unpack(self, packed: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copies the pieces in `packed` (ranks x elements) into `tensor`."""
        self._copy_pieces(tensor, packed, lambda piece, target: piece.copy_(target))

    def packed_index(self, index: torch.Tensor, length: int) -> torch.Tensor:
        """Where elements `index` of the parameter are in its packed bucket, whose rows have `length` elements."""
        width = torch.Size(self.row_shape).numel()
        row, rest = index // width, index % width
        return row // self.piece_rows * length + self.offset + row % self.piece_rows * width + rest

    def piece(self, row: torch.Tensor, position: int) -> torch.Tensor:
        """The piece at `position`, without padding, as a view of its rank's packed `row`."""
        rows = self.own(position)
        return self.shaped(row.narrow(0, self.offset, self.length), rows.stop - rows.start)

    def shaped(self, region: torch.Tensor, rows: int) -> torch.Tensor:
        """The first `rows` rows of a piece whose elements, padding included, are `region` (1D); a view."""
        shaped = region.view(self._piece_shape) if self.row_shape else region
        return shaped if rows == self.piece_rows else shaped.narrow(0, 0, rows)

    def _copy_pieces(
        self, tensor: torch.Tensor, packed: torch.Tensor, copy: Callable[[torch.Tensor, torch.Tensor], object]
    ) -> None:
        """Calls `copy` with rows of `tensor` and their region of `packed`: all full pieces at once, then the last."""
        region = packed.narrow(1, self.offset, self.length)
        region = region.view(packed.shape[0], *self._piece_shape)
        full, remainder = divmod(self.rows, self.piece_rows)
        if full:
            rows = tensor.narrow(0, 0, full * self.piece_rows) if remainder else tensor
            copy(rows.view(full, self.piece_rows, *self.row_shape), region.narrow(0, 0, full))
        if remainder:
            copy(tensor.narrow(0, full * self.piece_rows, remainder), region[full].narrow(0, 0, remainder))


class RowPacker:
    """Copies `tensors` of a bucket into packed rows (ranks x elements) and back.

    Where all ranks have equally many rows of a tensor, and it is contiguous, its memory is a matrix (ranks x elements).
    Neighbours of which that is true are copied in one call of torch; others one by one.

    layouts: of the tensors, one behind the other. tensors: None stands for zeros. position: of this rank.
    """

    def __init__(
        self, layouts: Sequence[RowLayout], tensors: Sequence[torch.Tensor | None], ranks: int, position: int
    ) -> None:
        self._position = position
        self._matrices: list[_Matrices] = []
        self._others: list[tuple[RowLayout, torch.Tensor | None]] = []
        last: _Matrices | None = None
        for layout, tensor in zip(layouts, tensors, strict=True):
            if tensor is None or not layout.is_even(ranks) or not tensor.is_contiguous():
                self._others.append((layout, tensor))
                last = None
                continue
            if last is None:
                last = _Matrices(layout.offset)
                self._matrices.append(last)
            last.lengths.append(layout.length)
            last.tensors.append(tensor.view(ranks, layout.length))

    def pack(self, packed: torch.Tensor) -> None:
        """Copies the pieces of all ranks into `packed` (ranks x elements), with zeros where there are none."""
        for matrices in self._matrices:
            torch.cat(matrices.tensors, 1, out=matrices.region(packed))
        for layout, tensor in self._others:
            layout.pack(tensor, packed)

    def unpack(self, packed: torch.Tensor) -> None:
        """The inverse of `pack`, of tensors alone."""
        for matrices in self._matrices:
            torch.split_with_sizes_copy(matrices.region(packed), matrices.lengths, 1, out=matrices.tensors)
        for layout, tensor in self._others:
            assert tensor is not None
            layout.unpack(packed, tensor)

    def pack_own(self, row: torch.Tensor) -> None:
        """Copies the pieces of this rank into its packed `row`, of tensors alone; padding is left as it is."""
        for matrices, own in zip(self._matrices, self._own, strict=True):
            torch.cat(own, out=matrices.region(row))
        for layout, tensor in self._others:
            assert tensor is not None
            layout.piece(row, self._position).copy_(tensor[layout.own(self._position)])

    @cached_property
    def _own(self) -> list[list[torch.Tensor]]:
        return [[one[self._position] for one in matrices.tensors] for matrices in self._matrices]


@dataclass(frozen=True)
class _Matrices:
    """Neighbours in a packed bucket that are matrices (ranks x elements).

    start: where they begin in a packed row, in elements. lengths: of their rows.
    """

    start: int
    lengths: list[int] = field(default_factory=list[int])
    tensors: list[torch.Tensor] = field(default_factory=list[torch.Tensor])

    def region(self, packed: torch.Tensor) -> torch.Tensor:
        """Their elements of packed rows, or of one."""
        return packed.narrow(-1, self.start, sum(self.lengths))
