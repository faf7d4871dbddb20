"""Failures for want of memory: recognized by their exception, or by what the kernel has counted."""

from __future__ import annotations

import errno
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from evenly.errors import EvenlyError

# What torch and its libraries raise as errors of any kind: of the CPU's allocator, of C++, of oneDNN, of GPUs.
_TEXTS = re.compile(
    r"DefaultCPUAllocator: can't allocate memory|DefaultCPUAllocator: not enough memory|\bbad_alloc\b"
    r"|could not create a memory object|\b(?:CUDA|HIP|XPU) out of memory|\b(?:CUDA|HIP) error: out of memory"
    r"|CU(?:BLAS|SPARSE|SOLVER|DNN|FFT)_(?:STATUS_)?ALLOC_FAILED|\bMemoryError\b|\bOutOfMemoryError\b"
    rf"|\[Errno {errno.ENOMEM}\]"
)
_CLASS = "OutOfMemoryError"  # of torch, which is not imported here
NO_THREAD = "can't start new thread"
_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
KILLED_CHILD = "killed by signal: Killed"  # what torch says of a data worker


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, says that there was no room, on a GPU or in the host's memory."""
    return any(_says_so(one) for one in _causes(error))


def _says_so(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or any(kind.__name__ == _CLASS for kind in type(error).__mro__):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError) and NO_THREAD in str(error):  # no room for its stack, or too many of them
        return any(resource.getrlimit(one)[0] != resource.RLIM_INFINITY for one in _LIMITS)
    # Errors of other ranks and of data workers arrive as text.
    return isinstance(error, (RuntimeError, EvenlyError)) and _TEXTS.search(str(error)) is not None


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__


def kills_for_memory(root: Path = Path("/")) -> int:
    """How many processes of this one's control group the kernel has killed because there was no memory left.

    Of version 2, then 1; 0 where nothing counts them. root: of the file system.
    """
    groups = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            homes, name = (groups, groups / "unified"), "memory.events"
        elif "memory" in controllers.split(","):
            homes, name = (groups / controllers, groups / "memory"), "memory.oom_control"
        else:
            continue
        # Within a container the path may be the host's, and the group is at the root.
        for folder in (place for home in homes for place in (home / path.lstrip("/"), home)):
            if found := re.search(r"^oom_kill (\d+)$", _read(folder / name), re.MULTILINE):
                return int(found[1])
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
