"""What the launcher asks of processes and what they answer, without the engine, which it would import and never run."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from evenly.plan import PlanSpec

FURTHER_DRAWS = range(2, 8)  # of rounding, where a plan came out different: one draw may miss where a job jumps

# Files in the folder of a reference: where it had to leave out hooks and loop, and where casts to float32 stay.
LEFT_OUT, KEPT_CASTS = "left out", "kept casts"


@dataclass(frozen=True)
class FoundInJob:
    """What is known of the job before any plan is compared; texts are '' where all is well.

    broken_rule:  a rule of data order that its batches break. hidden_state: what one microbatch passes to the next.
    note:         a warning about its loss. unseen: which checks of the job failed, and why.
    """

    broken_rule: str = ""
    hidden_state: str = ""
    note: str = ""
    unseen: str = ""

    @property
    def notes(self) -> str:
        return "; ".join(filter(None, (self.broken_rule, self.hidden_state, self.note, self.unseen)))

    def __or__(self, other: FoundInJob) -> FoundInJob:
        """What both have found."""
        first = (getattr(self, f.name) or getattr(other, f.name) for f in fields(self))
        unseen = dict.fromkeys(filter(None, (self.unseen, other.unseen)))
        return replace(FoundInJob(*first), unseen="; ".join(unseen))


@dataclass(frozen=True)
class PlanSteps:
    """Consecutive steps that one plan runs.

    first, last: how many steps are done before and after it. out: folder of the run, where several plans take turns.
    """

    plan: PlanSpec
    first: int
    last: int
    out: Path | None = None


def say_shortened(folder: Path, text: str) -> None:
    """Keep in `folder` what the job is trained on, for an error that its training ends in."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shortened").write_text(text)


def said_of_data(folder: Path) -> str:
    """Return what `say_shortened` kept in `folder` as the end of a sentence; '' if nothing."""
    path = folder / "shortened"
    return f"; {text}" if path.exists() and (text := path.read_text()) else ""
