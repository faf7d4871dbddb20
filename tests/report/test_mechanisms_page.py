"""The page of a plan's mechanisms: boxes for all that was decided, and no name as markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from html import unescape

import pytest
from jobs import language_job
from jobs_pipeline import job as chain_job

from evenly.engine.find_stages import explain_stages
from evenly.plan import parse_plan
from evenly.planner.mechanisms import Mechanisms, mechanisms_of
from evenly.report.draw import CutMatrix, matrices
from evenly.report.mechanisms import page


@cache
def mechanisms() -> Mechanisms:
    return mechanisms_of(language_job(), parse_plan("data=3 zero=2"))


def sections(text: str) -> dict[str, str]:
    return dict(re.findall(r"<h2>(.*?)</h2>(.*?)</section>", text, re.DOTALL))


def texts(section: str) -> list[str]:
    return [text for found in re.findall(r'data-texts="([^"]*)"', section) for text in json.loads(unescape(found))]


def drawn_mechanisms() -> str:
    return page("job.py", mechanisms(), [])


def test_every_microbatch_and_every_message_has_a_box() -> None:
    found = sections(drawn_mechanisms())
    assert [*found] == [
        "How the batch is dealt",
        "Buckets of gradients under the backward",
        "The steps of a ring",
        "What each rank keeps under ZeRO",
        "Memory under each stage of ZeRO",
    ]
    dealt = texts(found["How the batch is dealt"])
    assert len(dealt) == len(mechanisms().microbatches) and all(one.startswith("microbatch ") for one in dealt)
    ring = texts(found["The steps of a ring"])
    assert len(ring) == 3 * 4 and ring[0].startswith("chunk 0, the sum of 1 rank, to rank 1\t0")
    assert "zero=3, rank" in found["Memory under each stage of ZeRO"]


def test_names_are_text() -> None:
    one = replace(mechanisms(), shapes={}, refused={3: "<why>"}, held={0: [{"<cause>": 5.0}]}, plan="<plan>")
    text = page("<job>", one, [])
    assert not re.findall(r"<(?:why|cause|plan|job)>", text) and "zero=3: &lt;why&gt;" in text
    assert len(text) < 1_000_000 and "http" not in text.replace("http-equiv", "")


def test_stages_are_drawn_as_they_are_explained() -> None:
    from dataclasses import asdict

    spec = parse_plan("data=2 pipeline=2")
    stages = {"job": "job.py", **asdict(explain_stages(chain_job(), spec))}
    found = sections(page("job.py", mechanisms(), [stages]))["The model cut into stages"]
    assert len(texts(found)) == 2 and "<span>stage 1, ranks 2 to 3</span>" in found


def test_a_matrix_has_a_stripe_for_each_part() -> None:
    text = matrices([CutMatrix("<qkv>", (64, 192), 1, 2, 3), CutMatrix("bias", (8,), None, 2)], title="t")
    first, second = text.split("&lt;qkv&gt;")
    assert re.findall(r"<i class=(c\d)>", first) == ["c0", "c1"] * 3 and "<i" not in second
    assert '"matrix columns"' in first and "64 x 192" in second


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ([1.0], "here all is full only when it ends"),
        ([0.1, 1.0], "less than 1% of the bytes before its end"),
        ([1.0, 0.5], "99% of the bytes before its end"),
    ],
)
def test_how_much_is_sent_under_the_backward(ends: list[float], words: str) -> None:
    found = mechanisms()
    buckets = [replace(found.buckets[0], bytes=size, end=end) for size, end in zip((80, 9920), ends, strict=False)]
    assert words in page("job", replace(found, buckets=buckets), [])
