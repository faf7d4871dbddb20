"""A run whose ranks had no room goes on under a plan that needs less memory; the ranks choose it (`planner/leaner`)."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from evenly.checkpoint.folder import CheckpointFolder
from evenly.errors import UserError, printable
from evenly.launcher.agent import FailedRank
from evenly.observe.attempts import EndedAttempt, note_end, plans_started
from evenly.observe.run_folder import RunFolder

if TYPE_CHECKING:
    from evenly.train.options import RunOptions


def options_with_less(failed: FailedRank, options: RunOptions, started: int) -> RunOptions | None:
    """The options with which the run is started again under another plan; None where it is not. Says so.

    started: how many starts the run's folder knew before this one. A plan that was taken for want of memory and cannot
    run the job is passed over.
    """
    if options.out is None:
        return None
    folder, no_room = RunFolder(options.out), failed.kind == "memory"
    plans = plans_started(folder)
    refused = failed.exit_code == UserError.exit_code and bool(options.no_room) and not failed.resuming
    if len(plans) <= started or not (no_room or refused):
        return None
    step, found = newest_step(options), " ".join(failed.found.split())
    ended = EndedAttempt(
        plan=plans[-1],
        ended="no room" if no_room else "refused",
        rank=failed.rank,
        step=failed.step,
        found=found,
        from_step=step,
    )
    note_end(folder, ended)
    where = "the beginning" if step is None else f"step {step}"
    said = f"evenly: {failed.asked} under {ended.plan}: {found}"
    print(printable(f"{said}; trying a plan that needs less memory, from {where}"), file=sys.stderr, flush=True)
    again = replace(options, resume=step is not None)
    if not no_room:
        return replace(again, refused=(*options.refused, ended.plan))
    long_step = steps_recorded(folder) if failed.step is None else failed.step - 1
    return replace(again, no_room=(*options.no_room, ended.plan), long_step=long_step)


def steps_recorded(folder: RunFolder) -> int:
    """The steps that the run had done when it last wrote one: of a rank that was killed nobody knows more."""
    try:
        lines = folder.metrics.read_text(encoding="utf-8").splitlines()
        steps = (json.loads(line).get("step") for line in reversed(lines) if '"loss"' in line)
        return int(next(steps, 0))
    except (OSError, ValueError, TypeError, AttributeError):
        return 0


def starts_of(options: RunOptions) -> int:
    """How many starts the run's folder knows before the next one; a new run forgets those of another."""
    goes_on = options.resume or options.no_room
    return len(plans_started(RunFolder(options.out))) if options.out is not None and goes_on else 0


def newest_step(options: RunOptions) -> int | None:
    places = [CheckpointFolder(place) for place in (options.out, options.save_to) if place is not None]
    return max((step for place in places for step in place.steps()), default=None)
