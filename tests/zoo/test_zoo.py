"""A fixed dozen of `benchmarks/zoo`, unlike each other, has the numbers of one device under its plans."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from kept_ranks import KeptRanks

ZOO = Path(__file__).parents[2] / "benchmarks" / "zoo"
ZERO = ("zero=2", "zero=3")
DOZEN = {
    "albert": (*ZERO, "tensor=2"),  # one layer, called several times
    "altclip": ZERO,  # two towers, and a parameter without dims
    "convnext": ZERO,  # convolutions
    "encoder-decoder": ZERO,  # blocks are given what they do not use
    "funnel": ZERO,  # lists of lists of blocks
    "m2m_100": ZERO,  # layer drop
    "mamba": (*ZERO, "pipeline=2"),  # a scan
    "mixtral": ZERO,  # experts
    "mobilebert": ZERO,  # bottlenecks, and a parameter without elements
    "resnet": ("tensor=2 pipeline=2",),  # a backward saves split tensors
    "squeezebert": ZERO,  # calls the forward of its blocks
    "timesformer": (*ZERO, "pipeline=2"),  # frames
    "wav2vec2": ZERO,  # sound; layer drop that depends on being sharded
}
REFUSED = {"switch_transformers": "parameter .*router.classifier.weight changes in the forward pass"}


@cache
def harness() -> Any:
    """`benchmarks/zoo/zoo_jobs.py`."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.path.insert(0, str(ZOO))
    import zoo_jobs

    return zoo_jobs


def prepare(name: str, folder: Path) -> Any:
    return harness().prepare(name, folder)["batch"]


def compare(name: str, batch: Any, plan: str, folder: Path) -> Any:
    return harness().compare(name, batch, plan, folder)


@pytest.mark.full_but("albert", "squeezebert", "mamba")
@pytest.mark.parametrize("name", DOZEN)
def test_an_architecture_has_the_numbers_of_one_device(name: str, ranks: KeptRanks, tmp_path: Path) -> None:
    [batch] = ranks.run(prepare, name, tmp_path, size=1, limit_s=300)
    for plan in DOZEN[name]:
        size = 4 if "tensor=2 pipeline" in plan else 2
        for found in ranks.run(compare, name, batch, plan, tmp_path, size=size, limit_s=300):
            assert (plan, found.first) == (plan, None)
            assert found.sharded > 0.4


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_have_them_is_refused_by_name(name: str, ranks: KeptRanks, tmp_path: Path) -> None:
    [batch] = ranks.run(prepare, name, tmp_path, size=1, limit_s=300)
    with pytest.raises(AssertionError, match=REFUSED[name]):
        ranks.run(compare, name, batch, "zero=3", tmp_path, limit_s=300)
