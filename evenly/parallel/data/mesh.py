"""The groups of ranks that `zero` cuts among, as torch's device mesh and as groups of ours."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from evenly.comm.groups import Group
from evenly.comm.world import World


def shard_mesh(world: World, shard: int) -> DeviceMesh:
    """The data axis as groups of `shard` ranks, which cut among themselves and all hold the same."""
    device, data = torch.device(world.device).type, world.group("data").size
    names, sizes = ("replicate", "shard"), (data // shard, shard)
    if data == world.size:
        return init_device_mesh(device, sizes, mesh_dim_names=names)
    # As the world's ranks are numbered (`Plan.axes`): the pipeline outside the data axis, the tensor axis inside.
    outside, inside = (world.groups[axis].size if axis in world.groups else 1 for axis in ("pipeline", "tensor"))
    names_of_all = ("outside", *names, "inside")
    return init_device_mesh(device, (outside, *sizes, inside), mesh_dim_names=names_of_all)[names]


def groups_of(mesh: DeviceMesh, data: Group) -> tuple[Group, Group | None]:
    """This rank's shard group, and the ranks that hold the same pieces; None where there are no others."""
    if mesh.shape[0] == 1:
        return data, None

    def group(name: str) -> Group:
        return Group.of(mesh[name].get_group(), name, str(data.device), data.recorder, checked=data.checked)

    return group("shard"), group("replicate")
