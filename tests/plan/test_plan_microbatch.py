"""Who says how a batch is cut: the job, the run that goes on, the plan, the job's rule, in this order."""

from __future__ import annotations

import pytest
from jobs import classifier_job, language_job

from evenly.errors import PlanError
from evenly.plan import PlanSpec, with_microbatch


@pytest.mark.parametrize(
    ("stated", "recorded", "planned", "used"),
    [
        (3, None, None, 3),
        (3, None, 3, 3),
        (3, 5, None, 3),  # resuming tells what differs from the checkpoint
        (None, None, None, 2),
        (None, None, 4, 4),
        (None, 5, None, 5),
        (None, 5, 5, 5),
    ],
)
def test_the_first_that_says_it_decides(
    stated: int | None, recorded: int | None, planned: int | None, used: int
) -> None:
    job = with_microbatch(classifier_job(microbatch=stated), PlanSpec(microbatch=planned), recorded=recorded)
    assert job.samples_per_microbatch == used


@pytest.mark.parametrize(
    ("stated", "recorded", "message"),
    [(3, None, "the job states microbatch=3"), (None, 5, "the run that goes on has microbatch=5")],
)
def test_a_plan_cannot_change_what_the_numbers_follow(stated: int | None, recorded: int | None, message: str) -> None:
    with pytest.raises(PlanError, match=f"{message}, and the numbers follow it") as caught:
        with_microbatch(classifier_job(microbatch=stated), PlanSpec(data=2, microbatch=4), recorded=recorded)
    assert caught.value.asked == "plan data=2 microbatch=4 for job 'classifier'"


def test_a_budget_is_no_number_of_samples() -> None:
    job = language_job()
    assert with_microbatch(job, PlanSpec(), recorded=2) is job
    with pytest.raises(PlanError, match="the job states microbatch_cost=40"):
        with_microbatch(job, PlanSpec(microbatch=4))
    both = language_job(microbatch=4)
    assert with_microbatch(both, PlanSpec(microbatch=4)) is both
