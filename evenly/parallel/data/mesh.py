"""The groups of ranks that ZeRO shards over, as torch's device mesh and as `Group`s."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from evenly.comm.groups import Group
from evenly.comm.world import World
from evenly.data.alone import all_ranks


@all_ranks()
def shard_mesh(world: World, shard: int) -> DeviceMesh:
    """The data axis as a mesh of replicate x shard; `shard`: size of the shard groups."""
    device, data = torch.device(world.device).type, world.group("data").size
    names, sizes = ("replicate", "shard"), (data // shard, shard)
    if data == world.size:
        return init_device_mesh(device, sizes, mesh_dim_names=names)
    # Ranks are numbered as in `Plan.axes`: the pipeline axis outside the data axis, the tensor axis inside.
    outside, inside = (world.groups[axis].size if axis in world.groups else 1 for axis in ("pipeline", "tensor"))
    names_of_all = ("outside", *names, "inside")
    return init_device_mesh(device, (outside, *sizes, inside), mesh_dim_names=names_of_all)[names]


def groups_of(mesh: DeviceMesh, data: Group) -> tuple[Group, Group | None]:
    """This rank's shard group, and the group of ranks with the same pieces; None if there is only this rank."""
    if mesh.shape[0] == 1:
        return data, None

    def group(name: str) -> Group:
        return Group.of(mesh[name].get_group(), name, str(data.device), data.recorder, checked=data.checked)

    return group("shard"), group("replicate")
