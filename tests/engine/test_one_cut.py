"""Where a pipeline is cut is decided once: the planner predicts the stages that the engine runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evenly.engine.build import build_model
from evenly.engine.find_stages import stage_plan_of
from evenly.errors import PlanError
from evenly.hardware.cluster_text import parse_cluster
from evenly.jobfile import load_job
from evenly.parallel.pipeline.model import StagedModel
from evenly.plan import PlanSpec
from evenly.planner.costed_plan import costed_plan_of, layers_of
from evenly.planner.job_source import JobSource
from evenly.planner.request import PlanRequest
from evenly.planner.search import search

EXAMPLES = Path(__file__).parents[2] / "examples"
JOBS = ("stdlib_lm", "digits", "bert", "gpt2", "llama", "t5", "vit", "resnet")


@pytest.mark.full_but("digits", "gpt2", "t5")
@pytest.mark.parametrize("name", JOBS)
def test_planner_and_engine_cut_at_the_same_blocks(name: str) -> None:
    job = load_job(EXAMPLES / f"{name}.py", {})
    source = JobSource(job)
    for stages in (2, 3, 4):
        plan = PlanSpec(data=1, pipeline=stages).complete(job.precision)
        request = PlanRequest(source=source, cluster=parse_cluster(f"1x{stages}xcpu"), batch=job.global_batch)
        try:
            model = StagedModel(build_model(job, precision=plan.precision, device=None), "cpu")
            found, _ = stage_plan_of(job, model, plan, device="cpu")
        except PlanError as refused:  # fewer blocks than stages
            assert source.refusal(plan) == refused.found
            continue
        one = costed_plan_of(request, plan)
        assert layers_of(one) == found.counts
        assert one.plan.pipeline.split_points == tuple(sum(found.counts[:n]) for n in range(1, stages))
    for variable in ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"):  # scikit-learn sets them
        os.environ.pop(variable, None)


def test_the_plan_that_is_found_states_its_split_points() -> None:
    job = load_job(EXAMPLES / "stdlib_lm.py", {})
    only = PlanSpec(data=1, pipeline=2, schedule="1f1b")
    request = PlanRequest(source=JobSource(job), cluster=parse_cluster("1x2xcpu"), batch=job.global_batch, only=only)
    best = search(request).plans[0].plan
    assert best.pipeline.split_points and f"split_points={best.pipeline.split_points[0]}" in str(best)
    model = StagedModel(build_model(job, precision=best.precision, device=None), "cpu")
    found, _ = stage_plan_of(job, model, best, device="cpu")
    assert found.counts[0] == best.pipeline.split_points[0]
