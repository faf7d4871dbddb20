"""Tensors that are cut over ranks, put together for comparison."""

from __future__ import annotations

import torch
from kept_ranks import KeptRanks, group_of_all
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from evenly.verify.full import full_tensors

SHAPES = ((7, 3), (1,), (2, 0, 3), (4,), (3, 2, 2), (5, 1))  # fewer rows than ranks, none of an element, some over


def as_they_were() -> list[bool]:
    with group_of_all():
        mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("replicate", "shard"))
        draw = torch.Generator().manual_seed(1)
        plain = {f"{shape}": torch.randn(shape, generator=draw, dtype=torch.float64) for shape in SHAPES}
        plain |= {f"{name} float32": tensor.float() for name, tensor in plain.items()}
        cut = {name: distribute_tensor(tensor, mesh, [Replicate(), Shard(0)]) for name, tensor in plain.items()}
        by_columns = torch.randn(4, 6, generator=draw)
        given = {"columns": distribute_tensor(by_columns, mesh, [Replicate(), Shard(1)]), **cut, "whole": by_columns}
        found = full_tensors(given)
        assert not any(isinstance(tensor, DTensor) for tensor in found.values())
        expected = {"columns": by_columns, **plain, "whole": by_columns}
        assert [*found] == [*expected]
        return [torch.equal(found[name], tensor) for name, tensor in expected.items()]


def test_tensors_cut_over_ranks_are_as_they_were(ranks: KeptRanks) -> None:
    assert ranks.run(as_they_were, size=3) == [[True] * (2 + 2 * len(SHAPES))] * 3
