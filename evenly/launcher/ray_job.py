"""The command by which Ray takes a run as a job of its own (Ray Jobs), on a node of the cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evenly.errors import UserError
from evenly.launcher.rounds import NodeRange


@dataclass(frozen=True, kw_only=True)
class RayJob:
    """What to submit.

    job:      its file, in the current folder, which is sent to all nodes. out: the run's folder, seen by all of them.
    address:  of the cluster's dashboard, http://HEAD:8265. workers: ranks; a range goes on with fewer.
    restarts: how often an hour workers may fail. arguments: further ones of `evenly run`.
    """

    job: Path
    out: Path
    address: str
    workers: NodeRange
    restarts: int = 10
    arguments: Sequence[str] = ()

    def command(self) -> list[str]:
        return [
            *("evenly", "run", str(self.job), "--out", str(self.out), "--autoresume"),
            *("--ray", self.workers.to_text(), "--restarts", str(self.restarts)),
            *self.arguments,
        ]


def ray_submission(asked: RayJob) -> list[str]:
    """The command that hands it over. Raises `UserError` for what the nodes could not find."""
    if asked.job.is_absolute() or ".." in asked.job.parts:
        raise UserError(f"submit {asked.job} to Ray", "only the current folder is sent", "go to the job's folder")
    if not asked.out.is_absolute():
        found = "each node has a copy of the current folder"
        raise UserError(f"--out {asked.out} under Ray", found, "name a folder that all nodes see, from / on")
    environment = json.dumps({"working_dir": ".", "excludes": ["/runs", "__pycache__"]})
    submit = ["ray", "job", "submit", "--address", asked.address, "--no-wait", "--runtime-env-json", environment]
    return [*submit, "--", *asked.command()]
