"""Bad input at the command line: one clear message, the right exit code, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import JOB, evenly

FAULTS = {
    "no file": (["no_such_job.py"], 2, "no such file"),
    "unknown setting": ([JOB, "--set", "layer=2"], 2, "did you mean layers?"),
    "unknown plan": ([JOB, "--plan", "ddpp"], 2, "did you mean 'ddp'?"),
    "other microbatch": ([JOB, "--devices", "2", "--plan", "microbatch=4"], 2, "the job states microbatch=3"),
    "plan and devices": ([JOB, "--plan", "data=2", "--devices", "3"], 2, "need 2"),
    "restart and step": ([JOB, "--restarts", "2", "--step", "4", "--out", "x"], 2, "may be of those after step 4"),
    "nodes": ([JOB, "--nodes", "4:2"], 2, "the least first"),
    "nodes and plan": ([JOB, "--nodes", "1:3", "--devices", "2", "--plan", "tensor=4"], 2, "on 3, its axes"),
    "nodes and step": ([JOB, "--nodes", "1:3", "--step", "4", "--out", "x"], 2, "may be of those after step 4"),
    "nowhere to meet": ([JOB, "--nodes", "2", "--devices", "1"], 2, "is not host:port"),
    "nan": ([JOB, "--devices", "2", "--set", "fault=nan"], 1, "microbatch 0 (samples 0, 14) has the loss nan"),
    "sample": ([JOB, "--devices", "2", "--set", "fault=sample"], 1, "sample 17"),
    "start": ([JOB, "--devices", "2", "--set", "fault=start"], 1, "3.bias on rank 1 differs from rank 0's"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_run_ends_in_one_clear_message(name: str, tmp_path: Path) -> None:
    arguments, exit_code, message = FAULTS[name]
    done = evenly("run", *arguments, folder=tmp_path)
    assert message in done.stderr
    assert done.returncode == exit_code
    assert "Traceback" not in done.stderr + done.stdout
    assert done.stderr.count("evenly: ") == 1
    assert done.stderr.rstrip().splitlines()[-1].startswith("  to do: ")
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([JOB, "--steps", "0"], "--steps"),
        ([JOB, "--plans", "ddp", "--set", "fault=nan"], "microbatch 0 has the loss nan"),
        ([JOB, "--dtype", "float8"], "one of float32"),
    ],
)
def test_a_verification_ends_in_one_clear_message(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = evenly("verify", *arguments, folder=tmp_path)
    assert (message in done.stderr, done.returncode, done.stdout) == (True, 2, "")
    assert "Traceback" not in done.stderr


def test_what_no_rank_is_needed_for_is_told_before_there_is_a_folder(tmp_path: Path) -> None:
    done = evenly("run", JOB, "--set", "layer=2", folder=tmp_path)
    assert done.stderr.startswith("evenly: --set layer=") and not (tmp_path / "runs").exists()
    (tmp_path / "own_loop.py").write_text("import evenly\nevenly.start(job())\n")
    done = evenly("run", "own_loop.py", "--set", "layers=2", folder=tmp_path)
    assert done.returncode == 2 and "pass arguments to the script, after --" in done.stderr


def test_a_mistake_in_a_job_is_told_in_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "misspelled.py").write_text("import evenly\ndef job():\n    return evenly.Job(modle=1)\n")
    done = evenly("run", "misspelled.py", "--devices", "2", folder=tmp_path)
    assert done.returncode == 2
    told = done.stderr.splitlines()
    assert "evenly: job() of misspelled.py" in told and "did you mean model?; see rank " in told[-1]


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "out" / "checkpoints" / "step-00000004").mkdir(parents=True)
    done = evenly("run", JOB, "--out", "out", folder=tmp_path)
    assert done.returncode == 2 and "already holds a run" in done.stderr
    done = evenly("run", JOB, "--out", "elsewhere", "--resume", folder=tmp_path)
    assert done.returncode == 2 and "holds no run" in done.stderr


def test_help_names_the_commands(tmp_path: Path) -> None:
    done = evenly("--help", folder=tmp_path)
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("run", "verify", "doctor"))
