"""Clusters held against each other: what they cost follows from price, devices and time, and the best are marked."""

from __future__ import annotations

import json
import re

import pytest
from test_plans import prediction

from evenly.planner.prediction import TimeByCause
from evenly.report.prices import Offer, heads, marks, money, offers_as_json, page, rows, title

SLOW = Offer(cluster="<4xA100>", devices=4, price=1.8, plans=[prediction(time=TimeByCause(matmul=4.0))])
FAST = Offer(cluster="4xH100", devices=4, price=9.0, plans=[prediction(time=TimeByCause(matmul=1.0))])
NONE = Offer(cluster="1xT4", devices=1, price=0.5, refused="nothing <fits>")


def test_costs_are_those_of_the_devices_for_the_time() -> None:
    assert SLOW.cost_of_step == pytest.approx(1.8 * 4 * 4.0 / 3600)
    assert SLOW.cost_of_unit == pytest.approx(1.8 * 4 * 4.0 / 3600 / 8000 * 1e9)
    assert SLOW.run_s is None and SLOW.cost_of_run is None
    long = Offer(cluster="", devices=4, price=1.8, plans=SLOW.plans, steps=900.0)
    assert long.run_s == 3600.0 and long.cost_of_run == pytest.approx(7.2)
    free = Offer(cluster="", devices=4, price=None, plans=SLOW.plans, steps=900.0)
    assert free.cost_of_step is free.cost_of_unit is free.cost_of_run is None and free.run_s == 3600.0
    samples = Offer(cluster="", devices=4, price=1.8, plans=[prediction(tokens=None)])
    assert samples.cost_of_unit == pytest.approx(1.8 * 4 * 2.0 / 3600 / 8 * 1e6)


def test_the_fastest_and_the_cheapest_are_marked() -> None:
    assert marks([SLOW, FAST, NONE]) == ["cheapest", "fastest", ""]
    assert marks([FAST]) == ["fastest and cheapest"] and marks([NONE]) == [""]
    free = [Offer(cluster=one.cluster, devices=4, price=None, plans=one.plans) for one in (SLOW, FAST)]
    assert marks(free) == ["", "fastest"]


def test_rows_have_what_is_known() -> None:
    assert heads([SLOW, NONE]) == ("cluster", "plan", "step", "tokens/s", "full", "per hour", "per 1e9 tokens", "")
    assert rows([SLOW, NONE])[1][:3] == ("1xT4", "nothing <fits>", "")
    plan = "data=2 pipeline=2 microbatch=1"
    assert rows([SLOW])[0] == ("<4xA100>", plan, "4 s", "2,000", "65%", "7.20", "1,000", "fastest and cheapest")
    run = Offer(cluster="4xH100", devices=4, price=None, plans=FAST.plans, steps=7200.0)
    assert heads([run])[5:] == ("run", "") and rows([run])[0][5] == "2:00:00"
    assert [money(amount) for amount in (1234.5, 1.234, 0.01234)] == ["1,234", "1.23", "0.0123"]


def test_the_document() -> None:
    found = offers_as_json("gpt2", [SLOW, FAST, NONE], 8, assumed=True)
    assert json.loads(json.dumps(found)) == found and found["assumed"] == ["global_batch"]
    slow, fast, none = found["clusters"]
    assert slow["is"] == "cheapest" and slow["cost_per_1e9_tokens"] == SLOW.cost_of_unit and fast["plan"]["step_s"] == 1
    assert none["plan"] is None and none["refused"] == "nothing <fits>"
    assert "assumed" in title("gpt2", [SLOW], 8, assumed=True)


def test_the_page_shows_every_cluster() -> None:
    text = page("gpt2", [SLOW, FAST, NONE], 8, assumed=False)
    assert "<4xA100>" not in text and "<fits>" not in text and "http" not in text.replace("http-equiv", "")
    assert len(re.findall(r"<dt>(?:fastest|cheapest)</dt>", text)) == 2 and text.count('class="chart points"') == 3
    assert 'data-key="&lt;4xA100&gt;"' in text and "nothing &lt;fits&gt;" in text
    alone = page("gpt2", [NONE, FAST], 8, assumed=False)
    assert alone.count('class="chart points"') == 1  # nothing to compare it with
