"""Where the pieces of a parameter that is cut along dim 0 are in a packed bucket; see `partition`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
        """The elements of a piece."""
        return self.piece_rows * torch.Size(self.row_shape).numel()

    def own(self, position: int) -> slice:
        """The rows of the piece at `position`."""
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
        region = row.narrow(0, self.offset, self.length).view(self.piece_rows, *self.row_shape)
        return region.narrow(0, 0, rows.stop - rows.start)

    def _copy_pieces(
        self, tensor: torch.Tensor, packed: torch.Tensor, copy: Callable[[torch.Tensor, torch.Tensor], object]
    ) -> None:
        """Calls `copy` with rows of `tensor` and their region of `packed`: all full pieces at once, then the last."""
        region = packed.narrow(1, self.offset, self.length)
        region = region.view(packed.shape[0], self.piece_rows, *self.row_shape)
        full, remainder = divmod(self.rows, self.piece_rows)
        if full:
            rows = tensor.narrow(0, 0, full * self.piece_rows) if remainder else tensor
            copy(rows.view(full, self.piece_rows, *self.row_shape), region.narrow(0, 0, full))
        if remainder:
            copy(tensor.narrow(0, full * self.piece_rows, remainder), region[full].narrow(0, 0, remainder))
