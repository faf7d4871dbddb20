"""The C library's allocator, told to keep what a rank frees.

A training step frees its activations and needs as much again in the next. glibc hands large freed blocks back to the
system, and the next step takes a page fault for every 4 KiB of them: on a CPU up to a third of a step's time.

While a model is built piece by piece it is the other way round: what is kept is of the wrong size for what comes next,
since torch asks for aligned memory, which does not fit where as much was freed.
"""

from __future__ import annotations

import ctypes
import sys

# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MOST_KEPT_BYTES = 2**31 - 1  # what fits a C int
_LARGEST_FROM_HEAP_BYTES = 32 * 2**20  # the most that glibc accepts
_HANDED_BACK_BYTES = 2**20


def keep_freed_memory() -> bool:
    """Lets this process keep up to 2 GiB of freed memory for itself; whether the C library could be told so."""
    return _tell(_MOST_KEPT_BYTES, _LARGEST_FROM_HEAP_BYTES)


def hand_back_freed_memory() -> bool:
    """Has this process hand back every large block once it is freed; whether the C library could be told so."""
    return _tell(_HANDED_BACK_BYTES, _HANDED_BACK_BYTES)


def _tell(most_kept: int, largest_from_heap: int) -> bool:
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is None:
        return False
    kept = mallopt(_M_TRIM_THRESHOLD, most_kept)
    return bool(kept) and bool(mallopt(_M_MMAP_THRESHOLD, largest_from_heap))
