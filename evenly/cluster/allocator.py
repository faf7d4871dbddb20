"""The C library's allocator, told to keep what a rank frees.

A training step frees its activations and needs as much again in the next. glibc hands large freed blocks back to the
system, and the next step takes a page fault for every 4 KiB of them: on a CPU up to a third of a step's time.
"""

from __future__ import annotations

import ctypes
import sys

# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MOST_KEPT_BYTES = 2**31 - 1  # what fits a C int
_LARGEST_FROM_HEAP_BYTES = 32 * 2**20  # the most that glibc accepts


def keep_freed_memory() -> bool:
    """Lets this process keep up to 2 GiB of freed memory for itself; whether the C library could be told so."""
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is None:
        return False
    kept = mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES)
    return bool(kept) and bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP_BYTES))
