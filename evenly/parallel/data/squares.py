"""The sum of the squares of gradients, of which their norm is the root."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from evenly.torch_private import norm_of_each

JOINED = 1 << 13  # elements of small neighbours that are squared as one, after a copy of them
SQUARED_AT_ONCE = 1 << 16  # elements per chunk of a sum of squares


def sum_of_squares(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum over all elements of all tensors, a scalar in float64 on the device of the last."""
    total: torch.Tensor | None = None
    for square in _squares(list(tensors)):
        total = square if total is None else total.to(square.device).add_(square)
    return torch.zeros((), dtype=torch.float64) if total is None else total


def squared_together(lengths: Iterable[int]) -> list[list[int]]:
    """The numbers of tensors that are squared as one: neighbours that are no longer than `JOINED` together.

    A tensor by itself costs the host several calls. lengths: in elements.
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


def _squares(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    for device in dict.fromkeys(one.device for one in tensors if one.is_cuda):
        there = [one for one in tensors if one.device == device]
        # In float64 without a copy of any of them in it.
        yield torch.stack([*norm_of_each(there, 2, dtype=torch.float64)]).square_().sum()
    here = [one for one in tensors if not one.is_cuda]
    for group in squared_together([one.numel() for one in here]):
        yield from _squares_of_chunks([here[number] for number in group])


def _squares_of_chunks(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    flat = torch.cat([one.flatten() for one in tensors]) if len(tensors) > 1 else tensors[0].flatten()
    if flat.numel() <= SQUARED_AT_ONCE or flat.dtype is torch.float64:
        return [_dot(chunk.double()) for chunk in flat.split(SQUARED_AT_ONCE)]
    doubles = torch.empty(SQUARED_AT_ONCE, dtype=torch.float64)  # for all chunks: then it stays in a core's cache
    return [_dot(doubles[: chunk.numel()].copy_(chunk)) for chunk in flat.split(SQUARED_AT_ONCE)]


def _dot(doubles: torch.Tensor) -> torch.Tensor:
    return torch.dot(doubles, doubles)  # vector_norm would convert all of a tensor at once
