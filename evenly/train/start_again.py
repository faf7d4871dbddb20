"""A run whose ranks have failed is started again: under a plan that needs less memory, or as often as was allowed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from evenly.launcher.agent import FailedRank
from evenly.launcher.restarts import Failure, error_raised, pause_before_restart
from evenly.train.no_room import newest_step, options_with_less, starts_of

if TYPE_CHECKING:
    from evenly.train.options import RunOptions

T = TypeVar("T")


def start_until_done(
    start: Callable[[RunOptions], T],
    options: RunOptions,
    *,
    restarts: int,
    keep_plan: bool,
    stopped: Callable[[], bool] = lambda: False,
) -> T:
    """What `start` returns, which is called again from the newest checkpoint where ranks have failed.

    Where they had no room, it is under a plan that needs less memory, unless keep_plan; else up to `restarts` times an
    hour. stopped: whether somebody has asked the run to stop. Raises the last `FailedRank`.
    """
    failures: list[Failure] = []
    while True:
        started = starts_of(options)
        try:
            return start(options)
        except FailedRank as failed:
            if stopped():
                raise
            less = None if keep_plan else options_with_less(failed, options, started)
            options = _restarted(failed, options, failures, restarts) if less is None else less


def _restarted(failed: FailedRank, options: RunOptions, failures: list[Failure], restarts: int) -> RunOptions:
    """The options of the next start, after a pause; adds to `failures`, and raises `failed` where there is none."""
    if not restarts or failed.exit_code != FailedRank.exit_code:  # a mistake, or a stop that was asked
        raise failed
    step = newest_step(options)
    error = error_raised(failed.kind, failed.step, failed.traceback)
    failures.append(Failure(time.monotonic(), step, error))
    pause = pause_before_restart(failures, restarts)
    if isinstance(pause, str):
        failed.do = "; ".join(filter(None, (pause, failed.do)))
        raise failed
    where = "the beginning" if step is None else f"step {step}"
    print(f"evenly: {failed.asked}: {failed.found}", file=sys.stderr)
    print(f"evenly: restart {len(failures)} in {pause:.0f} s, from {where}", file=sys.stderr, flush=True)
    time.sleep(pause)
    return replace(options, resume=step is not None, step=None)
