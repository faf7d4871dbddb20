"""The search results what looking at everything would, and tells what to do where nothing fits."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf

import pytest
from predicted import predict_plan

from evenly.errors import PlanError, UserError
from evenly.hardware.cluster import Link
from evenly.hardware.cluster_text import parse_cluster
from evenly.plan import PlanSpec, parse_plan
from evenly.plan.cut import cut
from evenly.planner.costed_plan import equal_blocks
from evenly.planner.known import find_shape
from evenly.planner.request import PlanRequest
from evenly.planner.search import _Judge, choices_of, plan_of, search
from evenly.planner.shapes import ShapeSource

SMALL = "transformer:layers=6,hidden=512,heads=8,vocab=8000,sequence=512"


def request(model: str, cluster: str, batch: int, **others: object) -> PlanRequest:
    source = ShapeSource(find_shape(model))
    return PlanRequest(source=source, cluster=parse_cluster(cluster), batch=batch, **others)  # pyright: ignore


@pytest.mark.parametrize(
    ("model", "cluster", "batch", "memory", "reserve"),
    [
        (SMALL, "4xV100", 8, 32e9, 0.08),
        (SMALL, "2x4xA100-40@100", 16, 1.1e10, 0.25),
        (SMALL.replace("vocab=8000", "vocab=250000"), "8xH100", 16, 2.4e10, 0.25),
        ("gpt2-medium", "2x2xRTX-4090", 12, 1.1e10, 0.5),
        ("gpt2-medium", "2x2xRTX-4090", 12, 1.1e10, 0.9),  # which no plan leaves
    ],
)
def test_pruning_discards_nothing_that_would_be_answered(
    model: str, cluster: str, batch: int, memory: float, reserve: float
) -> None:
    asked = request(model, cluster, batch, memory_bytes=memory, top=3, reserve=reserve)
    judge = _Judge(asked)
    best: dict[bool, dict[tuple[int, ...], float]] = {True: {}, False: {}}
    for choice in choices_of(asked, asked.cluster.size):
        found = judge.predicted(choice, inf)
        if found is not None and found.fits:
            alike = best[found.peak_bytes <= (1 - reserve) * memory]
            alike[choice.family] = min(alike.get(choice.family, inf), found.step_s)
    result = search(asked)
    first, second = (sorted(times.values())[:3] for times in (best[True], best[False]))
    faster = [step_s for step_s in second if first and step_s < first[0]]
    assert [plan.step_s for plan in result.plans] == pytest.approx(first or second, rel=1e-12)
    assert [plan.step_s for plan in result.fuller] == pytest.approx(faster, rel=1e-12)
    assert bool(first) == (reserve < 0.9) == all(plan.leaves_reserve for plan in result.plans)
    assert bool(faster) == (reserve == 0.5)
    assert 0 < result.judged < result.tried


@pytest.mark.parametrize("model", [SMALL, "gpt2-medium"])
def test_no_step_beats_its_bound(model: str) -> None:
    asked = request(model, "2x4xA100-40", 16)
    judge = _Judge(asked)
    seen = 0
    for choice in choices_of(asked, 8):
        bound, found = judge.bound(choice), judge.predicted(choice, inf)
        if found is not None:
            seen += 1
            assert bound <= found.step_s, choice
    assert seen > 100


def test_more_devices_are_taken_for_a_step_time_where_few_leave_no_reserve() -> None:
    asked = request("gpt2-xl", "2x8xA100-40", 64)
    quick = search(replace(asked, max_devices=1, reserve=0.0)).plans[0]
    free = 1 - quick.peak_bytes / quick.limit_bytes
    for reserve, alone in ((0.9 * free, True), (free + 0.01, False)):
        result = search(replace(asked, step_s=quick.step_s * 1.001, reserve=reserve))
        assert (result.plans[0].plan.ranks == 1) == alone and result.plans[0].leaves_reserve


def test_what_is_stated_is_in_every_answer() -> None:
    only = parse_plan("tensor=2 recompute=full microbatch=2 exact=rounding")
    result = search(request(SMALL, "8xA100", 32, only=only))
    assert result.plans
    for found in result.plans:
        assert (found.plan.tensor.size, found.plan.recompute, found.plan.microbatch) == (2, "full", 2)
        assert found.plan.ranks == 8


@pytest.mark.parametrize(("only", "axis"), [("tp", "tensor"), ("pp", "pipeline"), ("mp", "pipeline")])
def test_an_axis_that_is_asked_for_has_several_ranks(only: str, axis: str) -> None:
    result = search(request(SMALL, "8xA100", 32, only=parse_plan(only)))
    assert result.plans and all(getattr(found.plan, axis).size > 1 for found in result.plans)
    with pytest.raises(UserError, match="no plan splits"):
        search(request(SMALL, "1xA100", 32, only=parse_plan(only)))


def test_groups_that_are_asked_for_are_those_that_would_run() -> None:
    result = search(request(SMALL, "8xA100", 32, only=parse_plan("hsdp")))
    assert {found.plan.data.shard for found in result.plans if found.plan.data.size == 8} == {4}
    for found in result.plans:
        data = found.plan.data
        assert data.shard == parse_plan(f"hsdp data={data.size}").fit(data.size).shard


def test_answers_are_complete_plans_best_first_and_of_different_families() -> None:
    result = search(request("gpt2-xl", "8xA100", 64))
    times = [found.step_s for found in result.plans]
    assert times == sorted(times) and len(times) == 5
    families = {
        (p.plan.data.size, p.plan.tensor.size, p.plan.pipeline.size, p.plan.data.zero_stage) for p in result.plans
    }
    assert len(families) == 5
    for found in result.plans:
        assert parse_plan(str(found.plan)).complete("bfloat16") == found.plan
        again = predict_plan(request("gpt2-xl", "8xA100", 64), found.plan)
        assert again.step_s == pytest.approx(found.step_s, rel=1e-12)


def test_nothing_fits_and_a_change_that_would_do_is_told() -> None:
    asked = request("llama-3.1-8b", "1xA100-40", 8, only=PlanSpec(exact="rounding"))
    result = search(asked)
    assert not result.plans and result.nearest is not None and not result.nearest.fits
    assert f"{result.nearest.peak_bytes / 2**30:.1f} GiB" in result.change
    told = re.search(r"or (\d+) devices \((.*)\), with (.*)", result.change)
    assert told is not None
    larger = replace(asked, cluster=parse_cluster(told[2]), batch=max(8, int(told[1])))
    assert larger.cluster.size == int(told[1]) > 1
    assert predict_plan(larger, parse_plan(told[3]).complete("bfloat16")).fits
    half = replace(larger, cluster=replace(larger.cluster, nodes=larger.cluster.nodes // 2))
    assert not search(replace(half, only=parse_plan("offload=none"))).plans  # nor do fewer


def test_links_measured_from_node_to_node_do_not_keep_more_nodes_from_being_named() -> None:
    """Those of nodes that are not there were not measured; whether a plan has room does not depend on them."""
    asked = replace(request("llama-3.1-8b", "3x1xA100-40", 12), memory_bytes=16 * 2**30)
    hops = {(node, (node + 1) % 3): Link(1e-5, 1e-10) for node in range(3)}
    measured = search(replace(asked, cluster=replace(asked.cluster, hops=hops)))
    assert not measured.plans and "; or " in measured.change and measured.change == search(asked).change


def test_a_batch_that_no_plan_can_split() -> None:
    with pytest.raises(UserError, match="no plan splits this batch"):
        search(request(SMALL, "4xA100", 2, only=parse_plan("data=4")))


def test_a_tensor_axis_that_the_heads_cannot_be_dealt_over() -> None:
    with pytest.raises(UserError):
        search(request(SMALL, "8xA100", 8, only=parse_plan("tensor=3")))


def test_the_fewest_devices_for_a_step_time() -> None:
    asked = request("gpt2-xl", "4x8xA100", 64)
    one_node = search(replace(asked, max_devices=8)).plans[0].step_s
    result = search(replace(asked, step_s=one_node * 1.01))
    assert result.plans[0].plan.ranks <= 8
    assert result.plans[0].step_s <= one_node * 1.01
    slow = search(replace(asked, step_s=1e-6))
    assert slow.plans[0].plan.ranks == 32 and slow.plans[0].step_s > 1e-6


def test_max_devices() -> None:
    result = search(request("gpt2-xl", "4x8xA100", 64, max_devices=16))
    assert {found.plan.ranks for found in result.plans} == {16}


def test_experts_are_not_cut_into_stages() -> None:
    result = search(request("mixtral-8x7b", "8x8xH100", 64))
    assert result.plans and not any(found.plan.pipeline.active for found in result.plans)
    with pytest.raises(PlanError, match="experts"):
        predict_plan(
            request("mixtral-8x7b", "8xH100", 64), parse_plan("data=4 pipeline=2 microbatch=1").complete("bfloat16")
        )


def test_plans_that_agree_to_the_bit_add_up_in_a_wider_type() -> None:
    asked = request(SMALL, "4xA100", 16)
    rounded, exact = (
        predict_plan(asked, PlanSpec(data=4, microbatch=4, recompute="none", exact=how).complete("bfloat16"))
        for how in ("rounding", "bitwise")
    )
    assert exact.memory[0].gradients == 3 * rounded.memory[0].gradients
    assert exact.comm_bytes == 2 * rounded.comm_bytes


@pytest.mark.parametrize("blocks", [1, 2, 5, 12, 31])
@pytest.mark.parametrize(("before", "after"), [(0.0, 0.0), (0.3, 2.5), (3.0, 0.1), (0.0, 40.0)])
def test_equal_blocks_are_cut_as_well_as_by_the_exact_cut(blocks: int, before: float, after: float) -> None:
    for stages in range(2, min(blocks, 9) + 1):
        counts = equal_blocks(blocks, stages, 1.7, before, after)
        assert sum(counts) == blocks and min(counts) >= 1 and len(counts) == stages
        exact = cut([1.7] * blocks, stages, before=before, after=after)

        def slowest(found: tuple[int, ...]) -> float:
            seconds = [1.7 * count for count in found]
            seconds[0] += before
            seconds[-1] += after
            return max(seconds)

        assert slowest(counts) == pytest.approx(slowest(exact))


def test_a_choice_is_a_plan_that_can_be_written() -> None:
    asked = request(SMALL, "8xA100", 16)
    for choice in [*choices_of(asked, 8)][::97]:
        try:
            plan = plan_of(choice, asked, "bfloat16")
        except PlanError:
            continue
        assert plan.ranks == 8 and parse_plan(str(plan)).complete("bfloat16") == plan


@pytest.mark.parametrize("only", ["zero3 offload=parameters", "compile=blocks", "replicas=2"])
def test_what_is_not_predicted_is_not_sought(only: str) -> None:
    with pytest.raises(UserError, match="not predicted"):
        search(request(SMALL, "4xA100", 16, only=parse_plan(only)))


def test_what_is_taken_for_granted_may_be_said() -> None:
    assert search(request(SMALL, "4xA100", 16, only=parse_plan("offload=none compile=off"))).plans


@pytest.mark.parametrize("cluster", ["4xTPU-v5e", "4xcpu"])
def test_offloading_needs_a_link_whose_rate_is_known(cluster: str) -> None:
    with pytest.raises(UserError, match="not predicted"):
        search(request(SMALL, cluster, 16, only=parse_plan("offload=optimizer")))
    assert not search(request(SMALL, cluster, 16, memory_bytes=2**20)).plans


def test_the_optimizer_is_on_the_host_only_where_nothing_fits_without() -> None:
    asked = request("gpt2-medium", "1xRTX-4090", 8)
    roomy = search(asked)
    assert {one.plan.offload for one in roomy.plans} == {"none"}
    without = parse_plan("offload=none")
    least = search(replace(asked, memory_bytes=2**30, only=without)).nearest
    assert least is not None
    tight = search(replace(asked, memory_bytes=0.95 * least.peak_bytes))
    assert tight.plans and {one.plan.offload for one in tight.plans} == {"optimizer"}
    assert tight.tried == 2 * roomy.tried
    best = tight.plans[0]
    assert best.memory[0].optimizer == 0.0 and best.step_s > roomy.plans[0].step_s
    said = search(replace(asked, memory_bytes=0.95 * least.peak_bytes, only=parse_plan("offload=optimizer")))
    assert [one.plan for one in said.plans] == [one.plan for one in tight.plans]
    assert not search(replace(asked, memory_bytes=0.95 * least.peak_bytes, only=without)).plans


def test_where_not_even_that_fits_the_nearest_and_the_change_are_named() -> None:
    found = search(request("gpt2-medium", "1xRTX-4090", 8, memory_bytes=2**30))
    assert not found.plans and found.nearest is not None and found.nearest.plan.offload == "optimizer"
    assert f"would do for {found.nearest.plan}" in found.change


@pytest.mark.parametrize(
    ("cluster", "precision"),
    [("1xT4", "float16"), ("1xV100", "float16"), ("1xA100", "bfloat16"), ("1xcpu", "bfloat16")],
)
def test_a_device_without_bfloat16_has_plans_in_float16(cluster: str, precision: str) -> None:
    asked = request("gpt2", cluster, 8, top=1)
    assert [found.plan.precision for found in search(asked).plans] == [precision]
    assert ("has no bfloat16" in asked.source.note) is (precision == "float16")  # pyright: ignore
    stated = replace(asked, only=parse_plan("precision=float32"))
    assert [found.plan.precision for found in search(stated).plans] == ["float32"]


def test_a_search_says_how_far_it_is() -> None:
    said = list[str]()
    quiet = search(request("gpt2-medium", "2x4xA100-40", 64))
    found = search(request("gpt2-medium", "2x4xA100-40", 64, watch=said.append))
    assert [one.plan for one in found.plans] == [one.plan for one in quiet.plans]
    assert f"gpt2-medium: 50 of {found.tried:,} plans" in said
    assert re.fullmatch(rf"gpt2-medium: {found.tried:,} plans, [0-9,]+ of them predicted in full", said[-1])
