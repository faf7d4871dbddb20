"""Plans as text and data; no process and no torch."""

from __future__ import annotations

import pytest

from evenly.errors import PlanError
from evenly.plan import NAMED, Plan, parse_plan


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
    ],
)
def test_text_becomes_a_plan(text: str, plan: Plan) -> None:
    assert parse_plan(text) == plan


@pytest.mark.parametrize(
    "plan", [*NAMED.values(), Plan(data=4, precision="float16", exact="bitwise"), Plan(precision="float32")]
)
def test_printing_and_parsing_are_inverse(plan: Plan) -> None:
    assert parse_plan(str(plan)) == plan


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan("data=0 exact=perfect dpp pipeline=2 tp zero=4")
    message = str(caught.value)
    assert "data=0: must be a whole number of at least 1" in message
    assert "exact=perfect: must be one of bitwise, rounding" in message
    assert "unknown name 'dpp' (did you mean 'ddp'?)" in message
    assert "pipeline is not supported by this version" in message
    assert "tp is not supported by this version" in message
    assert "zero=4: must be 0, 1, 2 or 3" in message


def test_contradictions_are_refused() -> None:
    with pytest.raises(PlanError, match="data is set to both 1 and 2"):
        parse_plan("single data=2")


def test_open_axes_take_the_devices_given() -> None:
    assert Plan().fit(6) == Plan(data=6)
    assert Plan().devices is None
    assert Plan(data=2).fit(2).axes == {"data": 2}
    with pytest.raises(PlanError, match=r"its axes \(data=2\) need 2"):
        Plan(data=2).fit(3)


def test_groups_that_hold_the_same() -> None:
    assert [Plan(zero=3, shard="auto").fit(n).shard for n in (1, 2, 3, 4, 6, 7, 12)] == [1, 2, 3, 2, 3, 7, 6]
    with pytest.raises(PlanError, match="groups of 2 do not divide 3 ranks"):
        parse_plan("zero3 shard=2").fit(3)
    with pytest.raises(PlanError, match="zero is not set"):
        parse_plan("ddp shard=2")


def test_exactness_follows_the_precision() -> None:
    assert Plan().resolve("float32") == Plan(precision="float32", exact="bitwise")
    assert Plan().resolve("float64") == Plan(precision="float64", exact="rounding")
    assert Plan(precision="bfloat16").resolve("float32").precision == "bfloat16"
    with pytest.raises(PlanError, match="float64 has none"):
        Plan(exact="bitwise").resolve("float64")
