"""One rank, as the job's code finds torch.distributed: the answers of one device, on any number of ranks.

A loss that sums over ranks, an optimizer that talks and a library that reads its part of a stream are written for
torch.distributed. evenly's own code names its groups; the default group is left to the job, and has one rank.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from evenly.errors import EvenlyError, RunError
from evenly.torch_private import PROCESS_GROUPS, replace_process_groups

OWN, TORCH = str(Path(__file__).parents[1]), str(Path(dist.__file__).parents[1])
FIRST = 1 << 20  # number of the job's first group: those of evenly are counted alike on all ranks


_of_threads: dict[int, list[bool]] = {}  # whether a thread sees one rank, by context, the innermost last
MAIN = threading.get_ident()  # of the thread that others, as those of autograd, see with


def _is_alone() -> bool:
    found = _of_threads.get(threading.get_ident()) or _of_threads.get(MAIN) or [False]
    return found[-1]


_count: Any = type(PROCESS_GROUPS).group_count


class _ProcessGroups(cast("type[Any]", type(PROCESS_GROUPS))):
    """torch's process groups, and a default group of one rank for the job's code, made when it is first needed."""

    single: Any = None
    making = False
    opened = FIRST
    group_count = property(
        lambda self: self.opened if _is_alone() else _count.fget(self),
        lambda self, value: setattr(self, "opened", value) if _is_alone() else _count.fset(self, value),
    )

    @property
    def default_pg(self) -> Any:
        """None for the job's code: `dist.is_initialized` says what it says on one device."""
        return (self.single if self.making else None) if _is_alone() else self._default_pg

    @default_pg.setter
    def default_pg(self, value: Any) -> None:
        self.single = value if _is_alone() else None  # to leave the default group closes all
        if not _is_alone():
            self._default_pg = value


def _default_group(before: Callable[[], Any]) -> Any:
    if not _is_alone() or PROCESS_GROUPS.making:
        return before()
    if PROCESS_GROUPS.single is None:
        hook, PROCESS_GROUPS.making = sys.excepthook, True
        try:
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        finally:
            sys.excepthook, PROCESS_GROUPS.making = hook, False
    return PROCESS_GROUPS.single


def _rendezvous(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _is_alone():
        raise ValueError("evenly makes the process group; leave that line out")
    return before(*args, **kwargs)


replace_process_groups(_ProcessGroups, _default_group, _rendezvous)


@contextmanager
def alone(hides: bool = True) -> Generator[None]:
    """Within, torch.distributed tells this thread, those that work for it, and processes it forks of no other rank."""
    contexts = _of_threads.setdefault(threading.get_ident(), [])
    contexts.append(hides)
    try:
        yield
    except EvenlyError:
        raise
    except Exception as problem:
        _explain(problem)
        raise
    finally:
        contexts.pop()


all_ranks = partial(alone, False)  # for torch's own code, which may ask for the default group


@contextmanager
def looking() -> Generator[None]:
    """Within, the job's code runs alone, as it is written where it is compiled, and what it prints goes nowhere."""
    with redirect_stdout(StringIO()), alone(), torch.compiler.set_stance("force_eager"):
        yield


def _explain(problem: Exception) -> None:
    """Raise a `RunError` from `problem` where the job's code has asked torch.distributed for another rank."""
    frames = traceback.extract_tb(problem.__traceback__)
    asked = [number for number, frame in enumerate(frames) if f"{TORCH}/distributed/" in frame.filename]
    own = [number for number, frame in enumerate(frames) if not frame.filename.startswith((TORCH, __file__))]
    if not asked or not own or own[-1] > asked[-1] or frames[own[-1]].filename.startswith(OWN):
        return
    caller, calls = frames[own[-1]], [frame.name for frame in frames[own[-1] + 1 :] if frame.name != "wrapper"]
    raise RunError(
        f"torch.distributed's {calls[0]} in the job's code ({Path(caller.filename).name}:{caller.lineno})",
        f"a job sees one rank, whatever the plan: {str(problem).splitlines()[0]}",
        "ask for rank 0 of the default group alone; between the steps of a loop of its own a script finds all ranks",
    ) from problem
