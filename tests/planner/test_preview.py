"""What is drawn of a plan's step is what was predicted of it, with fewer microbatches."""

from __future__ import annotations

import pytest
from predicted import predict_plan

from evenly.hardware.cluster_text import parse_cluster
from evenly.plan import Plan, parse_plan
from evenly.planner.known import find_shape
from evenly.planner.request import PlanRequest
from evenly.planner.shapes import ShapeSource
from evenly.planner.timeline import Timeline
from evenly.report.planpage import preview

COMPUTING = ("matmul", "attention", "memory", "recompute", "host")


def request(batch: int) -> PlanRequest:
    source = ShapeSource(find_shape("gpt2"))
    return PlanRequest(source=source, cluster=parse_cluster("8xA100-80"), batch=batch)


def plan_of(text: str) -> Plan:
    return parse_plan(f"{text} zero=0 microbatch=1 recompute=none precision=bfloat16").complete("bfloat16")


def drawn(timeline: Timeline) -> int:
    return len({span.microbatch for span in timeline.spans})


def test_one_device_takes_what_its_computing_was_predicted_to_take() -> None:
    plan = plan_of("data=1")
    time = predict_plan(request(4), plan).time
    assert preview(request(4), plan).makespan_s == pytest.approx(sum(getattr(time, cause) for cause in COMPUTING))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"])
def test_a_pipeline_shows_its_ranks_and_a_few_microbatches(schedule: str) -> None:
    plan = plan_of(f"data=1 pipeline=4 schedule={schedule}")
    whole = predict_plan(request(64), plan)
    found = preview(request(64), plan)
    assert found.ranks == 4 and drawn(found) == 8
    assert 0 < found.makespan_s < whole.step_s / 4
    assert drawn(preview(request(2), plan)) == (8 if schedule == "dualpipev" else 2)
