"""The options of `evenly run`, as passed to the ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from evenly.errors import UserError
from evenly.launcher.environment import launcher_options
from evenly.plan import PlanSpec, parse_plan


@dataclass(frozen=True)
class RunOptions:
    """The options of a run, besides its job.

    plan:    None for the default.
    steps:   length of the whole run; None for the job's.
    resume:  whether to continue from a checkpoint in `out`.
    step:    of that checkpoint; None for the newest that is sound.
    devices: of this one process, for a plan with replicas; None for all GPUs.
    skip_nonfinite: how many batches may be left out whose loss or gradient is not finite.
    search:  whether to search for the best plan among those that agree with `plan`.
    save_to: a second folder to which every checkpoint is copied; None for none.
    snapshot: steps between snapshots of the state in the memory of this machine; None for none.
    no_room: plans that the run was started under before and that had no room, as texts; then it takes one that needs
             less, and `plan` and `search` no longer count. refused: those that could not run its job.
    long_step: in which the last of them had no room, from 0.
    log:      loggers, as `evenly run` names them.
    quiet:    whether nothing is shown of its progress.
    cluster:  a file of what was measured of the devices and links, for the search; None for what is typical of them.
    settings: of the function that made the job; known on the ranks alone.
    """

    plan: PlanSpec | None = None
    out: Path | None = None
    steps: int | None = None
    resume: bool = False
    devices: int | None = None
    search: bool = False
    step: int | None = None
    skip_nonfinite: int = 0
    save_to: Path | None = None
    snapshot: int | None = None
    no_room: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    long_step: int = 0
    log: tuple[str, ...] = ()
    quiet: bool = False
    cluster: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def to_text(self) -> str:
        """JSON for the ranks' environment; `from_text` is its inverse."""
        plan, out = self.plan and str(self.plan), self.out and str(self.out)
        others = {"steps": self.steps, "resume": self.resume, "devices": self.devices, "search": self.search}
        others |= {"step": self.step, "skip_nonfinite": self.skip_nonfinite, "snapshot": self.snapshot}
        others |= {"no_room": self.no_room, "refused": self.refused, "long_step": self.long_step}
        others |= {"log": self.log, "quiet": self.quiet, "cluster": self.cluster and str(self.cluster)}
        return json.dumps({"plan": plan, "out": out, "save_to": self.save_to and str(self.save_to), **others})

    @classmethod
    def from_text(cls, text: str) -> RunOptions:
        """Inverse of `to_text`."""
        values = json.loads(text)
        plan, out = values["plan"], values["out"]
        others = (values[name] for name in ("steps", "resume", "devices", "search", "step", "skip_nonfinite"))
        rest = {name: tuple(values[name]) for name in ("no_room", "refused", "log")}
        rest |= {"save_to": values["save_to"] and Path(values["save_to"]), "snapshot": values["snapshot"]}
        rest |= {"long_step": values["long_step"], "quiet": values["quiet"]}
        rest |= {"cluster": values["cluster"] and Path(values["cluster"])}
        return cls(plan and parse_plan(plan), out and Path(out), *others, **rest)


def merge_options(given: RunOptions) -> RunOptions:
    """`given` by the script, completed by the command line's; raises `UserError` where both say something different."""
    text = launcher_options()
    command_line = RunOptions.from_text(text) if text else RunOptions()
    for one in fields(RunOptions):
        in_script, on_command_line = getattr(given, one.name), getattr(command_line, one.name)
        if in_script and on_command_line and in_script != on_command_line:
            raise UserError(
                f"{one.name} {on_command_line} on the command line",
                f"the script itself asks for {in_script}",
                "give it in one of the two places",
            )
    return RunOptions(*(getattr(given, f.name) or getattr(command_line, f.name) for f in fields(RunOptions)))
