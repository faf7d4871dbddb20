"""Samples of stated shapes, and the loss of what a model returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Dataset

SAMPLES = 12
Shapes = dict[str, tuple[str, tuple[int, ...], int]]
"""The tensors of one sample: name -> (kind, shape, most)."""


@dataclass(frozen=True)
class Samples(Dataset[dict[str, torch.Tensor]]):
    """`SAMPLES` samples, each a function of its index."""

    shapes: Shapes
    avoided: frozenset[int] = field(default_factory=frozenset[int])

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 + index)
        return {name: self._drawn(generator, *what) for name, what in self.shapes.items()}

    def _drawn(self, generator: torch.Generator, kind: str, shape: tuple[int, ...], most: int) -> torch.Tensor:
        if kind == "float":
            return torch.randn(shape, generator=generator)
        if kind == "ones":
            return torch.ones(shape, dtype=torch.long)
        if kind == "class":
            return torch.randint(0, most, shape, generator=generator)
        allowed = torch.tensor([i for i in range(1, most) if i not in self.avoided])
        return allowed[torch.randint(0, len(allowed), shape, generator=generator)]


def own_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's own loss where it has one, else the mean of a bounded function of what it returns."""
    outputs = model(**batch)
    own = outputs.get("loss") if hasattr(outputs, "get") else None
    if own is not None and own.requires_grad:
        return own.mean()
    return bounded(outputs)


def bounded(outputs: Any) -> torch.Tensor:
    """The mean of a bounded function of every output that has a gradient."""
    found = [t for t in floating(outputs) if t.requires_grad]
    if not found:
        raise ValueError("no output has a gradient")
    return torch.stack([t.tanh().mean() for t in found]).sum()


def floating(value: Any) -> Iterator[torch.Tensor]:
    """The floating tensors of any nest."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, dict) or hasattr(value, "values"):
        for inner in value.values():
            yield from floating(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from floating(inner)
