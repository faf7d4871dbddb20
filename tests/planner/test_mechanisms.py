"""What pictures of a plan show is what its functions decide: every sample, gradient, chunk and element once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from jobs import language_job
from jobs_pipeline import job as chain_job

from evenly.data.loader import share_of_step
from evenly.errors import PlanError
from evenly.plan import parse_plan
from evenly.planner.job_memory import memory_of_ranks
from evenly.planner.job_profile import JobProfiler
from evenly.planner.mechanisms import Mechanisms, mechanisms_of
from evenly.report.mechanisms import summed


def found(plan: str, **changes: object) -> Mechanisms:
    return mechanisms_of(language_job(**changes), parse_plan(plan))


def test_the_batch_is_dealt_as_it_is_run() -> None:
    job, one = language_job(), found("data=3")
    assert one.ranks == 3 and one.refused == {}
    for rank, own in enumerate(one.dealt):
        share = share_of_step(job, 0, rank=rank, ranks=3)
        assert (own, one.microbatches) == (share.own, share.microbatches)
    assert sorted(number for own in one.dealt for number in own) == [*range(len(one.microbatches))]


@pytest.mark.parametrize("plan", ["data=2", "data=2 zero=2", "data=2 zero=3", "data=2 tensor=2"])
def test_every_gradient_is_in_one_bucket_that_fills_within_the_backward(plan: str) -> None:
    one = found(plan)
    names = [name for bucket in one.buckets for name in bucket.parameters]
    assert len({*names}) == len(names) and {*names} == {*one.shapes}
    assert one.are_units == ("zero=3" in plan)
    assert all(0 <= bucket.begin <= bucket.end <= 1 + 1e-9 for bucket in one.buckets)
    assert one.backward[0].begin == 0 and one.backward[-1].end == pytest.approx(1)
    assert all(part.begin <= part.end for part in one.backward)


def test_a_pipeline_s_first_rank_sums_what_it_holds() -> None:
    one = mechanisms_of(chain_job(), parse_plan("data=2 pipeline=2"))
    names = {name for bucket in one.buckets for name in bucket.parameters}
    assert names and names < {*one.shapes}


def test_the_ring_ends_with_all_sums_everywhere() -> None:
    for ranks in (2, 3, 5):
        one = found(f"data={ranks}")
        states = summed(one)
        assert len(states) == 2 * ranks - 1 and states[-1] == [[ranks] * ranks] * ranks
        after_half = states[ranks - 1]
        assert [row.count(ranks) for row in after_half] == [1] * ranks
        assert sum(one.chunk_bytes) == one.buckets[0].bytes


@pytest.mark.parametrize("plan", ["data=2 zero=1", "data=3 zero=3"])
def test_pieces_are_the_whole_model_once(plan: str) -> None:
    one = found(plan)
    for name, shape in one.shapes.items():
        ends = [own[name] for own in one.pieces]
        size = 1
        for side in shape:
            size *= side
        assert ends[0][0] == 0 and ends[-1][1] == size
        assert all(before[1] == after[0] for before, after in pairwise(ends))


def test_memory_is_the_planner_s_own_under_every_stage() -> None:
    one = found("data=2 zero=2")
    assert [*one.held] == [0, 1, 2, 3]
    plan = parse_plan("data=2 zero=1").complete(language_job().precision)
    expected = [meter.by_cause.peak for meter in memory_of_ranks(JobProfiler(language_job()), plan)]
    assert [sum(rank.values()) for rank in one.held[1]] == expected
    assert one.held[3][0]["parameters"] < one.held[0][0]["parameters"]


def test_one_device_shares_nothing() -> None:
    one = found("single")
    assert one.ranks == 1 and (one.buckets, one.ring, one.pieces, one.held) == ([], [], [], {})


@pytest.mark.parametrize("plan", ["ddp", "data=2 tensor=auto", "data=65"])
def test_sizes_are_stated_and_can_be_drawn(plan: str) -> None:
    with pytest.raises(PlanError, match=r"--only data=4|at most 64"):
        found(plan)
