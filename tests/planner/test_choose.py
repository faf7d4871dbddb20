"""A job as the planner sees it, and the plan that is chosen for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from jobs import InPlace, Sentences, Unlike, classifier_job, tower_job
from predicted import predict_plan

import evenly
from evenly.data.loader import Microbatch, Share, share_of_step
from evenly.data.nest import tensors_in
from evenly.errors import PlanError, UserError
from evenly.hardware.cluster import Cluster, Link
from evenly.hardware.cluster_file import write_cluster
from evenly.launcher.environment import find_here
from evenly.plan import Plan, PlanSpec, parse_plan
from evenly.planner.auto import as_recorded, choose_plan, cluster_of
from evenly.planner.job_memory import memory_of_ranks
from evenly.planner.job_profile import JobProfiler
from evenly.planner.job_source import JobSource
from evenly.planner.request import PlanRequest
from evenly.planner.search import _Judge, choices_of, search  # pyright: ignore[reportPrivateUsage]

GPUS = Cluster(1, 4, "A100-40")


class Even(Sentences):
    """Twelve sentences of nine tokens."""

    def __init__(self) -> None:
        self.rows = [torch.randint(1, 11, (9,)) for _ in range(12)]


def even_job(**changes: Any) -> evenly.Job:
    """Samples of one length, a whole number of microbatches."""
    fixed: dict[str, Any] = {"microbatch_cost": None, "cost": None, "microbatch": 3, "data": Even(), "eval_data": None}
    return tower_job(**{**fixed, **changes})


def asked(job: evenly.Job, **others: object) -> PlanRequest:
    return PlanRequest(source=JobSource(job), cluster=GPUS, batch=job.global_batch, **others)  # pyright: ignore


def test_a_job_is_planned_with_its_own_microbatch_and_precision() -> None:
    job = tower_job(precision="bfloat16")
    result = search(asked(job))
    assert result.plans
    for found in result.plans:
        assert found.plan.microbatch is None and found.plan.precision == "bfloat16"
        assert found.samples == job.global_batch and found.tokens is None
        assert found.plan.ranks == 4 and found.fits


def test_its_operations_are_those_of_the_model() -> None:
    job = even_job()
    source = JobSource(job)
    plan = PlanSpec(data=1, microbatch=None, recompute="none").complete("float32")
    found = predict_plan(asked(job), plan)
    from torch.utils.flop_counter import FlopCounterMode

    model = job.model()
    total = 0.0
    for microbatch in JobProfiler(job).microbatches:
        with FlopCounterMode(display=False) as counter:
            job.loss(model, microbatch.batch)
        total += counter.get_total_flops()
    assert found.flops == pytest.approx(3 * total, rel=0.02)
    assert source.blocks == len(source.parts(plan, asked(job).config(plan)).blocks) > 1


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_of_microbatches_that_differ_the_rank_with_most_to_do_counts(replicas: int, zero: int) -> None:
    job = tower_job()
    assert job.microbatch_cost is not None
    profiler, request = JobProfiler(job), asked(job)
    shares = [[share_of_step(job, step, rank=rank, ranks=replicas) for rank in range(replicas)] for step in range(8)]
    loads = profiler.loads(replicas, filled=zero == 3)
    for of_step, load in zip(shares, loads, strict=True):
        assert len(load) == of_step[0].rounds
        assert sum(load) == max(sum(costs_of(share, filled=zero == 3)) for share in of_step)
    plan = PlanSpec(data=replicas, zero=zero, recompute="none").complete("float32")
    config = request.config(plan)
    assert config.loads == loads and config.microbatches == round(fmean(map(len, loads)))
    per_cost = sum(map(elements_of, profiler.microbatches)) / sum(shares[0][0].costs)
    elements = per_cost * fmean(map(sum, loads))
    assert profiler.elements(replicas, filled=zero == 3) == pytest.approx(elements)
    assert profiler.typical(plan, config).elements == round(elements / config.microbatches)


def costs_of(share: Share, *, filled: bool) -> list[float]:
    return [share.costs[number] for number in (*share.own, *(share.filled().fillers if filled else ()))]


def elements_of(microbatch: Microbatch) -> int:
    return sum(tensor.numel() for tensor in tensors_in(microbatch.batch))


def test_of_microbatches_that_are_alike_all_count() -> None:
    job = even_job()
    request, plan = asked(job), PlanSpec(data=2, recompute="none").complete("float32")
    assert request.source.loads(2, filled=True) == () and request.config(plan).microbatches == 2
    profiler = JobProfiler(job)
    assert profiler.typical(plan, request.config(plan)) is profiler.profile(plan)


def test_memory_is_that_of_the_ranks() -> None:
    job = tower_job()
    plan = parse_plan("data=2 pipeline=2 schedule=1f1b recompute=none").complete("float32")
    memory = memory_of_ranks(JobProfiler(job, device="cuda"), plan)
    found = predict_plan(asked(job), plan)
    worst = [max(meter.peak for meter in memory[:2]), max(meter.peak for meter in memory[2:])]
    assert [one.peak - one.context for one in found.memory] == worst


def test_a_plan_that_the_model_refuses_is_not_answered() -> None:
    with pytest.raises(PlanError):
        predict_plan(asked(tower_job()), PlanSpec(data=1, pipeline=64).complete("float32"))


def test_a_model_in_which_nothing_repeats_is_planned_without_stages() -> None:
    job = classifier_job(model=Unlike)
    assert JobSource(job).blocks == 0
    assert {choice.pipeline for choice in choices_of(asked(job), 4)} == {1}
    assert search(asked(job)).plans
    assert search(asked(job, only=PlanSpec(recompute="full"))).plans


def test_products_that_are_changed_in_place_are_not_kept() -> None:
    job = classifier_job(model=InPlace)
    assert {found.plan.recompute for found in search(asked(job)).plans} <= {"none", "full"}
    with pytest.raises(UserError, match="changes the result of a matrix product in place"):
        search(asked(job, only=PlanSpec(recompute="selective")))


def test_a_model_that_needs_numbers_is_refused_with_the_place() -> None:
    with pytest.raises(UserError, match=r"jobs\.py"):
        search(asked(classifier_job()))


def test_what_the_tensor_axis_splits_is_in_the_parts() -> None:
    source = JobSource(tower_job())
    if 2 not in source.tensor_sizes(4):
        pytest.skip("nothing of it can be split")
    whole, split = (
        source.parts(
            parse_plan(text).complete("float32"), asked(tower_job()).config(parse_plan(text).complete("float32"))
        )
        for text in ("data=1", "data=1 tensor=2")
    )
    assert split.blocks[0].parameters < whole.blocks[0].parameters
    assert split.blocks[0].collectives and not whole.blocks[0].collectives


def test_collectives_of_the_tensor_axis_are_those_of_each_pass() -> None:
    """Where ranks share the sequence, sums scatter and are gathered, and whole parameters have gradients to add up."""
    source = JobSource(tower_job())
    plan = parse_plan("data=1 tensor=2 sequence_parallel=on").complete("float32")
    block = source.parts(plan, asked(tower_job()).config(plan)).blocks[0]
    assert block.collectives_backward is not None
    forward, backward = ({one.operation for one in found} for found in (block.collectives, block.collectives_backward))
    assert forward == {"reduce_scatter", "all_gather"}
    assert backward == {"reduce_scatter", "all_gather", "all_reduce"}


def test_a_job_without_a_microbatch_leaves_it_to_the_plans() -> None:
    job = even_job(microbatch=None)
    result = search(asked(job, only=PlanSpec(data=2)))
    assert all(found.plan.microbatch is not None for found in result.plans)
    sizes = {choice.microbatch for choice in choices_of(asked(job), 2)}
    assert len(sizes) > 1


@pytest.mark.full_but("None")
@pytest.mark.parametrize("microbatch", [3, None])
def test_what_is_known_without_profiling_is_a_bound(microbatch: int | None) -> None:
    request = asked(even_job(microbatch=microbatch))
    judge = _Judge(request)
    bounds = [(judge.bound(one, least=True), judge.bound(one)) for one in choices_of(request, 4)]
    assert all(least <= exact for least, exact in bounds)
    assert any(0 < least < exact < float("inf") for least, exact in bounds)


def test_few_choices_are_profiled() -> None:
    seen: list[Plan] = []
    job = even_job()
    request = asked(job)
    result = search(replace(request, source=JobSource(job, watch=seen.append)))
    every: list[Plan] = []
    judge = _Judge(replace(request, source=JobSource(job, watch=every.append)))
    for choice in choices_of(request, 4):
        judge.bound(choice)
    assert len(seen) < len(every)
    assert [str(one.plan) for one in result.plans] == [str(one.plan) for one in search(request).plans]


def test_recomputation_and_axes_are_profiled_only_where_they_may_be_among_the_best() -> None:
    seen: list[Plan] = []
    job = even_job()
    result = search(replace(asked(job, top=1), source=JobSource(job, watch=seen.append)))
    assert result.plans[0].plan.recompute == "none"
    assert {plan.recompute for plan in seen} == {"none"}


def test_memory_is_looked_at_in_the_order_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    request, found = asked(even_job()), list[float]()
    plain = _Judge.peak_bytes

    def peak_bytes(judge: _Judge, choice: Any) -> float:
        found.append(judge.closer_bound(choice))
        return plain(judge, choice)

    monkeypatch.setattr(_Judge, "peak_bytes", peak_bytes)
    best = search(request).plans
    assert found == sorted(found) and found[-1] <= best[-1].step_s


def test_auto_on_one_device_is_that_device() -> None:
    found = choose_plan(tower_job(), PlanSpec(), find_here())
    assert found.plan.ranks == 1 and found.plan.recompute == "none" and found.limit_bytes > 2**28


def test_auto_keeps_what_is_said() -> None:
    found = choose_plan(tower_job(), PlanSpec(recompute="full"), find_here())
    assert found.plan.recompute == "full"


def two_nodes(file: Path, network_s_per_byte: float) -> Path:
    """A file of two CPUs in two nodes, between which each operation takes so long."""
    operations = ("send", "broadcast", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    between = {(operation, 2, 1): Link(1e-5, network_s_per_byte) for operation in operations}
    write_cluster(file, Cluster(2, 1, "cpu", "gloo", between=between, own={"memory_gib": 4.0}))
    return file


def test_auto_goes_by_what_was_measured(tmp_path: Path) -> None:
    place = replace(find_here(), size=2, nodes=2)
    files = [two_nodes(tmp_path / f"{number}.toml", slow) for number, slow in enumerate((1e-12, 1e-3))]
    fast, slow = (choose_plan(tower_job(), PlanSpec(data=2), place, file) for file in files)
    assert slow.step_s > 10 * fast.step_s and fast.plan.ranks == slow.plan.ranks == 2
    assert cluster_of(replace(place, size=1, nodes=1), files[0]).nodes == 1  # a node has left


@pytest.mark.parametrize("other", [{"size": 3, "nodes": 3}, {"size": 4, "local_size": 2}])
def test_a_file_of_other_devices_is_refused(tmp_path: Path, other: dict[str, int]) -> None:
    place = replace(find_here(), **{"size": 2, "nodes": 2, **other})
    with pytest.raises(UserError, match="it is of 2 x 1 x cpu, and these are"):
        cluster_of(place, two_nodes(tmp_path / "c.toml", 1e-9))


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Cluster(1, 1, "cpu", own={"memory_gib": 1e-6})
    monkeypatch.setattr("evenly.planner.auto.cluster_of", lambda place, file: small)
    with pytest.raises(PlanError, match="no plan fits") as problem:
        choose_plan(tower_job(), PlanSpec(), find_here())
    assert "GiB" in problem.value.do


def test_a_run_under_auto_writes_what_was_predicted(tmp_path: Path) -> None:
    with evenly.start(replace(tower_job(), steps=2), plan="auto", out=tmp_path) as run:
        for batch in run.batches():
            run.step(batch)
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["plan"] == str(run.plan) and run.plan.ranks == 1
    assert written["predicted"]["step_s"] > 0
    assert written["predicted"]["memory_bytes"][0]["peak"] > written["predicted"]["memory_bytes"][0]["parameters"] > 0


def test_the_record_has_every_cause() -> None:
    found = choose_plan(tower_job(), PlanSpec(), find_here())
    document = as_recorded(found)
    assert sum(document["time_s"].values()) == pytest.approx(found.step_s)
    one = document["memory_bytes"][0]
    assert sum(size for cause, size in one.items() if cause != "peak") == pytest.approx(one["peak"])
