"""How much memory a device of a run has: what its peak is held against."""

from __future__ import annotations

import psutil
import torch

from evenly.comm.world import World
from evenly.launcher.allocator import cgroup_limit_bytes


def memory_limit_bytes(world: World) -> int:
    """Bytes of a GPU; on CPUs an equal part of the machine's, or of its control group's, for each rank of the node."""
    if world.device.startswith("cuda"):
        return int(torch.cuda.get_device_properties(torch.device(world.device)).total_memory)
    whole = int(psutil.virtual_memory().total)
    return min(whole, cgroup_limit_bytes() or whole) // world.local_size
