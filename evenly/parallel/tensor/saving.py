"""Checkpoints of a model that is split over the tensor axis: whole tensors, which any plan can take up again.

Each split tensor is gathered as it is saved, and the rank at position 0 of the axis keeps it; as it is read every rank
takes its part. Parts that the data axis cuts further are DTensors of the part's shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from evenly.parallel.tensor.axis import own_part
from evenly.parallel.tensor.layout import Layout
from evenly.parallel.tensor.model import SplitModel


class SplitCheckpoint:
    """Between what this rank holds and what a checkpoint does. Tensors are named by what belongs to a parameter.

    owners: full name of a tensor in the checkpoint -> name of the parameter that it belongs to.
    """

    def __init__(self, split: SplitModel, owners: Mapping[str, str]) -> None:
        self._split, self._owners = split, owners

    def gather(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors as a checkpoint has them; those that are split on one rank of the axis only. A collective."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            layout = self._layout(name, tensor.shape)
            if layout is None:
                found[name] = tensor
                continue
            part: Any = tensor.detach()
            whole = self._split.full_view(self._owners[name], part.full_tensor() if isinstance(part, DTensor) else part)
            if self._split.axis.position == 0:
                found[name] = whole.cpu()
        return found

    def shapes_here(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """From shapes in the checkpoint to those of what this rank holds."""
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in shapes.items():
            layout = self._layout(name, shape, whole=True)
            found[name] = shape if layout is None else layout.part(shape, self._split.axis.position)
        return found

    def new_target(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Where to read a checkpoint into: what this rank holds, and whole tensors in the place of parts."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            layout = self._layout(name, tensor.shape)
            found[name] = tensor if layout is None else torch.empty(layout.full_shape(tensor.shape), dtype=tensor.dtype)
        return found

    @torch.no_grad()
    def set_value(self, read: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
        """Fills the parts among `tensors` from the wholes that were read."""
        for name, tensor in tensors.items():
            layout = self._layout(name, tensor.shape)
            if layout is None:
                continue
            part = own_part(read[name], layout, self._split.axis.position).to(tensor.device)
            if isinstance(tensor, DTensor):
                part = distribute_tensor(part, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.copy_(part)

    def _layout(self, name: str, shape: Sequence[int], *, whole: bool = False) -> Layout | None:
        """The layout of what belongs to a split parameter and has its shape; other state (a counter) is the same on all
        ranks.
        """
        owner = self._owners.get(name, "")
        layout = self._split.layouts.get(owner)
        if layout is None:
            return None
        part = tuple(self._split.parameters[owner].shape)
        return layout if tuple(shape) == (layout.full_shape(part) if whole else part) else None
