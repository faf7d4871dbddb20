"""Where the elements of a split dim lie: numbers only."""

from __future__ import annotations

import pytest
import torch

from evenly.parallel.tensor.axis import own_part
from evenly.parallel.tensor.layout import Layout


def parts(tensor: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    return [own_part(tensor, layout, rank) for rank in range(layout.ranks)]


def test_units_are_dealt_and_every_outer_part_gives_its_own() -> None:
    packed = torch.arange(3 * 4 * 2)  # 3 parts of 4 units of 2
    first, second = parts(packed, Layout.of(0, 3, 4, 2, 2))
    assert first.tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19]
    assert second.tolist() == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]


def test_units_that_do_not_divide_are_cut_as_torch_cuts() -> None:
    tensor = torch.arange(7 * 3)
    mine = parts(tensor, Layout.of(0, 1, 7, 3, 3))
    assert [part.tolist() for part in mine] == [part.flatten().tolist() for part in tensor.view(7, 3).chunk(3)]
    assert Layout.of(0, 1, 7, 3, 3).sizes == (9, 9, 3)


def test_a_rank_without_a_unit_is_no_layout() -> None:
    with pytest.raises(AssertionError, match="without a unit"):
        Layout.of(0, 1, 5, 1, 4)  # 2, 2, 1 and nothing


def test_layouts_are_equal_where_ranks_hold_the_same() -> None:
    heads, groups = Layout.of(1, 1, 8, 64, 2), Layout.of(1, 1, 2, 256, 2)
    assert heads == groups
    assert Layout.of(1, 1, 3, 64, 2) != Layout.of(1, 3, 2, 32, 2)


VIEWS = [
    # shape, layout, viewed as, which dim of it is split
    ((2, 5, 24), Layout.of(2, 1, 4, 6, 2), (2, 5, 4, 6), 2),
    ((2, 5, 4, 6), Layout.of(2, 1, 4, 1, 2), (2, 5, 24), 2),
    ((2, 5, 24), Layout.of(2, 1, 4, 6, 2), (10, 24), 1),
    ((2, 5, 24), Layout.of(2, 3, 4, 2, 2), (2, 5, 3, 4, 2), 3),
    ((2, 5, 3, 4, 2), Layout.of(3, 1, 4, 1, 4), (2, 5, 24), 2),
    ((2, 5, 24), Layout.of(2, 2, 4, 3, 4), (2, 5, 8, 3), 2),
    ((2, 3, 8), Layout.of(1, 1, 3, 1, 2), (2, 24), 1),
    ((1, 1, 24), Layout.of(2, 1, 4, 6, 2), (1, 24, 1, 1), 1),
    ((6, 4), Layout.of(0, 1, 6, 1, 2), (24,), 0),
]


@pytest.mark.parametrize(("shape", "layout", "target", "dim"), VIEWS)
def test_a_view_of_a_part_is_the_part_of_the_view(
    shape: tuple[int, ...], layout: Layout, target: tuple[int, ...], dim: int
) -> None:
    viewed = layout.viewed(shape, target)
    assert viewed is not None
    assert viewed.dim == dim
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for rank, part in enumerate(parts(whole, layout)):
        assert layout.full_shape(part.shape) == shape
        assert torch.equal(part.reshape(viewed.part(target, rank)), own_part(whole.view(target), viewed, rank))


def test_a_view_across_the_cut_has_no_layout() -> None:
    assert Layout.of(2, 1, 4, 6, 4).viewed((2, 5, 24), (2, 5, 2, 12)) is None  # 4 units over 2
    assert Layout.of(0, 1, 3, 1, 2).viewed((3, 4), (2, 6)) is None
    assert Layout.of(0, 1, 4, 1, 2).viewed((4, 3), (3, 4)) is None


def test_pieces_of_a_packed_dim() -> None:
    packed = Layout.of(0, 3, 4, 2, 2)
    assert packed.pieces([8, 8, 8]) == [Layout.of(0, 1, 4, 2, 2)] * 3
    assert packed.pieces([16, 8]) == [Layout.of(0, 2, 4, 2, 2), Layout.of(0, 1, 4, 2, 2)]
    assert packed.pieces([12, 12]) is None
    whole = torch.arange(24)
    for rank, part in enumerate(parts(whole, packed)):
        for mine, piece in zip(part.chunk(3), whole.chunk(3), strict=True):
            assert torch.equal(mine, own_part(piece, Layout.of(0, 1, 4, 2, 2), rank))
