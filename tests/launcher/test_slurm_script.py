"""The batch script for Slurm: what it asks for, what it runs, and when it goes back into the queue."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from evenly.errors import UserError
from evenly.launcher.slurm_script import SlurmJob, slurm_script

ASKED = SlurmJob(
    job=Path("my job.py"), out=Path("runs/a b"), nodes=4, devices=8, time="8:00:00", arguments=["--plan", "dp=4 tp=8"],
    options=["account=me"],
)  # fmt: skip


def options_of(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]


def test_what_slurm_is_asked_for() -> None:
    assert options_of(slurm_script(ASKED)) == [
        "job-name=my-job", "nodes=4", "ntasks-per-node=1", "gpus-per-node=8", "time=8:00:00", "signal=TERM@120",
        "requeue", "open-mode=append", "account=me",
    ]  # fmt: skip
    plain = options_of(slurm_script(SlurmJob(job=Path("job.py"), out=Path("out"), devices=2, cpu=True)))
    assert "cpus-per-task=2" in plain and not any(option.startswith(("time", "gpus")) for option in plain)


@pytest.mark.parametrize("option", ["account=me\nrm -rf", "--account=me", ""])
def test_options_are_one_line_each(option: str) -> None:
    with pytest.raises(UserError, match="no option of sbatch"):
        slurm_script(SlurmJob(job=Path("job.py"), out=Path("out"), options=[option]))


def attempt(folder: Path, *, code: int, saves: bool = True, cancelled: bool = False) -> tuple[int, str, str]:
    """Runs the script with a stand-in for srun: its exit code, the tasks' command, and what scontrol was asked."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    save = "mkdir -p 'runs/a b/checkpoints/step-00000007'" if saves else ":"
    stop = "kill -TERM $PPID" if cancelled else ":"
    stand_ins = {"srun": f'printf "%s|" "$@" > asked; {save}; {stop}; exit {code}', "scontrol": 'echo "$@" > requeued'}
    for name, text in stand_ins.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", slurm_script(ASKED)], cwd=folder, timeout=60, check=False,
        env={"PATH": f"{programs}:/usr/bin:/bin", "SLURM_JOB_ID": "77"},
    )  # fmt: skip
    requeued = folder / "requeued"
    return done.returncode, (folder / "asked").read_text(), requeued.read_text().strip() if requeued.exists() else ""


def test_a_run_that_was_stopped_and_saved_goes_back_into_the_queue(tmp_path: Path) -> None:
    code, asked, requeued = attempt(tmp_path, code=143)
    assert (code, requeued) == (143, "requeue 77")
    assert asked == (
        "--kill-on-bad-exit=1|evenly|run|my job.py|--out|runs/a b|--autoresume|--devices|8|--plan|dp=4 tp=8|"
    )


@pytest.mark.parametrize(
    "how",
    [
        {"code": 0},
        {"code": 1},
        {"code": 143, "saves": False},  # it would go round for ever
        {"code": 143, "cancelled": True},
    ],
)
def test_no_other_run_does(tmp_path: Path, how: dict[str, int]) -> None:
    code, _, requeued = attempt(tmp_path, **how)  # type: ignore[arg-type]
    assert (code, requeued) == (how["code"], "")
