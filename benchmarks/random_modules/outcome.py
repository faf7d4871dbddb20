"""What the ranks of a case do: the reference on one device, then the plan held against it."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.random_modules.cases import Case, job_of
from evenly.plan import parse_plan
from evenly.verify import ranks, verify
from evenly.verify.compare import RankComparison
from evenly.verify.disturb import Disturbance
from evenly.verify.tasks import PlanSteps

STEPS = 3


def prepare(case: Case, folder: Path) -> None:
    """Makes the references of `case` in `folder`; on one rank."""
    torch.set_num_threads(1)
    ranks.keep_measured_reference(job_of(case), STEPS, folder, [kind_of(case)])


def measure_again(case: Case, folder: Path) -> None:
    """Measures what further draws of rounding do to `case`; on one rank."""
    torch.set_num_threads(1)
    ranks.measure_again(job_of(case), STEPS, folder, kind_of(case))


def compare(case: Case, folder: Path) -> RankComparison:
    """Compares the plan of `case` with the references in `folder`; on each of its ranks."""
    steps = PlanSteps(parse_plan(case.plan).fit(world_of(case, devices=True)), 0, STEPS)
    return ranks.compare_steps(job_of(case), steps, STEPS, folder, kind_of(case))


def kind_of(case: Case) -> Disturbance:
    """The rounding that the plan of `case` may add."""
    return "forward" if "tensor" in case.plan else "sums"


def world_of(case: Case, *, devices: bool = False) -> int:
    """The ranks of the plan of `case`, or its devices."""
    plan = parse_plan(case.plan)
    return 1 if plan.replicas is not None and not devices else verify.world_of(plan, None)
