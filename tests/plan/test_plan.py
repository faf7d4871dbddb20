"""Plans as text and data; no process and no torch."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from evenly.errors import PlanError
from evenly.plan import NAMED, Plan, parse_plan
from evenly.plan.schedule import Schedule


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("ddp", Plan()),
        ("single", Plan(data=1)),
        ("data=4", Plan(data=4)),
        ("dp=4", Plan(data=4)),
        ("data=4, exact=rounding", Plan(data=4, exact="rounding")),
        ("exact=bitwise ddp", Plan(exact="bitwise")),
        ("precision=bfloat16 data=2", Plan(data=2, precision="bfloat16")),
        ("fsdp", Plan(zero=3)),
        ("zero3 data=8 shard=2", Plan(data=8, zero=3, shard=2)),
        ("zero=0 recompute=full", Plan(zero=0, recompute="full")),
        ("zero3 offload=parameters", Plan(zero=3, offload="parameters")),
        ("tp=2 dp=3 zero=1", Plan(tensor=2, data=3, zero=1)),
        ("tensor=4 whole=head.*|embed.*", Plan(tensor=4, whole="head.*|embed.*")),
        ("pp=4", Plan(pipeline=4)),
        ("pp=2 dp=2 schedule=gpipe", Plan(pipeline=2, data=2, schedule="gpipe")),
        (
            "pipeline=2 schedule=interleaved stages_per_rank=3",
            Plan(pipeline=2, schedule="interleaved", stages_per_rank=3),
        ),
        ("pipeline=3 cut=2|5", Plan(pipeline=3, cut="2|5")),
        ("ddp microbatch=4", Plan(microbatch=4)),
        ("mp", Plan(pipeline="auto", schedule="naive")),
        ("pp schedule=zbv zero=3", Plan(pipeline="auto", schedule="zbv", zero=3)),
        ("2d zero=1", Plan(pipeline=2, zero=1)),
        ("3d pipeline=2", Plan(tensor=2, pipeline=2)),
    ],
)
def test_text_becomes_a_plan(text: str, plan: Plan) -> None:
    assert parse_plan(text) == plan


@pytest.mark.parametrize(
    "plan",
    [
        *NAMED.values(),
        Plan(data=4, precision="float16", exact="bitwise"),
        Plan(precision="float32"),
        Plan(data=2, microbatch=3, recompute="full"),
        Plan(pipeline=2, schedule="looped-bfs", stages_per_rank=2, cut="1|3|6", data=2),
    ],
)
def test_printing_and_parsing_are_inverse(plan: Plan) -> None:
    assert parse_plan(str(plan)) == plan


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan("data=0 exact=perfect ddpp microbatch=0 micro=2 schedule=gpip cut=4|2 zero=4")
    message = str(caught.value)
    assert "data=0: must be a whole number of at least 1" in message
    assert "exact=perfect: must be one of bitwise, rounding" in message
    assert "unknown name 'ddpp' (did you mean 'ddp'?)" in message
    assert "microbatch=0: must be a whole number of at least 1" in message
    assert "unknown key 'micro' (did you mean 'microbatch'?)" in message
    assert "schedule=gpip: must be one of naive, gpipe, 1f1b, interleaved" in message
    assert "cut=4|2: must be ascending numbers of blocks, of which 0 is not one" in message
    assert "zero=4: must be 0, 1, 2 or 3" in message


def test_contradictions_are_refused() -> None:
    with pytest.raises(PlanError, match="data is set to both 1 and 2"):
        parse_plan("single data=2")


def test_parameters_on_the_host_are_gathered_by_zero_3() -> None:
    assert parse_plan("single zero3").stage == 0 and parse_plan("single zero3 offload=parameters").stage == 3
    with pytest.raises(PlanError, match="which is zero=3"):
        parse_plan("zero2 offload=parameters")


def test_a_comma_does_not_join_two_plans() -> None:
    assert parse_plan("ddp, microbatch=3,precision=float64") == Plan(microbatch=3, precision="float64")
    for text in ("single,ddp", "ddp precision=float64, zero3"):
        with pytest.raises(PlanError, match=r"are plans of their own .*';' between"):
            parse_plan(text)


def test_open_axes_take_the_devices_given() -> None:
    assert Plan().fit(6) == Plan(data=6)
    assert Plan().devices is None
    assert Plan(data=2).fit(2).axes == {"data": 2}
    with pytest.raises(PlanError, match=r"its axes \(data=2\) need 2"):
        Plan(data=2).fit(3)


def test_the_tensor_axis_runs_inside_the_data_axis() -> None:
    assert parse_plan("tp").fit(4) == Plan(data=1, tensor=4)
    assert parse_plan("tp data=2").fit(4) == parse_plan("tensor=2").fit(4) == Plan(data=2, tensor=2)
    assert [*Plan(data=2, tensor=4).axes.items()] == [("data", 2), ("tensor", 4)]
    assert (Plan(data=2, tensor=4).ranks, Plan(tensor=1, data=1).ranks, Plan(tensor=2).ranks) == (8, 1, None)
    assert parse_plan("tp").fit(1).axes == {"data": 1}
    assert parse_plan("hsdp tensor=2").fit(8) == Plan(data=4, tensor=2, zero=3, shard=2)
    with pytest.raises(PlanError, match=r"its axes \(data=1 x tensor=2\) need 2"):
        Plan(tensor=2).fit(3)
    with pytest.raises(PlanError, match="as many parts as there are ranks on the tensor axis"):
        Plan(tensor=2, exact="bitwise").resolve("float32")
    for text in ("tensor=2 dp", "tensor=2 compile=blocks", "ddp whole=head.*", "tensor=1 whole=head.*"):
        with pytest.raises(PlanError, match=r"leave out (replicas|compile), or tensor|add tensor=2"):
            parse_plan(text)


def test_the_pipeline_runs_outside_the_other_axes() -> None:
    assert [*Plan(data=2, tensor=2, pipeline=2).axes.items()] == [("pipeline", 2), ("data", 2), ("tensor", 2)]
    assert (Plan(pipeline=2, data=3).ranks, Plan(pipeline=2).ranks, Plan(pipeline=1, data=1).ranks) == (6, None, 1)
    assert Plan(pipeline=1, data=2).axes == {"data": 2}


@pytest.mark.parametrize(
    ("text", "devices", "fitted"),
    [
        ("mp", 2, Plan(data=1, pipeline=2, schedule="naive")),
        ("mp", 8, Plan(data=1, pipeline=8, schedule="naive")),
        ("pp", 4, Plan(data=1, pipeline=4)),
        ("pp data=2", 8, Plan(data=2, pipeline=4)),
        ("pp tensor=2", 4, Plan(data=1, tensor=2, pipeline=2)),
        ("tp pipeline=2", 8, Plan(data=1, tensor=4, pipeline=2)),
        ("2d", 2, Plan(data=1, pipeline=2)),
        ("2d", 4, Plan(data=2, pipeline=2)),
        ("2d zero=3", 8, Plan(data=4, pipeline=2, zero=3)),
        ("2d pipeline=2 tensor=2", 8, Plan(data=2, tensor=2, pipeline=2)),
        ("3d", 4, Plan(data=1, tensor=2, pipeline=2)),
        ("3d", 8, Plan(data=2, tensor=2, pipeline=2)),
        ("pp", 1, Plan(data=1, pipeline=1)),
        ("mp", 1, Plan(data=1, pipeline=1)),
        ("pp schedule=interleaved stages_per_rank=3", 1, Plan(data=1, pipeline=1)),
    ],
)
def test_pipelines_take_the_devices_given(text: str, devices: int, fitted: Plan) -> None:
    assert parse_plan(text).fit(devices) == fitted
    assert fitted.devices == devices


def test_a_pipeline_of_another_size_is_refused() -> None:
    with pytest.raises(PlanError, match=r"its axes \(pipeline=2 x data=1 x tensor=2\) need 4"):
        parse_plan("3d").fit(2)
    with pytest.raises(PlanError, match=r"its axes \(pipeline=2 x data=1\) need 2"):
        parse_plan("2d").fit(3)


def test_a_schedule_has_its_own_number_of_stages() -> None:
    assert Plan(pipeline=2).order == "1f1b"
    numbers = {text: parse_plan(f"pipeline=2 schedule={text}").stages_of_each_rank for text in get_args(Schedule)}
    assert numbers == dict.fromkeys(["naive", "gpipe", "1f1b", "zero-bubble"], 1) | dict.fromkeys(
        ["interleaved", "looped-bfs", "zbv", "dualpipev"], 2
    )
    assert parse_plan("pipeline=2 schedule=zero-bubble stages_per_rank=3").stages_of_each_rank == 3


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ddp schedule=1f1b", "schedule say how a pipeline runs, and there is none"),
        ("pipeline=1 cut=4 stages_per_rank=1", "stages_per_rank and cut say how a pipeline runs, and there is none"),
        ("pipeline=2 dp", "replicas share one process, and a pipeline has one per stage"),
        ("pipeline=2 compile=blocks", "stages take over the calls of blocks that it compiles"),
        ("pipeline=2 tensor=2 sequence=split", "what stages send each other is not split"),
        ("pipeline=2 cut=2|4", "2 stages begin at 1 blocks beside the first, and cut names 2"),
        ("pipeline=3 cut=4", "3 stages begin at 2 blocks beside the first, and cut names 1"),
        ("pipeline=2 schedule=zbv cut=4", "4 stages begin at 3 blocks beside the first, and cut names 1"),
        ("pipeline=2 schedule=zbv stages_per_rank=3", "this schedule has exactly 2 stages per rank"),
        ("pipeline=2 schedule=gpipe stages_per_rank=2", "this schedule has exactly 1 stage per rank"),
        ("pipeline=2 stages_per_rank=2", "this schedule has exactly 1 stage per rank"),
        ("pipeline=0", "pipeline=0: must be a whole number of at least 1"),
        ("pipeline=3 cut=0|4", "of which 0 is not one"),
        ("pipeline=3 cut=4|4", "must be ascending"),
        ("pipeline=2 cut=a", "must be numbers of blocks with"),
        ("pipeline=2 schedule=pipedream", "must be one of naive, gpipe, 1f1b, interleaved, looped-bfs"),
        ("mp schedule=gpipe", "schedule is set to both naive and gpipe"),
        ("3d tensor=4", "tensor is set to both 2 and 4"),
    ],
)
def test_what_does_not_go_with_a_pipeline_is_refused(text: str, found: str) -> None:
    with pytest.raises(PlanError, match=re.escape(found)):
        parse_plan(text)


def test_an_open_pipeline_checks_its_cut_when_it_is_fitted() -> None:
    assert parse_plan("pp cut=2|4").fit(3) == Plan(data=1, pipeline=3, cut="2|4")
    with pytest.raises(PlanError, match="2 stages begin at 1 blocks beside the first, and cut names 2"):
        parse_plan("pp cut=2|4").fit(2)


def test_stages_promise_no_bits() -> None:
    assert Plan(pipeline=1, data=2, exact="bitwise").resolve("float32").exact == "bitwise"
    with pytest.raises(PlanError, match="added up in the order of the stages"):
        Plan(pipeline=2, exact="bitwise").resolve("float32")


def test_groups_that_hold_the_same() -> None:
    assert [Plan(zero=3, shard="auto").fit(n).shard for n in (1, 2, 3, 4, 6, 7, 12)] == [1, 2, 3, 2, 3, 7, 6]
    with pytest.raises(PlanError, match="groups of 2 do not divide 3 ranks"):
        parse_plan("zero3 shard=2").fit(3)
    with pytest.raises(PlanError, match="zero is not set"):
        parse_plan("ddp shard=2")


def test_replicas_are_devices_of_one_process() -> None:
    fitted = parse_plan("dp").fit(3)
    assert (fitted.ranks, fitted.devices, fitted.gather) == (1, 3, 0)
    assert str(fitted) == "data=1 replicas=3 gather=0" and parse_plan(str(fitted)) == fitted
    assert parse_plan("balanced-dp replicas=2") == Plan(replicas=2)
    assert parse_plan("dp").devices is None and parse_plan("dp replicas=4").devices == 4
    with pytest.raises(PlanError, match="give --devices 2"):
        parse_plan("dp replicas=2").fit(3)
    with pytest.raises(PlanError, match="counted from 0"):
        parse_plan("replicas=2 gather=2").fit(2)
    with pytest.raises(PlanError, match="there are none"):
        parse_plan("ddp gather=1")
    for text in ("dp zero=1", "dp data=2", "replicas=2 zero3"):
        with pytest.raises(PlanError, match="replicas share one process"):
            parse_plan(text)


def test_a_plan_built_in_python_is_checked_too() -> None:
    for values in ({"replicas": 2, "zero": 3}, {"data": 4, "replicas": 2}):
        with pytest.raises(PlanError, match="replicas share one process"):
            Plan(**values)
    for values in ({"gather": 1}, {"shard": 2}, {"shard": 2, "zero": 0}):
        with pytest.raises(PlanError, match=r"there are none|zero is not set"):
            Plan(**values)
    for key, value in {"data": 0, "replicas": -1, "gather": -1, "zero": 4, "precision": "int8", "shard": True}.items():
        with pytest.raises(PlanError, match=f"{key}={value}: must be"):
            Plan(**{key: value})


def test_bits_are_promised_where_asked_for_and_possible() -> None:
    assert Plan().resolve("float32") == Plan(precision="float32", exact="rounding")
    assert Plan(exact="bitwise").resolve("float32") == Plan(precision="float32", exact="bitwise")
    assert Plan(precision="bfloat16").resolve("float32").precision == "bfloat16"
    with pytest.raises(PlanError, match="float64 has none"):
        Plan(exact="bitwise").resolve("float64")


def test_16_bit_weights_in_shards_have_no_bits_to_promise() -> None:
    assert Plan(zero=3, data=1, exact="bitwise").resolve("pure-bfloat16").exact == "bitwise"
    assert Plan(data=2, exact="bitwise").resolve("pure-float16").exact == "bitwise"
    with pytest.raises(PlanError, match="shards end elsewhere"):
        Plan(zero=1, data=2, exact="bitwise").resolve("pure-float16")
