"""What tells tensors apart."""

from __future__ import annotations

import pytest
import torch

from evenly.parallel.core.mutation_guard import WORDS_AT_ONCE, fingerprint


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.bfloat16, torch.float32, torch.int64, torch.complex128]
)
def test_elements_count_by_their_places(dtype: torch.dtype) -> None:
    tensor = (torch.arange(37) % 5 == 0).to(dtype)
    known = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == known
    assert fingerprint(torch.cat([tensor[:1], tensor])[1:]) == known  # wherever it begins in memory
    for number in (1, 5, 36):
        assert fingerprint(tensor.roll(number)) != known
    assert fingerprint(tensor[:-1]) != known


def test_long_ones() -> None:
    tensor = torch.arange(3 * WORDS_AT_ONCE + 5)
    known = fingerprint(tensor)
    swapped = tensor.clone()
    swapped[[1, 2 * WORDS_AT_ONCE + 1]] = tensor[[2 * WORDS_AT_ONCE + 1, 1]]
    assert len({known, fingerprint(swapped), fingerprint(tensor.flip(0))}) == 3


def test_order_in_memory_does_not_matter() -> None:
    tensor = torch.randn(4, 5)
    assert fingerprint(tensor.t().contiguous().t()) == fingerprint(tensor)
