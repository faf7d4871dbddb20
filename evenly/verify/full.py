"""Sharded tensors in full, all of one mesh with one collective: one for each takes a millisecond of every rank."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from evenly.comm.collectives import all_gather
from evenly.comm.groups import Group


def full_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`tensors`, each in full; a collective of the ranks that hold parts of the same ones, in the same order."""
    found = dict(tensors)
    together: dict[tuple[DeviceMesh, torch.dtype], dict[str, DTensor]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            if _is_cut_once(tensor):
                together.setdefault((tensor.device_mesh, tensor.dtype), {})[name] = tensor
            else:
                there: Any = tensor.to(tensor.device_mesh.device_type)
                found[name] = there.full_tensor()
    for (mesh, _), cut in together.items():
        found |= _joined(cut, mesh)
    return found


def _is_cut_once(tensor: DTensor) -> bool:
    """Whether it is cut along dim 0, and over the last axis of its mesh alone."""
    *others, last = tensor.placements
    return last == Shard(0) and all(one == Replicate() for one in others)


def _joined(cut: Mapping[str, DTensor], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    group = Group.of(mesh.get_group(mesh.ndim - 1), "shard", mesh.device_type)
    # As torch cuts: all have as many rows but the last ones, which may have fewer.
    lengths = [-(-tensor.shape[0] // group.size) * prod(tensor.shape[1:]) for tensor in cut.values()]
    # What an offloaded optimizer steps is on the host.
    parts = [tensor.to_local().detach().to(mesh.device_type).flatten() for tensor in cut.values()]
    padding = [part.new_empty(length - part.numel()) for part, length in zip(parts, lengths, strict=True)]
    packed = torch.cat([one for pair in zip(parts, padding, strict=True) for one in pair])
    ranks = all_gather(packed[None], group, sizes=[1] * group.size).split(lengths, dim=1)
    return {
        name: pieces.flatten()[: tensor.numel()].view(tensor.shape)
        for (name, tensor), pieces in zip(cut.items(), ranks, strict=True)
    }
