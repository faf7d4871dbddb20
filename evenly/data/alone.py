"""Reading a stream as one device would: libraries that deal samples to ranks by themselves find one rank.

Rank 0 reads for all. A library that asks torch.distributed or the environment which part of the samples is this
process's (webdataset, mosaicml-streaming, litdata, torchdata) would leave out those of the others.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

ALONE: dict[str, Any] = {"is_initialized": False, "get_rank": 0, "get_world_size": 1}


@contextmanager
def alone() -> Generator[None]:
    """Within, torch.distributed tells this thread, and processes that are forked, of no other rank.

    Other threads of this process (one that writes a checkpoint) find what there is.
    """
    thread, process = threading.get_ident(), os.getpid()

    def reads() -> bool:
        return os.getpid() != process or threading.get_ident() == thread

    found = {name: getattr(dist, name) for name in ALONE}
    for name, value in ALONE.items():
        setattr(dist, name, _replaced(value, reads, found[name]))
    try:
        yield
    finally:
        for name, function in found.items():
            setattr(dist, name, function)


def _replaced(value: Any, reads: Callable[[], bool], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: value if reads() else otherwise(*args, **kwargs)
