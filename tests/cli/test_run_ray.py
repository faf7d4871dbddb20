"""`evenly run --ray` and `evenly submit --ray`: what they refuse, and what is printed; no Ray is needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import JOB, evenly

OTHERS = [("--devices", 2), ("--nodes", 2), ("--check",), ("--stall-limit", 9), ("--snapshot", 2), ("--step", 2)]


@pytest.mark.parametrize("other", OTHERS)
def test_what_workers_of_ray_cannot_do(tmp_path: Path, other: tuple[object, ...]) -> None:
    done = evenly("run", JOB, "--ray", 2, *other, folder=tmp_path)
    assert done.returncode == 2 and f"{other[0]} with --ray" in done.stderr
    assert [*tmp_path.iterdir()] == []


def test_numbers_that_are_none(tmp_path: Path) -> None:
    for number in ("0", "4:2", "many"):
        done = evenly("run", JOB, "--ray", number, folder=tmp_path)
        assert done.returncode == 2 and f"--ray {number}" in done.stderr


def test_a_script_that_owns_its_loop(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import evenly\nwith evenly.start(job) as run:\n    pass\n")
    done = evenly("run", script, "--ray", 2, folder=tmp_path)
    assert done.returncode == 2 and "it runs as a script" in done.stderr


def test_a_plan_that_fits_only_some_numbers(tmp_path: Path) -> None:
    done = evenly("run", JOB, "--ray", "2:3", "--plan", "tensor=2", folder=tmp_path)
    assert done.returncode == 2 and "on 3, " in done.stderr and "on 2, " not in done.stderr


def test_what_is_submitted_can_be_printed(tmp_path: Path) -> None:
    asked = ("submit", "job.py", "--ray", "http://head:8265", "--workers", "2:4", "--out", "/shared/mine", "--print")
    done = evenly(*asked, "--", "--plan", "zero3", folder=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("ray job submit --address http://head:8265 --no-wait ")
    assert done.stdout.endswith(
        " -- evenly run job.py --out /shared/mine --autoresume --ray 2:4 --restarts 10 --plan zero3\n"
    )


def test_what_is_submitted_is_handed_to_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("submit", "job.py", "--ray", "http://head:8265", "--workers", 4, "--out", "/shared/mine")
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = evenly(*asked, folder=tmp_path)
    assert refused.returncode == 1 and "no ray on this machine" in refused.stderr
    (tmp_path / "ray").write_text('#!/bin/sh\necho "$1 $2 $3 $4"\n')
    (tmp_path / "ray").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert evenly(*asked, folder=tmp_path).stdout == "job submit --address http://head:8265\n"


def test_what_ray_cannot_be_given(tmp_path: Path) -> None:
    lacking = evenly("submit", "job.py", "--ray", "http://head:8265", folder=tmp_path)
    assert lacking.returncode == 2 and "--workers and --out not given" in lacking.stderr
    of_another = evenly("submit", "job.py", "--ray", "http://head:8265", "--time", "8:00:00", folder=tmp_path)
    assert of_another.returncode == 2 and "another scheduler's" in of_another.stderr
    of_ray = evenly("submit", "job.py", "--slurm", "--workers", 4, folder=tmp_path)
    assert of_ray.returncode == 2 and "another scheduler's" in of_ray.stderr
    nodes = evenly("submit", "job.py", "--ray", "h", "--workers", 4, "--out", "/a", "--nodes", 2, folder=tmp_path)
    assert nodes.returncode == 2 and "give --workers" in nodes.stderr
