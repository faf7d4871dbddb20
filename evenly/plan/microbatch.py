"""Which microbatch a run has: the job's, that of the run that it goes on from, or the plan's."""

from __future__ import annotations

from dataclasses import replace

from evenly.errors import PlanError
from evenly.job import Job
from evenly.plan.plan import Plan
from evenly.plan.spec import PlanSpec


def with_microbatch(job: Job, plan: Plan | PlanSpec, *, recorded: int | None = None) -> Job:
    """`job` as a run of it under `plan` cuts its batches.

    recorded: samples per microbatch of the run that this one goes on from.

    A job that states neither `microbatch` nor `microbatch_cost` takes what is recorded, else the plan's, else its own
    rule. Raises `PlanError` for a plan that names another: sums and random streams follow microbatches.
    """
    is_open = job.microbatch is None and job.microbatch_cost is None
    found = recorded or plan.microbatch if is_open else job.microbatch
    if plan.microbatch not in (None, found):
        raise PlanError(
            f"plan {plan} for job {job.name!r}",
            f"{_whose(job, recorded)}, and the numbers follow it",
            "leave microbatch out of the plan",
        )
    return replace(job, microbatch=found) if is_open and found else job


def _whose(job: Job, recorded: int | None) -> str:
    if job.microbatch is not None:
        return f"the job states microbatch={job.microbatch}"
    if job.microbatch_cost is not None:
        return f"the job states microbatch_cost={job.microbatch_cost:g}"
    return f"the run that goes on has microbatch={recorded}"
