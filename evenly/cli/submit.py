"""`evenly submit`: hands a run to a scheduler, or prints what it would be given."""

from __future__ import annotations

import subprocess
from pathlib import Path

from evenly.cli.run import next_folder
from evenly.errors import RunError, UserError
from evenly.launcher.slurm_script import SlurmJob, slurm_script


def folder_to_submit(job: Path, out: Path | None, *, make: bool) -> Path:
    """The folder of a run that begins later: the one named, else the next of runs/NAME-N. make: so that it is taken."""
    if not job.is_file():
        raise UserError(f"submit {job}", "there is no such file", "name a job file")
    folder = next_folder(job) if out is None else out
    if make:
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def submit_to_slurm(asked: SlurmJob, *, print_only: bool) -> int:
    """Gives the script to sbatch, which says the number of the job. Raises `RunError` where it cannot."""
    script = slurm_script(asked)
    if print_only:
        print(script, end="")
        return 0
    try:
        done = subprocess.run(["sbatch"], input=script, text=True, capture_output=True, check=False)
    except FileNotFoundError:
        found, do = "there is no sbatch on this machine", "run it where jobs are submitted, or print it: --print"
        raise RunError("submit the run to Slurm", found, do) from None
    if done.returncode:
        raise RunError("submit the run to Slurm", done.stderr.strip(), "see the options that follow --sbatch")
    print(f"{done.stdout.strip()}, into {asked.out}")
    return 0
