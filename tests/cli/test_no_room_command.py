"""A run of which one rank has too little memory ends by itself, under another plan, with the numbers of one device."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from command import evenly
from no_room_job import LIMIT, job

import evenly as package
from evenly.checkpoint.store import CheckpointStore
from evenly.cli.run import RunRequest, _start_until_done
from evenly.launcher.agent import FailedRank, Launch
from evenly.launcher.rounds import NodeRange
from evenly.observe.attempts import note_start
from evenly.observe.run_folder import RunFolder
from evenly.train.loop import train
from evenly.train.options import RunOptions

JOB = Path(__file__).with_name("no_room_job.py")


def state(out: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole."""
    checkpoint = CheckpointStore(out).load(step)
    into = {name: torch.empty(form.shape, dtype=getattr(torch, form.dtype)) for name, form in checkpoint.forms.items()}
    checkpoint.read(into)
    return into


def test_a_rank_of_three_that_has_no_room(tmp_path: Path) -> None:
    with package.start(job(), plan="single", out=tmp_path / "alone") as run:
        train(run)
    command = ("run", JOB, "--devices", 3, "--plan", "ddp", "--out", "out", "--set", f"limit={LIMIT}")
    done = evenly(*command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    said = (
        "evenly: rank 1 failed at step 2 under data=3 precision=float64 exact=rounding: it had no room: RuntimeError: "
    )
    assert done.stderr.count(said) == 1 and "trying a plan that needs less memory, from step 1\n" in done.stderr
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())["plan"]
    assert "recompute=" in plan and f"({plan})" in done.stdout
    expected, found = state(tmp_path / "alone", 3), state(tmp_path / "out", 3)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12, msg=name)
    assert "no room" in evenly("report", tmp_path / "out", folder=tmp_path).stdout


def started(monkeypatch: pytest.MonkeyPatch, out: Path, *, stopped: bool = False, **asked: Any) -> list[RunOptions]:
    """The options of each start of a run whose ranks have no room until they have tried two plans."""
    seen: list[RunOptions] = []

    def start(request: RunRequest, launch: Launch, settings: Any, options: RunOptions, **_: Any) -> int:
        seen.append(options)
        note_start(RunFolder(out), f"data={len(seen)}", new=not options.no_room)
        if len(options.no_room) < 2:
            raise FailedRank("rank 1 failed at step 5", "it had no room", "", rank=1, step=5, kind="memory")
        return 0

    monkeypatch.setattr("evenly.cli.run._start", start)
    plain: dict[str, Any] = {
        "job": JOB, "arguments": [], "plan": None, "devices": 2, "out": out, "steps": None, "resume": False,
        "step": None, "skip_nonfinite": 0, "check": False, "stall_limit_s": None, "settings": [], "nodes": NodeRange(),
        "node_rank": 0, "rendezvous": "", "secret_file": None, "json_only": True,
    }  # fmt: skip
    request = RunRequest(**{**plain, **asked})
    launch = Launch(devices=2)
    if stopped:
        launch.stop.ask(signal.SIGINT)
    try:
        _start_until_done(request, launch, {}, RunOptions(out=out), script=False)
    except FailedRank:
        seen.append(RunOptions())
    return seen


def test_plans_are_tried_until_one_has_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, second, third = started(monkeypatch, tmp_path)
    assert (first.no_room, second.no_room, third.no_room) == ((), ("data=1",), ("data=1", "data=2"))
    assert third.long_step == 4


@pytest.mark.parametrize(
    "asked", [{"keep_plan": True}, {"stopped": True}, {"stopped": True, "restarts": 9}, {"step": 3, "resume": True}]
)
def test_when_the_plan_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: dict[str, Any]) -> None:
    """Where that was asked, where the run was to stop, and where a later checkpoint may be another run's."""
    assert len(started(monkeypatch, tmp_path, **asked)) == 2
