"""What tells tensors apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from evenly.data.nest import tensors_in
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


class _Made(TorchDispatchMode):
    """Collects the sizes of the memory that operations have made, in bytes."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self._known = {given.untyped_storage().data_ptr()}
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in tensors_in(found):
            if one.untyped_storage().data_ptr() not in self._known:
                self.sizes.append(one.untyped_storage().nbytes())
                self._known.add(one.untyped_storage().data_ptr())
        return found


def test_it_takes_memory_for_one_part_however_long_the_tensor() -> None:
    tensor = torch.arange(5 * WORDS_AT_ONCE)
    with _Made(tensor) as made:
        fingerprint(tensor)
    assert sum(made.sizes) < 8 * WORDS_AT_ONCE + 100
