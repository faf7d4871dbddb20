"""The batch script by which Slurm runs a job: saved before its time is over, and put back into the queue until done."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evenly.errors import UserError

STOP_BEFORE_S = 120


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What to submit.

    job:      its file. out: the run's folder. arguments: further ones of `evenly run`.
    nodes:    machines; one task on each, which starts the ranks there.
    devices:  of each machine; None for all that the task is given. cpu: whether these are CPU processes.
    time:     after which Slurm ends the job, in its words; None for the partition's own.
    stop_before_s: how long before that the run is saved and put back into the queue.
    options:  further ones of sbatch, without dashes: `account=me`.
    """

    job: Path
    out: Path
    nodes: int = 1
    devices: int | None = None
    cpu: bool = False
    time: str | None = None
    stop_before_s: int = STOP_BEFORE_S
    arguments: Sequence[str] = ()
    options: Sequence[str] = ()

    @property
    def name(self) -> str:
        return re.sub(r"[^\w.-]+", "-", self.job.stem)

    def command(self) -> list[str]:
        devices = [] if self.devices is None else ["--devices", str(self.devices)]
        return ["evenly", "run", str(self.job), "--out", str(self.out), "--autoresume", *devices, *self.arguments]


def slurm_script(asked: SlurmJob) -> str:
    """The text for sbatch. Raises `UserError` for options that would be lines of their own."""
    options = "\n".join(f"#SBATCH --{option}" for option in [*_options(asked), *map(_checked, asked.options)])
    cpus = f" --cpus-per-task={asked.devices}" if asked.cpu and asked.devices else ""  # srun does not take sbatch's
    return f"""#!/bin/bash
{options}

# Slurm asks the ranks alone to stop before the time is over (--signal); whoever cancels the job asks this shell too.
trap 'cancelled=1' TERM
# Nodes let in who has it: this job's tasks.
EVENLY_SECRET=$(head -c 32 /dev/urandom | base64 --wrap=0)
export EVENLY_SECRET

newest() {{ ls {shlex.quote(str(asked.out / "checkpoints"))} 2>/dev/null | grep '^step-' | tail -n 1; }}
before=$(newest)

srun --kill-on-bad-exit=1{cpus} {shlex.join(asked.command())}
code=$?
if [ "$code" -eq 143 ] && [ -z "$cancelled" ] && [ "$(newest)" != "$before" ]; then  # saved, further than before
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def _options(asked: SlurmJob) -> list[str]:
    devices = []
    if asked.devices is not None:
        devices = [f"{'cpus-per-task' if asked.cpu else 'gpus-per-node'}={asked.devices}"]
    return [
        f"job-name={asked.name}",
        f"nodes={asked.nodes}",
        "ntasks-per-node=1",
        *devices,
        *([] if asked.time is None else [f"time={_checked(asked.time)}"]),
        f"signal=TERM@{asked.stop_before_s}",
        "requeue",
        "open-mode=append",
    ]


def _checked(option: str) -> str:
    if not option.isprintable() or option.startswith("-") or not option:
        raise UserError(f"--sbatch {option!r}", "it is no option of sbatch", "write it without dashes: account=me")
    return option
