"""`evenly submit`: prints or hands over, in a folder that the next submission does not take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import JOB, evenly


def test_printing_leaves_nothing(tmp_path: Path) -> None:
    done = evenly("submit", JOB, "--slurm", "--nodes", 2, "--print", "--", "--plan", "zero3", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--out runs/cli_job-1 --autoresume --plan zero3" in done.stdout
    assert [*tmp_path.iterdir()] == []


def test_two_that_are_submitted_have_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sbatch").write_text('#!/bin/sh\ncat >> given\necho "Submitted batch job 5"\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for number in (1, 2):
        done = evenly("submit", JOB, "--slurm", folder=tmp_path)
        assert done.stdout == f"Submitted batch job 5, into runs/cli_job-{number}\n"
    assert "--out runs/cli_job-2 " in (tmp_path / "given").read_text()


def test_what_cannot_be_submitted_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no scheduler is named" in evenly("submit", JOB, folder=tmp_path).stderr
    both = evenly("submit", JOB, "--slurm", "--kubernetes", folder=tmp_path)
    assert both.returncode == 2 and "--slurm and --kubernetes are named" in both.stderr
    assert "another scheduler's" in evenly("submit", JOB, "--slurm", "--image", "me", folder=tmp_path).stderr
    assert (
        "--image and --volume and --devices not given" in evenly("submit", JOB, "--kubernetes", folder=tmp_path).stderr
    )
    assert "all its machines or none" in evenly("submit", JOB, "--slurm", "--nodes", "2:4", folder=tmp_path).stderr
    assert "no such file" in evenly("submit", "none.py", "--slurm", folder=tmp_path).stderr
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = evenly("submit", JOB, "--slurm", "--out", "out", folder=tmp_path)
    assert refused.returncode == 1 and "no sbatch" in refused.stderr
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2; exit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert "invalid partition" in evenly("submit", JOB, "--slurm", "--out", "out", folder=tmp_path).stderr


def test_the_manifests_for_kubernetes_have_a_secret_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("submit", "job.py", "--kubernetes", "--image", "me", "--volume", "runs", "--devices", 8, "--nodes", "2:4")
    first, second = (json.loads(evenly(*asked, "--print", folder=tmp_path).stdout) for _ in range(2))
    assert first["items"][0]["stringData"] != second["items"][0]["stringData"]
    assert first["items"][1] == second["items"][1]
    (tmp_path / "kubectl").write_text('#!/bin/sh\ncat > given\necho "$@"\n')
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert evenly(*asked, folder=tmp_path).stdout == "apply -f -\n"
    assert json.loads((tmp_path / "given").read_text())["items"][1] == first["items"][1]
