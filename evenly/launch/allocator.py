"""The C library's allocator, made to keep what a rank frees.

A training step frees its activations and needs as much again in the next. glibc hands large freed blocks back to the
system, and the next step takes a page fault for every 4 KiB of them: on a CPU up to a third of a step's time.

Blocks above 32 MiB, such as the logits of a large vocabulary, are kept only where memory is plenty. Torch asks for
aligned memory, which does not fit where as much was freed and a few bytes of it are taken since: so a rank comes to
hold more than it needs, by half in steps that are all alike, and by ever more where lengths vary.

While a model is built piece by piece it is the other way round: what is kept is of the wrong size for what comes next,
since torch asks for aligned memory, which does not fit where as much was freed.
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
_PLENTY = 2  # times what ranks hold must be left besides it, and so much at most a rank may come to hold
_SETTLED = 2  # steps after which a rank has held all that a step needs, the optimizer's state too


def keep_freed_memory() -> bool:
    """Lets this process keep up to 2 GiB of freed memory, in blocks of up to 32 MiB; whether it can."""
    return _tell(_MOST_KEPT_BYTES, _LARGEST_FROM_HEAP_BYTES)


def hand_back_freed_memory() -> bool:
    """Has this process hand back every large block once it is freed; whether the C library can."""
    return _tell(_HANDED_BACK_BYTES, _HANDED_BACK_BYTES)


class LargeBlocks:
    """Keeps freed blocks of any size, from the second step on, while memory is plenty.

    ranks: of this machine.
    """

    def __init__(self, *, ranks: int) -> None:
        self._ranks, self._steps, self._held_bytes = ranks, 0, 0
        self.kept = False

    def after_step(self, peak_bytes: int, free_bytes: Callable[[], int]) -> None:
        """Decides for the steps to come.

        peak_bytes: the most that a rank has held so far. free_bytes: tells what is left on the machine besides it.
        """
        self._steps += 1
        if self._steps == _SETTLED:
            self._held_bytes = peak_bytes
            plenty = free_bytes() >= _PLENTY * peak_bytes * self._ranks
            self.kept = plenty and _tell(_MOST_KEPT_BYTES, _LARGEST_FROM_HEAP_BYTES, own_mappings=0)
        elif self.kept and peak_bytes > _PLENTY * self._held_bytes:
            self.kept = False
            keep_freed_memory()


def free_memory_bytes() -> int:
    """What processes may still take here: of the machine, or less where their control group has a limit."""
    import psutil

    free, limit = int(psutil.virtual_memory().available), cgroup_limit_bytes()
    if limit is None:
        return free
    return min(free, limit - (_first_number(_CGROUP, "memory.current", "memory/memory.usage_in_bytes") or 0))


def cgroup_limit_bytes(root: Path = _CGROUP) -> int | None:
    """The memory limit of this process's control group (version 2, then 1), None without one."""
    return _first_number(root, "memory.max", "memory/memory.limit_in_bytes")


def _first_number(root: Path, *names: str) -> int | None:
    """What the first of these files says that there is; None where it says no number."""
    for name in names:
        try:
            text = (root / name).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None


def _tell(most_kept: int, largest_from_heap: int, *, own_mappings: int = _OWN_MAPPINGS) -> bool:
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is None:
        return False
    asked = {_M_TRIM_THRESHOLD: most_kept, _M_MMAP_THRESHOLD: largest_from_heap, _M_MMAP_MAX: own_mappings}
    return all(bool(mallopt(number, value)) for number, value in asked.items())
