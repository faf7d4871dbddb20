"""Parameters that share memory without being one parameter.

Each is stepped by itself, so that the memory is stepped twice; and a copy of the model, in another type or in parts,
has them apart. Views of one memory that do not overlap (the weights of an LSTM on a GPU) are parameters like others.
"""

from __future__ import annotations

import torch
from torch import nn

from evenly.torch_private import memory_key


def find_overlapping(model: nn.Module) -> tuple[str, str] | None:
    """The names of two parameters that share an element of memory; None where no two do."""
    by_memory: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.layout is torch.strided and parameter.numel():
            by_memory.setdefault(memory_key(parameter), []).append((name, parameter))
    for together in by_memory.values():
        if len(together) > 1 and (found := _overlapping(together)):
            return found
    return None


def _overlapping(named: list[tuple[str, torch.Tensor]]) -> tuple[str, str] | None:
    """As `find_overlapping`, of tensors in one memory."""
    owner = torch.zeros(
        max(_end(tensor) for _, tensor in named), dtype=torch.int32
    )  # per byte, 1 + the first to use it
    for number, (name, tensor) in enumerate(named, start=1):
        size = tensor.element_size()
        strides = [stride * size for stride in tensor.stride()]
        used = owner.as_strided((*tensor.shape, size), (*strides, 1), tensor.storage_offset() * size)
        if before := int(used.max()):
            return named[before - 1][0], name
        used.fill_(number)
    return None


def _end(tensor: torch.Tensor) -> int:
    """The bytes from the begin of its memory to its last element."""
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + last + 1) * tensor.element_size()
