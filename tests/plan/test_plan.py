"""Plans as text and data; no process and no torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from evenly.errors import PlanError
from evenly.plan import NAMED, Plan, PlanSpec, asked_plan, parse_plan
from evenly.plan.schedule import SCHEDULES


def complete(text: str, devices: int = 1) -> Plan:
    """What `text` is on so many devices, for a job in float32."""
    return parse_plan(text).fit(devices).complete("float32")


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("ddp", PlanSpec(zero=0)),
        ("single", PlanSpec(data=1)),
        ("data=4", PlanSpec(data=4)),
        ("dp=4", PlanSpec(data=4)),
        ("data=4, exact=rounding", PlanSpec(data=4, exact="rounding")),
        ("exact=bitwise ddp", PlanSpec(zero=0, exact="bitwise")),
        ("precision=bfloat16 data=2", PlanSpec(data=2, precision="bfloat16")),
        ("fsdp", PlanSpec(zero=3)),
        ("zero3 data=8 shard=2", PlanSpec(data=8, zero=3, shard=2)),
        ("zero=0 recompute=full", PlanSpec(zero=0, recompute="full")),
        ("zero3 offload=parameters", PlanSpec(zero=3, offload="parameters")),
        ("tp=2 dp=3 zero=1", PlanSpec(tensor=2, data=3, zero=1)),
        ("tensor=4 tensor_exclude=head.*|embed.*", PlanSpec(tensor=4, tensor_exclude=("head.*", "embed.*"))),
        ("pp=4", PlanSpec(pipeline=4)),
        ("pp=2 dp=2 schedule=gpipe", PlanSpec(pipeline=2, data=2, schedule="gpipe")),
        (
            "pipeline=2 schedule=interleaved stages_per_rank=3",
            PlanSpec(pipeline=2, schedule="interleaved", stages_per_rank=3),
        ),
        ("pipeline=3 split_points=2|5", PlanSpec(pipeline=3, split_points=(2, 5))),
        ("ddp microbatch=4", PlanSpec(zero=0, microbatch=4)),
        ("mp", PlanSpec(pipeline="auto", schedule="naive")),
        ("pp schedule=zbv zero=3", PlanSpec(pipeline="auto", schedule="zbv", zero=3)),
        ("2d zero=1", PlanSpec(data="auto", pipeline=2, zero=1)),
        ("dp=2 data=2", PlanSpec(data=2)),
        ("ddp tensor=2", PlanSpec(zero=0, tensor=2)),
        ("3d pipeline=2", PlanSpec(data="auto", tensor=2, pipeline=2)),
    ],
)
def test_text_becomes_a_plan(text: str, plan: PlanSpec) -> None:
    assert parse_plan(text) == plan


@pytest.mark.parametrize(
    "plan",
    [
        *map(parse_plan, NAMED),
        PlanSpec(data=4, precision="float16", exact="bitwise"),
        PlanSpec(precision="float32"),
        PlanSpec(data=2, microbatch=3, recompute="full"),
        PlanSpec(pipeline=2, schedule="looped-bfs", stages_per_rank=2, split_points=(1, 3, 6), data=2),
    ],
)
def test_printing_and_parsing_are_inverse(plan: PlanSpec) -> None:
    assert parse_plan(str(plan)) == plan


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan("data=0 exact=perfect ddpp microbatch=0 micro=2 schedule=gpip split_points=4|2 zero=4")
    message = str(caught.value)
    assert "data=0: must be a whole number of at least 1" in message
    assert "exact=perfect: must be one of bitwise, rounding" in message
    assert "unknown name 'ddpp' (did you mean 'ddp'?)" in message
    assert "microbatch=0: must be a whole number of at least 1" in message
    assert "unknown key 'micro' (did you mean 'microbatch'?)" in message
    assert "schedule=gpip: must be one of naive, gpipe, 1f1b, interleaved" in message
    assert "split_points=4|2: must be ascending numbers of blocks, of which 0 is not one" in message
    assert "zero=4: must be one of 0, 1, 2, 3" in message


def test_contradictions_are_refused() -> None:
    for text, what in (
        ("single data=2", "data"),
        ("data=2 dp=4", "data"),
        ("ddp zero=3", "zero"),
        ("zero1 zero=3", "zero"),
    ):
        with pytest.raises(PlanError, match=f"{what} is set to both"):
            parse_plan(text)


def test_parameters_on_the_host_are_gathered_by_zero_3() -> None:
    assert complete("single zero=3").data.zero_stage == 0
    assert complete("single zero=3 offload=parameters").data.zero_stage == 3
    with pytest.raises(PlanError, match="which is zero=3"):
        parse_plan("zero2 offload=parameters")


def of_verify(text: str) -> None:
    from evenly.verify.verify import VerifyRequest, _Turn  # imports torch

    _Turn.of(VerifyRequest(Path("job.py"), {}, 3, "float64"), text, 2)


@pytest.mark.parametrize("read", [parse_plan, asked_plan, of_verify])
def test_two_plans_in_one_text_are_refused(read: Callable[[str], object]) -> None:
    assert parse_plan("ddp, microbatch=3,precision=float64") == PlanSpec(zero=0, microbatch=3, precision="float64")
    two = ("ddp zero3", "zero1 zero3", "single ddp", "tp pp", "2d zero1", "fsdp zero3", "ddp ddp", "auto ddp zero3")
    for text in (*two, "single,ddp", "ddp precision=float64, zero3"):
        with pytest.raises(PlanError, match=r"are plans of their own .*';' between"):
            read(text)


def test_verify_takes_plans_that_are_named() -> None:
    with pytest.raises(PlanError, match="auto leaves it to a search"):
        of_verify("auto zero=1")


def test_open_axes_take_the_devices_given() -> None:
    assert PlanSpec().fit(6) == PlanSpec(data=6)
    assert PlanSpec().devices is None
    assert complete("data=2", 2).axes == {"data": 2}
    with pytest.raises(PlanError, match=r"its axes \(data=2\) need 2"):
        PlanSpec(data=2).fit(3)


def test_the_tensor_axis_runs_inside_the_data_axis() -> None:
    assert parse_plan("tp").fit(4) == PlanSpec(data=1, tensor=4)
    assert parse_plan("tp data=2").fit(4) == parse_plan("tensor=2").fit(4) == PlanSpec(data=2, tensor=2)
    assert [*complete("data=2 tensor=4", 8).axes.items()] == [("data", 2), ("tensor", 4)]
    assert (PlanSpec(data=2, tensor=4).ranks, PlanSpec(tensor=1, data=1).ranks, PlanSpec(tensor=2).ranks) == (
        8,
        1,
        None,
    )
    assert complete("tp").axes == {"data": 1}
    assert parse_plan("hsdp tensor=2").fit(8) == PlanSpec(data=4, tensor=2, zero=3, shard=2)
    with pytest.raises(PlanError, match=r"its axes \(data=1 x tensor=2\) need 2"):
        PlanSpec(tensor=2).fit(3)
    with pytest.raises(PlanError, match="as many parts as there are ranks on the tensor axis"):
        complete("tensor=2 exact=bitwise", 2)
    for text in (
        "tensor=2 dp",
        "tensor=2 compile=blocks",
        "ddp tensor_exclude=head.*",
        "tensor=1 tensor_exclude=head.*",
    ):
        with pytest.raises(PlanError, match=r"leave out (replicas|compile), or tensor|add tensor=2"):
            parse_plan(text)


def test_the_pipeline_runs_outside_the_other_axes() -> None:
    assert [*complete("3d", 8).axes.items()] == [("pipeline", 2), ("data", 2), ("tensor", 2)]
    assert (PlanSpec(pipeline=2, data=3).ranks, PlanSpec(pipeline=2).ranks, PlanSpec(pipeline=1, data=1).ranks) == (
        6,
        None,
        1,
    )
    assert complete("pipeline=1 data=2", 2).axes == {"data": 2}


@pytest.mark.parametrize(
    ("text", "devices", "fitted"),
    [
        ("mp", 2, PlanSpec(data=1, pipeline=2, schedule="naive")),
        ("mp", 8, PlanSpec(data=1, pipeline=8, schedule="naive")),
        ("pp", 4, PlanSpec(data=1, pipeline=4)),
        ("pp data=2", 8, PlanSpec(data=2, pipeline=4)),
        ("pp tensor=2", 4, PlanSpec(data=1, tensor=2, pipeline=2)),
        ("tp pipeline=2", 8, PlanSpec(data=1, tensor=4, pipeline=2)),
        ("2d", 4, PlanSpec(data=2, pipeline=2)),
        ("2d zero=3", 8, PlanSpec(data=4, pipeline=2, zero=3)),
        ("2d pipeline=2 tensor=2", 8, PlanSpec(data=2, tensor=2, pipeline=2)),
        ("3d", 8, PlanSpec(data=2, tensor=2, pipeline=2)),
        ("pp", 1, PlanSpec(data=1, pipeline=1)),
        ("mp", 1, PlanSpec(data=1, pipeline=1)),
        ("pp schedule=interleaved stages_per_rank=3", 1, PlanSpec(data=1, pipeline=1)),
    ],
)
def test_pipelines_take_the_devices_given(text: str, devices: int, fitted: PlanSpec) -> None:
    assert parse_plan(text).fit(devices) == fitted
    assert fitted.devices == devices


def test_a_pipeline_of_another_size_is_refused() -> None:
    with pytest.raises(PlanError, match=r"its axes \(pipeline=2 x data=1 x tensor=2\) need 4"):
        parse_plan("tensor=2 pipeline=2").fit(2)
    with pytest.raises(PlanError, match=r"its axes \(pipeline=2 x data=1\) need 2"):
        parse_plan("pipeline=2").fit(3)


@pytest.mark.parametrize(("text", "devices"), [("2d", 4), ("3d", 8), ("2d tensor=2", 8), ("2d data=auto", 4)])
def test_a_plan_of_several_axes_needs_more_than_one_rank_on_each(text: str, devices: int) -> None:
    assert parse_plan(text).fit(devices).data == 2 and parse_plan(f"{text} data=1").fit(devices // 2).data == 1
    for fewer in (devices // 2, 1):
        with pytest.raises(PlanError, match=f"leaves the data axis one rank\\n.*give --devices {devices}"):
            parse_plan(text).fit(fewer)


def test_a_schedule_has_its_own_number_of_stages() -> None:
    assert complete("pipeline=2", 2).pipeline.schedule == "1f1b"
    own = dict.fromkeys(["naive", "gpipe", "1f1b", "zero-bubble"], 1)
    own |= dict.fromkeys(["interleaved", "looped-bfs", "zbv", "dualpipev"], 2)
    assert own == {text: complete(f"pipeline=2 schedule={text}", 2).pipeline.stages_per_rank for text in own}
    assert own.keys() <= SCHEDULES.keys()  # others can be registered
    assert complete("pipeline=2 schedule=zero-bubble stages_per_rank=3", 2).pipeline.stages == 6


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ddp schedule=1f1b", "schedule say how a pipeline runs, and there is none"),
        (
            "pipeline=1 split_points=4 stages_per_rank=1",
            "stages_per_rank and split_points say how a pipeline runs, and there is none",
        ),
        ("pipeline=2 dp", "replicas share one process, and a pipeline has one per stage"),
        ("pipeline=2 tensor=2 compile=blocks", "a compiled block calls none"),
        ("pipeline=2 tensor=2 sequence_parallel=on", "what stages send each other is not split"),
        ("pipeline=2 split_points=2|4", "2 stages begin at 1 blocks after the first, and split_points names 2"),
        ("pipeline=3 split_points=4", "3 stages begin at 2 blocks after the first, and split_points names 1"),
        (
            "pipeline=2 schedule=zbv split_points=4",
            "4 stages begin at 3 blocks after the first, and split_points names 1",
        ),
        ("pipeline=2 schedule=zbv stages_per_rank=3", "this schedule has exactly 2 stages per rank"),
        ("pipeline=2 schedule=gpipe stages_per_rank=2", "this schedule has exactly 1 stage per rank"),
        ("pipeline=2 stages_per_rank=2", "this schedule has exactly 1 stage per rank"),
        ("pipeline=0", "pipeline=0: must be a whole number of at least 1"),
        ("pipeline=3 split_points=0|4", "of which 0 is not one"),
        ("pipeline=3 split_points=4|4", "must be ascending"),
        ("pipeline=2 split_points=a", "must be numbers of blocks with"),
        ("pipeline=2 schedule=pipedream", "must be one of naive, gpipe, 1f1b, interleaved, looped-bfs"),
        ("mp schedule=gpipe", "schedule is set to both naive and gpipe"),
        ("3d tensor=4", "tensor is set to both 2 and 4"),
    ],
)
def test_what_does_not_go_with_a_pipeline_is_refused(text: str, found: str) -> None:
    with pytest.raises(PlanError, match=re.escape(found)):
        parse_plan(text)


def test_an_open_pipeline_checks_its_cut_when_it_is_fitted() -> None:
    assert parse_plan("pp split_points=2|4").fit(3) == PlanSpec(data=1, pipeline=3, split_points=(2, 4))
    with pytest.raises(PlanError, match="2 stages begin at 1 blocks after the first, and split_points names 2"):
        parse_plan("pp split_points=2|4").fit(2)


def test_stages_promise_no_bits() -> None:
    assert complete("pipeline=1 data=2 exact=bitwise", 2).exact == "bitwise"
    with pytest.raises(PlanError, match="added up in the order of the stages"):
        complete("pipeline=2 exact=bitwise", 2)


def test_groups_that_hold_the_same() -> None:
    assert [PlanSpec(zero=3, shard="auto").fit(n).shard for n in (1, 2, 3, 4, 6, 7, 12)] == [1, 2, 3, 2, 3, 7, 6]
    with pytest.raises(PlanError, match="groups of 2 do not divide 3 ranks"):
        parse_plan("zero3 shard=2").fit(3)
    with pytest.raises(PlanError, match="zero is not set"):
        parse_plan("ddp shard=2")


def test_replicas_are_devices_of_one_process() -> None:
    fitted = parse_plan("dp").fit(3)
    assert (fitted.ranks, fitted.devices, fitted.output_device) == (1, 3, 0)
    assert str(fitted) == "data=1 replicas=3 output_device=0" and parse_plan(str(fitted)) == fitted
    assert parse_plan("balanced-dp replicas=2") == PlanSpec(replicas=2)
    assert parse_plan("dp").devices is None and parse_plan("dp replicas=4").devices == 4
    with pytest.raises(PlanError, match="give --devices 2"):
        parse_plan("dp replicas=2").fit(3)
    with pytest.raises(PlanError, match="counted from 0"):
        parse_plan("replicas=2 output_device=2").fit(2)
    with pytest.raises(PlanError, match="there are none"):
        parse_plan("ddp output_device=1")
    for text in ("dp zero=1", "dp data=2", "replicas=2 zero3"):
        with pytest.raises(PlanError, match="replicas share one process"):
            parse_plan(text)


def test_a_plan_built_in_python_is_checked_too() -> None:
    for values in ({"replicas": 2, "zero": 3}, {"data": 4, "replicas": 2}):
        with pytest.raises(PlanError, match="replicas share one process"):
            PlanSpec(**values)
    for values in ({"output_device": 1}, {"shard": 2}, {"shard": 2, "zero": 0}):
        with pytest.raises(PlanError, match=r"there are none|zero is not set"):
            PlanSpec(**values)
    for key, value in {
        "data": 0,
        "replicas": -1,
        "output_device": -1,
        "zero": 4,
        "precision": "int8",
        "shard": 0.5,
    }.items():
        with pytest.raises(PlanError, match=f"{key}={value}: must be"):
            PlanSpec(**{key: value})


def test_bits_are_promised_where_asked_for_and_possible() -> None:
    assert (complete("ddp").precision, complete("ddp").exact) == ("float32", "rounding")
    assert complete("exact=bitwise").exact == "bitwise"
    assert complete("precision=bfloat16").precision == "bfloat16"
    with pytest.raises(PlanError, match="float64 has none"):
        PlanSpec(data=1, exact="bitwise").complete("float64")


def test_16_bit_weights_in_shards_have_no_bits_to_promise() -> None:
    assert PlanSpec(zero=3, data=1, exact="bitwise").complete("pure-bfloat16").exact == "bitwise"
    assert PlanSpec(data=2, exact="bitwise").complete("pure-float16").exact == "bitwise"
    with pytest.raises(PlanError, match="shards end elsewhere"):
        PlanSpec(zero=1, data=2, exact="bitwise").complete("pure-float16")


def test_speeds_of_ranks() -> None:
    plan = parse_plan("ddp speeds=1|0.5").fit(2).complete("float32")
    assert plan.data.speeds == (1.0, 0.5) and parse_plan(str(plan)).fit(2).complete("float32") == plan
    assert plan.with_speeds([1.0, 1.0]).data.speeds == ()
    measured = parse_plan("zero2 speeds=measured").fit(4).complete("float32")
    assert measured.data.speeds == "measured" and "speeds=measured" in str(measured)
    for text, message in (
        ("zero3 speeds=measured", "all run equally many"),
        ("ddp speeds=1|0", "must be measured, or positive"),
        ("ddp speeds=fast", "must be measured, or positive"),
    ):
        with pytest.raises(PlanError, match=message):
            parse_plan(text)
    with pytest.raises(PlanError, match="speeds names 3 ranks, and the data axis has 2"):
        parse_plan("ddp speeds=1|1|2").fit(2).complete("float32")
