"""The sum of the squares of gradients, of which their norm is the root."""

from __future__ import annotations

from collections.abc import Iterable

import torch

JOINED = 1 << 13  # elements of small neighbours that are squared as one, after a copy of them
SQUARED_AT_ONCE = 1 << 16  # elements per chunk of a sum of squares


def sum_of_squares(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum over all elements of all tensors, a scalar in float64."""
    total: torch.Tensor | None = None
    given = list(tensors)
    for group in squared_together([0 if one.is_cuda else one.numel() for one in given]):
        for square in _squares([given[number] for number in group]):
            total = square if total is None else total.to(square.device).add_(square)
    return torch.zeros((), dtype=torch.float64) if total is None else total


def squared_together(lengths: Iterable[int]) -> list[list[int]]:
    """The numbers of tensors that are squared as one: neighbours that are no longer than `JOINED` together.

    A tensor by itself costs the host several calls. lengths: in elements, 0 for one that is squared by itself.
    """
    groups: list[list[int]] = []
    room = 0
    for number, length in enumerate(lengths):
        if not 0 < length <= room:
            groups.append([])
            room = JOINED if length else 0
        groups[-1].append(number)
        room -= length
    return groups


def _squares(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The sums of the squares of all elements of `tensors`, chunk by chunk."""
    if tensors[0].is_cuda:
        return [torch.linalg.vector_norm(one, dtype=torch.float64) ** 2 for one in tensors]
    flat = torch.cat([one.flatten() for one in tensors]) if len(tensors) > 1 else tensors[0].flatten()
    if flat.numel() <= SQUARED_AT_ONCE or flat.dtype is torch.float64:
        return [_dot(chunk.double()) for chunk in flat.split(SQUARED_AT_ONCE)]
    doubles = torch.empty(SQUARED_AT_ONCE, dtype=torch.float64)  # for all chunks: then it stays in a core's cache
    return [_dot(doubles[: chunk.numel()].copy_(chunk)) for chunk in flat.split(SQUARED_AT_ONCE)]


def _dot(doubles: torch.Tensor) -> torch.Tensor:
    return torch.dot(doubles, doubles)  # vector_norm would convert all of a tensor at once
