"""Tunes the C library's allocator to keep memory that a rank frees.

A training step frees its activations and needs as much again in the next. glibc hands large freed blocks back to the
system, and the next step takes a page fault for every 4 KiB of them: on a CPU up to a third of a step's time.

Blocks above 32 MiB, such as the logits of a large vocabulary, are kept only while memory is plentiful: torch asks for
aligned memory, which does not fit into a freed block of the same size once a few bytes of it are in use. So the heap
fragments, by half in steps of one shape, and further where lengths vary.

Where samples vary in length, a rank would keep more and more, in pieces that no later step finds whole: what lives on
lies between them, the primitives of oneDNN above all, made when a length comes. What it holds is looked at from time to
time; where it has grown, all that was freed is returned, which the next step pays for.

While a model is built piece by piece, freed memory is returned instead: it rarely fits the next allocation.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4
_MOST_KEPT_BYTES = 2**31 - 1  # what fits a C int
_LARGEST_FROM_HEAP_BYTES = 32 * 2**20  # the most that glibc accepts
_HANDED_BACK_BYTES = 2**20
_OWN_MAPPINGS = 65_536  # blocks that may lie outside of the heap, which are handed back once freed: glibc's default
_CGROUP = Path("/sys/fs/cgroup")
_MARGIN = 2  # free memory needed, and largest growth allowed, as a multiple of the ranks' peak
_WARMUP_STEPS = 2  # steps until the peak includes the optimizer's state
_STEPS_PER_LOOK = 40  # at how much the process holds
_SETTLED_STEPS = 120  # by then it holds what steps need
_GROWTH = 1.03  # from then on, until freed memory is returned


def keep_freed_memory() -> bool:
    """Lets this process keep up to 2 GiB of freed memory, in blocks of up to 32 MiB; whether it can."""
    return _set_thresholds(_MOST_KEPT_BYTES, _LARGEST_FROM_HEAP_BYTES)


def hand_back_freed_memory() -> bool:
    """Lets this process return every large block when it is freed; whether the C library can."""
    return _set_thresholds(_HANDED_BACK_BYTES, _HANDED_BACK_BYTES)


class FreedMemory:
    """Keeps freed blocks of any size, from the second step on, while memory is plenty; but returns what has grown.

    ranks: of this machine.
    """

    def __init__(self, *, ranks: int) -> None:
        self._ranks, self._steps, self._warm_peak_bytes, self._settled_bytes = ranks, 0, 0, 0
        self.active = False

    def after_step(self, peak_bytes: int, free_bytes: Callable[[], int]) -> None:
        """Decides whether to keep large blocks in the next steps, and whether to return what was freed.

        peak_bytes: largest peak of a rank so far. free_bytes: returns the free memory of the machine.
        """
        self._steps += 1
        if self._steps == _WARMUP_STEPS:
            self._warm_peak_bytes = peak_bytes
            has_margin = free_bytes() >= _MARGIN * peak_bytes * self._ranks
            self.active = has_margin and _set_thresholds(_MOST_KEPT_BYTES, _LARGEST_FROM_HEAP_BYTES, own_mappings=0)
        elif self.active and peak_bytes > _MARGIN * self._warm_peak_bytes:
            self.active = False
            keep_freed_memory()
        if self._steps % _STEPS_PER_LOOK == 0:
            self._look(resident_bytes())

    def _look(self, resident: int) -> None:
        if self._steps <= _SETTLED_STEPS:
            self._settled_bytes = resident
        elif resident > _GROWTH * self._settled_bytes:
            return_freed_memory()


def return_freed_memory() -> bool:
    """Returns to the system what this process has freed, in whole pages; whether the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    return trim is not None and bool(trim(0))


def resident_bytes() -> int:
    """Memory that this process holds."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def free_memory_bytes() -> int:
    """Memory that processes may still allocate: of the machine, or less within the limit of their control group."""
    import psutil

    free, limit = int(psutil.virtual_memory().available), cgroup_limit_bytes()
    if limit is None:
        return free
    return min(free, limit - (_first_number(_CGROUP, "memory.current", "memory/memory.usage_in_bytes") or 0))


def cgroup_limit_bytes(root: Path = _CGROUP) -> int | None:
    """The memory limit of this process's control group (version 2, then 1), None without one."""
    return _first_number(root, "memory.max", "memory/memory.limit_in_bytes")


def _first_number(root: Path, *names: str) -> int | None:
    """The number in the first of these files that exists; None if it is no number."""
    for name in names:
        try:
            text = (root / name).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None


def _set_thresholds(most_kept: int, largest_from_heap: int, *, own_mappings: int = _OWN_MAPPINGS) -> bool:
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is None:
        return False
    asked = {_M_TRIM_THRESHOLD: most_kept, _M_MMAP_THRESHOLD: largest_from_heap, _M_MMAP_MAX: own_mappings}
    return all(bool(mallopt(number, value)) for number, value in asked.items())
