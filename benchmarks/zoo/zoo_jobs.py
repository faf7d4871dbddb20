"""The jobs of the zoo, and what runs in the processes of a row."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import subjects
import torch
from samples import Samples, Shapes

from evenly.job import Job
from evenly.plan import PlanSpec, parse_plan
from evenly.verify import ranks
from evenly.verify.disturb import Disturbance
from evenly.verify.tasks import PlanSteps
from evenly.verify.verify import world_of

STEPS = 2
MICROBATCH = 2
GLOBAL_BATCH = 6  # three microbatches: ranks have unlike shares


def job_of(name: str, shapes: Shapes) -> Job:
    """The job of one subject: SGD with momentum, which enlarges no rounding as Adam does."""
    of, own = subjects.split(name)
    library = subjects.library(of)
    return Job(
        model=partial(subjects.build, name),
        loss=library.loss,
        data=Samples(shapes, library.avoided(own)),
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
        global_batch=GLOBAL_BATCH,
        microbatch=MICROBATCH,
        steps=STEPS,
        precision="float64",
        name=name,
    )


def plan_of(text: str) -> PlanSpec:
    """The plan, with a size for every axis."""
    plan = parse_plan(text)
    return plan.fit(world_of(plan, None))


def _quiet(*, small_units: bool) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if small_units:  # blocks of small models are units, cut as those of large ones are
        from evenly.parallel.data import grouping

        grouping.SMALL_BYTES = grouping.WHOLE_BYTES = 0


def prepare(name: str, folder: Path) -> dict[str, Any]:
    """Finds the batch of a subject, trains the references, and keeps them in `folder`."""
    _quiet(small_units=False)
    found = subjects.subject(name)
    ranks.keep_measured_reference(job_of(name, found.batch), STEPS, folder, ["sums", "forward"])
    return asdict(found)


def measure_again(name: str, shapes: Shapes, plan: str, folder: Path) -> None:
    """Measures what further draws of rounding do to a subject that came out different under `plan`."""
    _quiet(small_units=False)
    ranks.measure_again(job_of(name, shapes), STEPS, folder, _kind_of(plan))


def compare(name: str, shapes: Shapes, plan: str, folder: Path) -> Any:
    """The comparison of one rank under `plan`."""
    _quiet(small_units=True)
    return ranks.compare_steps(job_of(name, shapes), PlanSteps(plan_of(plan), 0, STEPS), STEPS, folder, _kind_of(plan))


def _kind_of(plan: str) -> Disturbance:
    return "forward" if plan_of(plan).tensor != 1 else "sums"
