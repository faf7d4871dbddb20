"""What the launcher asks of processes and what they answer, without the engine, which it would import and never run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from evenly.plan import PlanSpec

FURTHER_DRAWS = range(2, 8)  # of rounding, where a plan came out different: one draw may miss where a job jumps


@dataclass(frozen=True)
class FoundInJob:
    """What is known of the job before any plan is compared; texts are '' where all is well.

    broken_rule:  a rule of data order that its batches break. hidden_state: what one microbatch passes to the next.
    note:         a warning about its loss.
    """

    broken_rule: str = ""
    hidden_state: str = ""
    note: str = ""

    @property
    def notes(self) -> str:
        """All that is not well, in one line."""
        return "; ".join(filter(None, (self.broken_rule, self.hidden_state, self.note)))

    def __or__(self, other: FoundInJob) -> FoundInJob:
        """What both have found."""
        return FoundInJob(*(getattr(self, f.name) or getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class PlanSteps:
    """Consecutive steps that one plan runs.

    first, last: how many steps are done before and after it. out: folder of the run, where several plans take turns.
    """

    plan: PlanSpec
    first: int
    last: int
    out: Path | None = None
