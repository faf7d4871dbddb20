"""How much memory a rank has taken so far."""

from __future__ import annotations

import resource
import sys


def peak_bytes(device: str) -> int:
    """Peak of this rank in bytes: of the allocator on a GPU, of the resident set on the CPU."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
