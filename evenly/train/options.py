"""What the command line asks of a run, on its way from `evenly run` to the ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from evenly.errors import UserError
from evenly.launch.environment import launcher_options
from evenly.plan import PlanSpec, parse_plan


@dataclass(frozen=True)
class RunOptions:
    """What a run is asked for, besides its job.

    plan:    None where nobody has named one.
    steps:   of the whole run; None takes the job's.
    resume:  whether to go on from the newest checkpoint in `out`.
    devices: of this one process, for a plan with replicas; None takes all GPUs.
    search:  whether the best plan is sought that states what `plan` does.
    """

    plan: PlanSpec | None = None
    out: Path | None = None
    steps: int | None = None
    resume: bool = False
    devices: int | None = None
    search: bool = False

    def to_text(self) -> str:
        """JSON for the ranks' environment; `from_text` is its inverse."""
        plan, out = self.plan and str(self.plan), self.out and str(self.out)
        others = {"steps": self.steps, "resume": self.resume, "devices": self.devices, "search": self.search}
        return json.dumps({"plan": plan, "out": out, **others})

    @classmethod
    def from_text(cls, text: str) -> RunOptions:
        """The options that `to_text` wrote."""
        values = json.loads(text)
        plan, out = values["plan"], values["out"]
        others = values["steps"], values["resume"], values["devices"], values["search"]
        return cls(plan and parse_plan(plan), out and Path(out), *others)


def merge_options(given: RunOptions) -> RunOptions:
    """`given` by the script, completed by the command line's; raises `UserError` where both say something different."""
    text = launcher_options()
    stated = RunOptions.from_text(text) if text else RunOptions()
    for field in fields(RunOptions):
        here, there = getattr(given, field.name), getattr(stated, field.name)
        if here and there and here != there:
            raise UserError(
                f"{field.name} {there} on the command line",
                f"the script itself asks for {here}",
                "say it in one of the two places",
            )
    return RunOptions(*(getattr(given, f.name) or getattr(stated, f.name) for f in fields(RunOptions)))
