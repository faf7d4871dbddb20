"""Runs `evenly verify` in a process of its own, whose fork server imports a job's libraries once for all ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIMIT_S = 1200.0
BEGIN = """
import sys
from evenly.cli.main import main
from evenly.cli.verify import PRELOAD
from evenly.launcher.agent import warm_up
if libraries := sys.argv.pop(1):
    warm_up(PRELOAD, libraries.split())
main()
"""


class Verdict(NamedTuple):
    """What is said of a plan; `plan` without what the planner has added to it."""

    plan: str
    status: str
    reason: str


def verified(
    job: Path, plans: Sequence[str], folder: Path, *, steps: int, paths: Sequence[Path] = (), libraries: str = ""
) -> list[Verdict]:
    """The verdicts on `plans`, with two devices, in float64, with `folder` as working folder.

    paths: folders from which Python imports as well. libraries: to import first, where they are not installed ones.
    """
    arguments = ["verify", job, "--plans", ";".join(plans), "--devices", 2, "--steps", steps, "--dtype", "float64"]
    found = os.pathsep.join(filter(None, [str(ROOT), *map(str, paths), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", BEGIN, libraries, *map(str, arguments), "--json"],
        cwd=folder, env={**os.environ, "PYTHONPATH": found}, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.stdout.startswith("{"), done.stderr
    rows = json.loads(done.stdout)["plans"]
    return [Verdict(row["plan"].split()[0], row["status"], row["reason"]) for row in rows]
