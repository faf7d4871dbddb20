"""Runs under a real mpirun and a real Slurm, where they are installed: `python -m benchmarks.schedulers install`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks is no installed package

from benchmarks.lab.lab import ROOT, Lab, guarded, why_not
from benchmarks.packages import missing
from benchmarks.schedulers.mpi import VARIABLES
from benchmarks.schedulers.slurm import JOB, PROGRAMS, slurm_up
from benchmarks.schedulers.transcript import Transcript, wait_until

pytestmark = pytest.mark.full  # a real mpirun and a real Slurm; tests of their environments are in tests/launcher

without_open_mpi = pytest.mark.skipif(bool(missing(["mpirun.openmpi"])), reason="there is no Open MPI")
lacking = missing(PROGRAMS)
without_slurm = pytest.mark.skipif(bool(lacking or why_not()), reason=why_not() or f"there is no {' '.join(lacking)}")


@without_open_mpi
def test_mpirun_starts_ranks_and_tells_how_they_have_failed(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB.read_text())
    command = ["mpirun.openmpi", "--oversubscribe", "-n", "2", sys.executable, "-m", "evenly", "run", "job.py"]
    environment = {**os.environ, **VARIABLES, "PYTHONPATH": str(ROOT)}
    done, failed = (
        subprocess.run(
            [*command, *further],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        for further in ([], ["--set", "fails=1", "--out", "fails"])
    )
    assert done.returncode == 0, done.stderr
    assert "8 steps on 2 ranks" in done.stdout and (tmp_path / "runs" / "job-1" / "metrics.jsonl").exists()
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert failed.stderr.count("evenly:") == 1 and "rank 1 failed" in failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Transcript]:
    """Two nodes, with a job to run."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "job.py").write_text(JOB.read_text())
    with guarded(Lab(name=f"s{os.getpid() % 10**8}", nodes=2)) as lab:
        yield Transcript(lab, folder, slurm_up(lab, folder / ".slurm"))


@without_slurm
def test_srun_starts_a_task_for_each_rank(slurm: Transcript) -> None:
    slurm.run("evenly run job.py --devices 1 --out one")
    text = slurm.run("srun --nodes 2 --ntasks-per-node 1 --kill-on-bad-exit=1 evenly run job.py --devices 1 --out two")
    assert "8 steps on 2 ranks" in text
    slurm.check_same("two", "one")


@without_slurm
def test_a_batch_job_that_is_asked_to_stop_is_saved_queued_again_and_done(slurm: Transcript) -> None:
    of_job = "--set steps=60 --set pause=0.1"
    slurm.run(f"evenly submit job.py --slurm --nodes 2 --devices 1 --cpu --out long -- {of_job}")
    checkpoints = slurm.folder / "long" / "checkpoints"
    wait_until(lambda: any(checkpoints.glob("step-*")))
    slurm.run("scancel --signal=TERM --name job")  # to the tasks alone, as before the end of the time
    output = next(slurm.folder.glob("slurm-*.out"))
    wait_until(lambda: "steps 1" not in output.read_text() and "to 60 on 2 ranks" in output.read_text())
    assert "as asked" in output.read_text()
    slurm.run("evenly run job.py --devices 1 --set steps=60 --out long-one")
    slurm.check_same("long", "long-one")
