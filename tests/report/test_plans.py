"""Predictions in words and as drawings: what is told of them is what they hold."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from html import unescape
from typing import Any

import pytest

from evenly.plan import parse_plan
from evenly.plan.orders import compute_orders
from evenly.planner.around import Grid, GridCell
from evenly.planner.prediction import MemoryByCause, Prediction, TimeByCause
from evenly.planner.timeline import Costs, simulate
from evenly.report.comm import size_in_words, time_in_words
from evenly.report.draw import StackedBar, stacked
from evenly.report.planpage import page
from evenly.report.plans import common, differences, document, heads, plan_rows, reasons, short, shortage, title

GIB = 2**30
PIPELINE = "data=2 pipeline=2 schedule=1f1b zero=0 microbatch=1 recompute=none precision=bfloat16 exact=rounding"
TENSOR = "data=2 tensor=2 zero=1 microbatch=1 recompute=full precision=bfloat16 exact=rounding"


def memory(**gib: float) -> MemoryByCause:
    return MemoryByCause(**{cause: size * GIB for cause, size in gib.items()})


def prediction(plan: str = PIPELINE, **changes: Any) -> Prediction:
    first = Prediction(
        plan=parse_plan(plan).complete("bfloat16"),
        memory=[memory(parameters=4, activations=20), memory(parameters=5, activations=21)],
        limit_bytes=40 * GIB,
        time=TimeByCause(matmul=1.5, data=0.25, bubble=0.25),
        samples=8,
        tokens=8000,
        flops=4e12,
        peak_flops=4e12,
        comm_bytes=1e9,
        bubble=0.125,
    )
    return replace(first, **changes)


SLOWER = prediction(TENSOR, time=TimeByCause(matmul=1.4, data=0.25, tensor=0.85), memory=[memory(parameters=30)])


def test_a_row_tells_the_worst_rank_and_the_rates() -> None:
    row = dict(zip(heads([prediction()]), plan_rows([prediction(), SLOWER])[0], strict=True))
    assert row == {
        "#": "1",
        "plan": "data=2 pipeline=2 microbatch=1",
        "peak": "26 GiB",
        "full": "65%",
        "rank": "1",
        "step": "2 s",
        "tokens/s\n/device": "1,000",
        "MFU": "50.0%",
        "bubble": "12.5%",
        "most of it": "matmul 75%\ndata 12%",
    }


def test_plans_that_leave_no_reserve_are_named() -> None:
    roomy, fuller = prediction(reserve_bytes=14 * GIB), prediction(reserve_bytes=15 * GIB)
    assert plan_rows([roomy])[0][3] == "65%" and plan_rows([fuller])[0][3] == "65%\nfuller"
    assert "reserve" not in " ".join(reasons([roomy, roomy]))
    assert reasons([roomy, fuller])[-1] == (
        "fuller: plan 2 would be faster, but leaves less than 35% of the memory (--reserve)"
    )
    assert "plans 2, 3 would be faster, but leave less" in reasons([roomy, fuller, fuller])[-1]
    assert "no plan was found that leaves 38% of the memory" in reasons([fuller])[-1]
    found = document("gpt2", "cpu", [roomy], fuller=[fuller])
    assert [one["leaves_reserve"] for one in (*found["plans"], *found["fuller"])] == [True, False]


def test_ranks_that_hold_the_same_are_not_told_apart() -> None:
    assert plan_rows([SLOWER])[0][4] == "all"


def test_samples_where_there_are_no_tokens() -> None:
    one = prediction(tokens=None)
    assert heads([one])[6] == "samples/s\n/device" and plan_rows([one])[0][6] == "1"
    assert "tokens" not in title("vit", "4xH100-80", [one], assumed=False)


def test_what_plans_have_in_common_is_said_above_them() -> None:
    assert common([prediction(), SLOWER]) == {"precision": "bfloat16", "exact": "rounding"}
    other = prediction(PIPELINE.replace("bfloat16", "float32"))
    assert common([prediction(), other]) == {"exact": "rounding"}
    assert "precision=float32" in plan_rows([prediction(), other])[1][1]
    words = title("gpt2", "4xH100-80", [prediction(), SLOWER], assumed=True)
    assert "40 GiB per device, precision=bfloat16, exact=rounding" in words
    assert "8 samples (8,000 tokens), assumed: --global-batch sets it" in words


@pytest.mark.parametrize(
    ("text", "shown"), [(TENSOR, "data=2 zero=1 tensor=2 recompute=full"), ("single zero=0", "data=1")]
)
def test_a_short_plan_leaves_out_what_goes_without_saying(text: str, shown: str) -> None:
    plan = parse_plan(text).complete("bfloat16")
    assert short(plan, {"precision": "bfloat16", "exact": "rounding", "microbatch": 1}) == shown


def test_reasons_tell_where_the_best_goes_and_by_what_others_lose() -> None:
    lines = reasons([prediction(), SLOWER])
    assert lines == [
        "1. time: matmul 1.5 s, data 250 ms, bubble 250 ms",
        "   memory of rank 1 of the pipeline: activations 21 GiB, parameters 5 GiB",
        "   in full: data=2 pipeline=2 microbatch=1 precision=bfloat16 exact=rounding",
        "2. 25.0% slower: tensor +850 ms, bubble -250 ms, matmul -100 ms; would win with 59% less time of tensor",
    ]


def test_no_term_alone_makes_a_plan_win_that_loses_by_more_than_it_takes() -> None:
    slow = prediction(TENSOR, time=TimeByCause(matmul=1.5, data=0.3, tensor=0.3, recompute=0.3, bubble=0.3))
    assert reasons([prediction(), slow])[-1].startswith("2. 35.0% slower: ")
    assert "would win" not in reasons([prediction(), slow])[-1]


def test_equal_times_are_compared_by_memory() -> None:
    other = prediction(TENSOR, memory=[memory(parameters=30)])
    assert reasons([prediction(), other])[-1] == "2. as fast, with 4 GiB more memory"


def test_differences_are_of_the_same_causes() -> None:
    found = differences(prediction(), SLOWER)
    assert found == pytest.approx({"tensor": 0.85, "bubble": -0.25, "matmul": -0.1})
    whole = SLOWER.step_s - prediction().step_s
    assert sum(found.values()) == pytest.approx(whole)


def test_what_lacks_for_the_nearest() -> None:
    words = shortage(prediction(limit_bytes=20 * GIB))
    assert "rank 1 of its pipeline needs 26 GiB of 20 GiB (activations 21 GiB, parameters 5 GiB)" in words


def test_large_numbers_have_no_powers_of_ten() -> None:
    assert (size_in_words(5000 * GIB), size_in_words(2 * GIB)) == ("5,000 GiB", "2 GiB")
    assert (time_in_words(4321.0), time_in_words(2.5)) == ("4,321 s", "2.5 s")


def test_the_document_has_the_keys_of_the_outer_contract() -> None:
    found = document("gpt2", "4xH100-80", [prediction(), SLOWER])
    assert [*found] == ["model", "cluster", "assumed", "plans"]
    first = found["plans"][0]
    assert {"plan", "fits", "memory_bytes", "step_s", "samples_per_s", "mfu", "bubble", "comm_bytes", "why"} <= {*first}
    sizes = first["memory_bytes"]
    assert {"parameters", "gradients", "optimizer", "activations", "buffers", "peak"} <= {*sizes}
    assert sizes["peak"] == 26 * GIB == sum(value for cause, value in sizes.items() if cause != "peak")
    assert first["tokens_per_s_per_device"] == 1000 and first["samples_per_s"] == 4 and first["devices"] == 4
    assert sum(first["time_s"].values()) == first["step_s"] == 2
    assert parse_plan(first["plan"]).complete("bfloat16") == prediction().plan
    assert document("vit", "1xcpu", [prediction(tokens=None)])["plans"][0]["tokens_per_s_per_device"] is None


def test_nothing_that_fits_is_said_with_the_change() -> None:
    found = document("gpt2", "cpu", [prediction(limit_bytes=GIB)], change="more devices")
    assert found["change"] == "more devices" and not found["plans"][0]["fits"]


# --- pictures ------------------------------------------------------------------------------------------


def widths(picture: str) -> list[list[tuple[str, float]]]:
    """Of every bar what each part says, and its width in percent."""
    bars = re.findall(r"<div class=bar>(.*?)</div>", picture)
    return [
        [(title, float(width)) for width, title in re.findall(r'width:([\d.]+)%" title="([^"]*)"', bar)] for bar in bars
    ]


def test_bars_are_as_long_as_their_parts_and_follow_each_other() -> None:
    bars = [StackedBar("one", {"a": 1.0, "b": 3.0, "c": 0.0}), StackedBar("<two>", {"a": 0.0, "b": 2.0})]
    picture = stacked(bars, lambda amount: f"{amount:g} s", title="times")
    assert widths(picture) == [[("a: 1 s", 25.0), ("b: 3 s", 75.0)], [("b: 2 s", 50.0)]]
    assert "<span>&lt;two&gt;</span>" in picture and "<span>4 s</span>" in picture and ">c<" not in picture


def test_the_limit_lies_where_a_bar_of_its_length_ends() -> None:
    picture = stacked([StackedBar("one", {"a": 2.0})], str, title="", limit=(4.0, "4 per device"))
    assert widths(picture) == [[("a: 2.0", 50.0)]] and 'style="left:100.00%"' in picture and "4 per device" in picture


def asked(*plans: Prediction) -> Grid:
    return Grid(asked=(4, 8), cells={(4, 8): GridCell(devices=4, batch=8, cluster="4xH100-80", plans=plans)}, alone={})


def test_the_page_is_whole_and_asks_no_network() -> None:
    timeline = simulate(compute_orders("1f1b", 2, 1, 4), Costs(forward=[1.0, 1.0], backward=[2.0, 2.0]))
    text = page("gpt2 <x>", "4xH100-80", asked(prediction(), SLOWER), timeline, assumed=False)
    assert "gpt2 &lt;x&gt;" in text and "<x>" not in text and "http" not in text.replace("http-equiv", "")
    assert "default-src &#x27;none&#x27;" in text or "default-src 'none'" in text
    assert "activations: 21 GiB" in text and "tensor: 850 ms" in text
    (picture,) = re.findall(r"<figure class=.chart rows.*?</figure>", text, re.DOTALL)
    assert sum(len(json.loads(unescape(texts))) for texts in re.findall(r'data-texts="([^"]*)"', picture)) == 16
    assert "<span>rank 0</span>" in text and "<span>24 GiB</span>" in text and "40 GiB per device" in text


def test_ranks_that_hold_the_same_are_one_bar() -> None:
    timeline = simulate(compute_orders("1f1b", 2, 1, 4), Costs(forward=[1.0, 1.0], backward=[2.0, 2.0]))
    alike = prediction(memory=[memory(parameters=4), memory(parameters=4), memory(parameters=3)])
    text = page("gpt2", "cpu", asked(alike), timeline, assumed=False)
    assert "<span>ranks 0 to 1</span>" in text and "<span>rank 2</span>" in text


def test_every_cause_is_drawn() -> None:
    """No cause of memory or time is left out of the bars: they are as long as the whole."""
    time = TimeByCause(**dict.fromkeys(asdict(TimeByCause()), 1.0))
    (bar,) = widths(stacked([StackedBar("all", asdict(time))], time_in_words, title=""))
    assert len(bar) == 10 and sum(width for _, width in bar) == pytest.approx(100, abs=0.02)
