"""Errors as the user reads them: what was asked, what was found, what to do.

`UserError` is a mistake that can be seen before a run (exit code 2); `RunError` is a run that failed
(exit code 1). Both print as one message; the command line shows a traceback only under `--debug`.
"""

from __future__ import annotations

import sysconfig
import traceback
from functools import lru_cache
from pathlib import Path

EVENLY = str(Path(__file__).parent)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


class EvenlyError(Exception):
    """One clear message in three parts; `found` and `do` may be empty."""

    exit_code = 1

    def __init__(self, asked: str, found: str = "", do: str = "") -> None:
        super().__init__(asked, found, do)
        self.asked, self.found, self.do = asked, found, do

    def __str__(self) -> str:
        parts = [self.asked]
        if self.found:
            parts.append(f"  found: {self.found}")
        if self.do:
            parts.append(f"  to do: {self.do}")
        return "\n".join(parts)


class UserError(EvenlyError):
    """The job, the plan, the command or the environment cannot be run as it stands."""

    exit_code = 2


class PlanError(UserError):
    """A plan that is malformed or cannot keep the contract; names every problem found."""


class JobWarning(UserWarning):
    """Something in a job that runs, the same under every plan, but perhaps not as its author thinks."""


class RunError(EvenlyError):
    """A run that began and could not go on."""


class PathError(RunError):
    """A microbatch that takes a way through the model's code which the plan has not seen before the first step."""


class ContractError(RunError):
    """A model or loss whose numbers would follow the plan; found before the first step, a `UserError` in its place."""


class SampleError(RunError):
    """A sample that could not be read or collated; names its index."""


class CheckpointError(RunError):
    """A checkpoint that is torn, foreign or tampered with, or that could not be written."""


class ResumeError(CheckpointError):
    """There is no such checkpoint, or it is sound but another job's: a mistake of the command that asked for it."""

    exit_code = UserError.exit_code


def note_step(problem: Exception, step: int) -> None:
    """Notes on `problem` the optimizer step in which it was raised."""
    problem.evenly_step = step  # type: ignore[attr-defined]


def note_rank(problem: Exception, rank: int) -> None:
    """Notes on `problem`, which all ranks raise, the rank that it arose on."""
    problem.evenly_rank = rank  # type: ignore[attr-defined]


def rank_of(problem: BaseException) -> int | None:
    """The rank that it arose on, if that was noted."""
    return getattr(problem, "evenly_rank", None)


def step_of(problem: BaseException) -> int | None:
    """The optimizer step in which it was raised, if that was noted."""
    return getattr(problem, "evenly_step", None)


class RankError(RunError):
    """A rank failed; carries the first failing rank, its step if known, and its log."""


NOT_HERE = (
    "torch has no such operation on this kind of device, on one device either: run the job where torch has it (a GPU, "
    "say), or choose another implementation of it (attention of scaled_dot_product_attention, say)"
)


def describe(problem: BaseException) -> str:
    """`ValueError: message (file.py:33)`: an exception in one line, with the last place in code that no library has."""
    if isinstance(problem, EvenlyError):
        return str(problem)
    return f"{type(problem).__name__}: {problem}".rstrip(": ").strip() + place_of(problem)


def place_of(problem: BaseException | None = None, inside: tuple[str, ...] = ()) -> str:
    """` (file.py:33)`: the innermost line of the user that led to `problem`, or without one to this call.

    Where no line is the user's, the innermost of all; '' where there is none.
    inside: folders whose lines are passed over in place of all that is not the user's; '' where no other line is left.
    """
    frames = traceback.extract_tb(problem.__traceback__) if problem else traceback.extract_stack()
    if inside:
        own = [frame for frame in frames if not frame.filename.startswith(inside)]
    else:
        own = [frame for frame in frames if is_users(frame.filename)] or frames
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


@lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Whether a source file is the user's own: neither of this package nor of a library, nor made up as `<string>`."""
    return not (filename.startswith((EVENLY, "<", *_LIBRARIES)) or "site-packages" in filename)


def printable(text: str) -> str:
    """`text` with what would steer a terminal, or cannot be written, spelled out."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
