"""The sum of the squares of gradients, of which their norm is the root."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import torch

SQUARED_AT_ONCE = 1 << 16  # elements per chunk of a sum of squares; a chunk stays in a core's cache


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
