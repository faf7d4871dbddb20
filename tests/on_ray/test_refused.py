"""What `evenly.ray.run`, `evenly run --ray` and `evenly submit --ray` refuse before anything starts."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import evenly
import evenly.ray
from evenly.errors import PlanError, UserError
from evenly.launcher.ray_job import RayJob, ray_submission
from evenly.launcher.rounds import NodeRange


def made() -> evenly.Job:
    raise AssertionError("nothing is to start")


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"workers": 0}, "at least one rank"),
        ({"workers": (3, 2)}, "the least number comes first"),
        ({"workers": 3, "plan": "data=2"}, "data=2"),
        ({"workers": (2, 4), "plan": "zero3 tensor=2"}, "on 3, "),
        ({"workers": 2, "plan": "balanced-dp"}, "replicas share one process"),
        ({"workers": 2, "resources": {"GPU": 0.5}}, "0.5 GPUs"),
        ({"workers": 2, "resume": True}, "it holds no run"),
    ],
)
def test_what_no_cluster_could_run(tmp_path: Path, asked: dict[str, Any], found: str) -> None:
    with pytest.raises(UserError) as refused:
        evenly.ray.run(made, out=tmp_path / "out", **asked)
    assert found in refused.value.found
    assert not (tmp_path / "out").exists()


def test_every_number_of_workers_that_does_not_fit_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as refused:
        evenly.ray.run(made, workers=(2, 5), plan="tensor=2", out=tmp_path)
    assert "on 3, " in refused.value.found and "on 5, " in refused.value.found and "on 4, " not in refused.value.found


def test_a_folder_of_another_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="already holds a run"):
        evenly.ray.run(made, workers=2, out=tmp_path)


def test_without_ray_the_way_to_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "evenly.ray.workers", raising=False)
    with pytest.raises(UserError) as refused:
        evenly.ray.run(made, workers=2, out=tmp_path)
    assert refused.value.do == 'pip install "evenly[ray]"'


def test_a_job_that_cannot_be_sent(tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(UserError) as refused:
        evenly.ray.run(lambda: lock, workers=2, out=tmp_path)  # type: ignore[arg-type, return-value]
    assert "cannot be sent" in refused.value.found and "function that makes the job" in refused.value.do


JOB = RayJob(job=Path("job.py"), out=Path("/shared/mine"), address="http://head:8265", workers=NodeRange(2, 4))


def test_what_is_submitted() -> None:
    asked = RayJob(**{**vars(JOB), "arguments": ("--plan", "zero3")})
    words = ray_submission(asked)
    assert words[: words.index("--")][:6] == ["ray", "job", "submit", "--address", "http://head:8265", "--no-wait"]
    run = "evenly run job.py --out /shared/mine --autoresume --ray 2:4 --restarts 10 --plan zero3"
    assert words[words.index("--") + 1 :] == run.split()


@pytest.mark.parametrize(
    "changed", [{"out": Path("mine")}, {"job": Path("/home/me/job.py")}, {"job": Path("../job.py")}]
)
def test_what_the_nodes_could_not_find(changed: dict[str, Path]) -> None:
    with pytest.raises(UserError):
        ray_submission(RayJob(**{**vars(JOB), **changed}))
