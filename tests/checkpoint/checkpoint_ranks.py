"""What kept ranks do around a test of this folder: they join, act with a group of their own, and part."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

LIMIT = timedelta(seconds=300)


def in_group(act: Callable[..., Any], *args: Any) -> Any:
    """Result of `act(group, rank, *args)`; `group` is a gloo group that nothing else uses."""
    import torch.distributed as dist

    from evenly.comm.groups import Group

    dist.init_process_group("gloo", timeout=LIMIT)
    group = Group.of(dist.new_group(backend="gloo", timeout=LIMIT), "files")
    result = act(group, dist.get_rank(), *args)
    dist.barrier()
    dist.destroy_process_group()
    return result
