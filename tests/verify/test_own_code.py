"""Hooks and loops of a job's own are run by the plain loop too, and compared."""

from __future__ import annotations

from pathlib import Path

import own_hooks
import pytest
import torch
from kept_ranks import KeptRanks
from torch.nn import functional as F
from verified import verified

from evenly.data.loader import microbatches_of_step
from evenly.plan import PlanSpec, parse_plan
from evenly.train.loop import run_job
from evenly.train.options import RunOptions
from evenly.verify.compare import RankComparison, judge
from evenly.verify.ranks import compare_steps, keep_reference
from evenly.verify.reference import OwnCodeError, build_model, reference_steps
from evenly.verify.tasks import PlanSteps

STEPS = 3


def compared(name: str, plan: str, folder: Path) -> RankComparison:
    job = own_hooks.make(name, precision="float64")
    return compare_steps(job, PlanSteps(parse_plan(plan), 0, STEPS), STEPS, folder, loop=own_hooks.LOOPS.get(name))


@pytest.mark.parametrize(
    ("name", "status"), [("teacher", "equal"), ("on main", "different"), ("loop of two passes", "equal")]
)
def test_hooks_and_loops_are_compared(name: str, status: str, ranks: KeptRanks, tmp_path: Path) -> None:
    job = own_hooks.make(name, precision="float64")
    keep_reference(job, STEPS, tmp_path / "reference", loop=own_hooks.LOOPS.get(name))
    row = judge("ddp", ranks.run(compared, name, "ddp", tmp_path))
    assert row.status == status, row
    if status == "different":
        assert "teacher" in row.reason


def test_the_reference_runs_hooks_as_a_loop_by_hand_does() -> None:
    job = own_hooks.make("teacher", precision="float64")
    *_, last = reference_steps(job, STEPS)
    model = build_model(job)
    optimizer = job.optimizer(model.parameters())
    for step in range(STEPS):
        indices = [index for group in microbatches_of_step(job, step) for index in group]
        x, y = torch.stack([job.data[i][0] for i in indices]).double(), torch.stack([job.data[i][1] for i in indices])
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(model.teacher.parameters(), model.head.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
    for name, tensor in model.state_dict().items():
        assert float((tensor - last.tensors[name]).abs().max()) < 1e-12, name


def test_a_plain_loop_that_cannot_run_a_hook_says_so(tmp_path: Path) -> None:
    with pytest.raises(OwnCodeError, match="no attribute 'composed'"):
        [*reference_steps(own_hooks.make("internal"), STEPS)]
    with pytest.raises(OwnCodeError, match="no attribute 'executor'"):
        keep_reference(own_hooks.make("loop"), STEPS, tmp_path, loop=own_hooks.fails)


def test_a_run_is_trained_by_the_loop_of_its_job_file(tmp_path: Path) -> None:
    options = RunOptions(plan=PlanSpec(data=1), out=tmp_path / "run", quiet=True)
    found = run_job(own_hooks.make("loop clamped"), options, loop=own_hooks.clamped)
    assert (found.steps, found.steps_asked) == (3, 3) and found.loss is not None
    [saved] = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert saved.name.endswith("3")


PLANS = ["single", "ddp", "zero1", "zero2", "zero3", "tensor=2", "pipeline=2"]


@pytest.mark.full
@pytest.mark.parametrize("name", [*own_hooks.HOOKS])
def test_every_plan_is_compared_with_hooks_and_loops(name: str, tmp_path: Path) -> None:
    path = tmp_path / "own_job.py"
    path.write_text(
        (own_hooks.WITH_LOOP if name in own_hooks.LOOPS else own_hooks.FILE)
        + f"""
def job():
    return own_hooks.make({name!r})
"""
    )
    for plan, status, reason in verified(path, PLANS, tmp_path, steps=STEPS):
        moved = name == "on main" and plan in ("ddp", "zero1", "zero2", "zero3", "tensor=2", "pipeline=2")
        assert status in (("different", "error", "unsupported") if moved else ("equal", "unsupported")), (plan, reason)
