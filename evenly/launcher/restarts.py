"""Whether a run whose ranks have failed is started again, decided from its failures so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WINDOW_S = 3600.0  # failures longer ago do not count
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


@dataclass(frozen=True)
class Failure:
    """One failure of a run.

    time_s: when, by a clock that only goes forward. step: of the checkpoint that the run can go on from, None without
    one. error: what a rank has raised, with its step; "" where one was killed or stood still. counts: whether it is one
    of those that are borne so many times.
    """

    time_s: float
    step: int | None
    error: str = ""
    counts: bool = True


def error_raised(kind: str, step: int | None, traceback: str) -> str:
    """What a rank has raised and in which step, whichever rank it was; "" where it has failed in another way."""
    lines = [line for line in traceback.splitlines() if line and not line[0].isspace()]
    return f"step {step}: {lines[-1]}" if lines and kind == "error" else ""


def pause_before_restart(failures: Sequence[Failure], most: int) -> float | str:
    """Seconds to wait before the run is started again, or why it is not.

    failures: all so far, at least one, the newest last. most: restarts within an hour. An error that has come before,
    in the same step, comes from the job. The pause doubles with each failure that brought no new checkpoint.
    """
    last = failures[-1]
    if last.error and any(failure.error == last.error for failure in failures[:-1]):
        return "not started again: the same error in the same step came before"
    recent = sum(failure.counts and last.time_s - failure.time_s < WINDOW_S for failure in failures)
    if last.counts and recent > most:
        return f"not started again: {recent} failures within an hour, and --restarts {most}"
    in_vain = 0
    for before, after in zip(failures[-2::-1], failures[:0:-1], strict=True):
        if before.step != after.step:
            break
        in_vain += 1
    return min(SHORTEST_PAUSE_S * 2.0**in_vain, LONGEST_PAUSE_S)
