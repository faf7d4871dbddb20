"""A whole verification in this process, of one device: what the parts find arrives in the table."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from own_losses import FILE, LOSSES
from test_data_rules import FAULTS
from verified import verified

import evenly.verify.ranks as ranks_module
from evenly.errors import UserError
from evenly.launcher.agent import Launch
from evenly.launcher.environment import find_here
from evenly.plan import parse_plan
from evenly.verify import verify as module
from evenly.verify.ranks import write_references
from evenly.verify.tasks import FoundInJob
from evenly.verify.verify import Verification, VerifyRequest, verify

JOB_FILE = """
from jobs import Points, classifier_job
from test_data_rules import Counting

def job(carries=False):
    model = dict(model=lambda: Counting(buffer=False)) if carries else {}
    return classifier_job(data=Points(60), eval_data=Points(40, seed=1), **model)
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "whole_job.py"
    path.write_text(JOB_FILE)
    return path


@pytest.fixture
def run(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Verification]:
    """Verifies plans of one device, each rank in turn in this process."""

    def in_this_process(task: Any, arguments: Sequence[Any], launch: Launch) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for rank in range(launch.devices):
            place = replace(find_here(), rank=rank)
            monkeypatch.setattr(ranks_module, "find_here", lambda place=place: place)
            found[rank] = task(*arguments)
        return found

    monkeypatch.setattr(module, "start_ranks", in_this_process)

    def run(*plans: str, steps: int = 3, dtype: Any = "float64", **settings: Any) -> Verification:
        request = VerifyRequest(job_file, settings, steps, dtype)
        return verify(request, [*plans], devices=None, report=lambda _: None)

    return run


def test_one_device_has_its_own_numbers_also_where_plans_take_turns(run: Callable[..., Verification]) -> None:
    found = run("single", "single>single")
    assert [(row.status, row.reason) for row in found.plans] == [("equal", "")] * 2
    assert found.note == "" and found.exit_code == 0
    assert all(row.param_rounding is not None and 0 < row.param_rounding < 1e-9 for row in found.plans)


@pytest.mark.parametrize(
    "name", ["a sample less per batch", "always step 0", "one sample again", "one evaluated microbatch"]
)
def test_what_both_sides_would_do_wrong_is_found_in_the_data(
    name: str, run: Callable[..., Verification], monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[name][0](monkeypatch)
    found = run("single")
    [row] = found.plans
    assert row.status == "different" and row.reason == f"data: {found.note}"
    assert found.note


def test_what_a_model_carries_along_refuses_plans_of_several_devices(run: Callable[..., Verification]) -> None:
    found = run("single", "ddp", carries=True)
    assert [(row.status, row.world) for row in found.plans] == [("equal", 1), ("unsupported", 2)]
    named = "module Counting computes other numbers for microbatch 0"
    assert named in found.plans[1].reason and found.note.startswith(named)


NOT_CHECKED = "not checked: whether the loss is a sum over samples (RuntimeError: 2 samples, not 4"


@pytest.mark.parametrize(("loss", "note"), [("gradient_penalty", ""), ("of_full_microbatches", NOT_CHECKED)])
def test_a_check_that_fails_is_said_and_plans_are_compared(
    loss: str, note: str, job_file: Path, run: Callable[..., Verification]
) -> None:
    job_file.write_text(FILE)
    found = run("single", loss=loss)
    assert found.note.startswith(note) and (found.note == "") == (note == "")
    assert [row.status for row in found.plans] == ["equal"]


@pytest.mark.full
@pytest.mark.parametrize("loss", LOSSES)
def test_plans_are_compared_whatever_a_loss_needs(loss: str, tmp_path: Path) -> None:
    (tmp_path / "own_job.py").write_text(
        FILE
        + f"""
own = job
def job():
    return own({loss!r})
"""
    )
    plans = ["single", "ddp", "zero1", "zero2", "zero3", "tensor=2"]
    found = {row.plan: row for row in verified(tmp_path / "own_job.py", plans, tmp_path, steps=3)}
    twice, counts = {"zero3": "a gradient of a gradient"}, "the job counts its forwards"
    refused = {
        "of_so_many_calls": dict.fromkeys(("ddp", "zero1", "zero2", "zero3"), counts),
        "gradient_penalty": twice,
        "norm_of_gradients": {**twice, "tensor=2": "no parameter of the model can be split"},
    }
    for plan, row in found.items():
        why = refused.get(loss, {}).get(plan)
        assert (row.status == "equal") if why is None else (why in row.reason), row


def test_a_plan_of_another_precision_is_refused(run: Callable[..., Verification]) -> None:
    [row] = run("single precision=bfloat16").plans
    assert (row.status, "give --dtype bfloat16" in row.reason) == ("unsupported", True)


@pytest.mark.full_but("ddp-sums", "pp-sums", "tensor=2-forward")
@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        ("ddp", "sums"),
        ("zero3", "sums"),
        ("pp", "sums"),
        ("tensor=2", "forward"),
        ("ddp compile=blocks", "forward"),
        ("pp compile=blocks", "forward"),
        ("ddp>tensor=2", "forward"),
    ],
)
def test_the_rounding_that_a_plan_may_add_is_what_is_measured(
    plan: str, kind: str, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[str] = []

    def start_ranks(task: Any, arguments: Sequence[Any], _: Launch) -> dict[int, Any]:
        kinds.append(arguments[-1])
        if task is module.run_references:
            return {0: FoundInJob()}
        raise UserError("a plan", "it was so", "")

    monkeypatch.setattr(module, "start_ranks", start_ranks)
    monkeypatch.setattr(module, "measure_rounding", lambda _, kind, draw: kinds.append(kind))
    verify(VerifyRequest(job_file, {}, 3, "float64"), [plan], devices=2, report=lambda _: None)
    assert kinds == [[("none", 1), (kind, 1)], kind, kind]


def test_the_reference_runs_on_the_kind_of_device_that_plans_run_on(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[str] = []
    monkeypatch.setattr(ranks_module, "find_device", lambda place: f"cuda:{place.local_rank}")
    monkeypatch.setattr(ranks_module, "keep_reference", lambda *_, device, **__: devices.append(device))
    request = (job_file, {}, "float64", parse_plan("ddp"), 3, tmp_path)
    for runs in ([("none", 1)], [("sums", 1)]):
        write_references(*request, runs)  # type: ignore[arg-type]
    assert devices == ["cuda:0", "cuda:0"]


def test_the_launcher_imports_no_engine() -> None:
    """It never runs it, and that takes as long as importing torch."""
    code = "import sys, evenly.verify.verify; print([m for m in sys.modules if m.startswith('evenly.')])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "evenly.verify.tasks" in found
    assert not any(f"evenly.{name}" in found for name in ("train", "engine", "parallel", "checkpoint", "verify.ranks"))
