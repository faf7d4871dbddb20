"""`evenly checkpoints`: what a run has saved, whether it is sound, and room where there are too many."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from evenly.checkpoint.folder import CheckpointFolder
from evenly.checkpoint.manifest import Unsound
from evenly.cli.tables import print_table
from evenly.errors import UserError

HEADS = ("step", "MB", "age", "state", "", "plan")
UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


@dataclass(frozen=True)
class CheckpointRow:
    """One checkpoint in a folder.

    state: "sound" where all of it was read, "complete" where sizes and headers agree; else what is wrong.
    plan:  under which it was saved; '' where that cannot be read.
    """

    step: int
    bytes: int
    age_s: float
    state: str
    good: bool
    best: bool
    plan: str


def checkpoints(run: Path, *, check: bool, keep: int | None, json_only: bool) -> int:
    """Lists the checkpoints of the run in the folder `run`, after removing some if asked; returns the exit code."""
    folder = CheckpointFolder(run)
    if not folder.steps():
        raise UserError(f"list checkpoints in {folder.checkpoints}", "there are none", "give the folder of a run")
    removed = [] if keep is None else folder.keep(keep)
    rows = [_row(folder, step, folder.best(), check=check) for step in folder.steps()]
    if json_only:
        print(json.dumps({"removed": removed, "checkpoints": [asdict(row) for row in rows]}))
    else:
        if removed:
            print(f"removed: {', '.join(map(str, removed))}")
        print_table("", HEADS, [_cells(row) for row in rows], wrapping=("state", "plan"))
    return 0 if all(row.good for row in rows) else 1


def _row(folder: CheckpointFolder, step: int, best: int | None, *, check: bool) -> CheckpointRow:
    path = folder.path(step)
    try:
        plan = str(folder.manifest(step).values.get("plan", ""))
    except Unsound:
        plan = ""
    try:
        folder.check(step, digests=check)
        state, good = "sound" if check else "complete", True
    except Unsound as reason:
        state, good = str(reason), False
    size = sum(file.lstat().st_size for file in path.iterdir())
    return CheckpointRow(step, size, time.time() - path.stat().st_mtime, state, good, step == best, plan)


def _cells(row: CheckpointRow) -> tuple[str, ...]:
    best = "best" if row.best else ""
    return str(row.step), f"{row.bytes / 1e6:,.1f}", _age(row.age_s), row.state, best, row.plan


def _age(seconds: float) -> str:
    return next((f"{seconds / unit:.0f} {name}" for unit, name in UNITS if seconds >= unit), f"{seconds:.0f} s")
