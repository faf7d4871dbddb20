"""Kinds of devices: found by any of their names, refused with the nearest, described by facts of one's own."""

from __future__ import annotations

from collections import Counter

import pytest

from evenly.errors import UserError
from evenly.hardware.cluster import Cluster
from evenly.hardware.devices import all_names, device_names, device_with, find_device
from evenly.hardware.links import far_link, near_link

PRECISIONS = {"float64", "float32", "tf32", "float16", "bfloat16", "float8", "float4"}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100", "H100-80"),
        ("h100-sxm", "H100-80"),
        ("NVIDIA H100 80GB HBM3", "H100-80"),
        ("A100", "A100-80"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("Tesla V100-SXM2-32GB", "V100-32"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("rtx3090", "RTX-3090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("CPU", "cpu"),
    ],
)
def test_a_kind_is_found_by_any_of_its_names(text: str, name: str) -> None:
    assert find_device(text).name == name


def test_an_unknown_kind_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(UserError, match="'H10O'") as caught:
        find_device("H10O")
    assert "did you mean H100" in caught.value.do
    with pytest.raises(UserError) as caught:
        find_device("abacus")
    assert "take one of V100-16" in caught.value.do


def test_no_name_is_of_two_kinds() -> None:
    owners = {(name, find_device(word).name) for name, word in all_names()}
    assert all(name == found for name, found in owners)
    assert max(Counter(word for _, word in all_names()).values()) == 1


@pytest.mark.parametrize("name", device_names())
def test_facts_are_complete_and_of_the_right_size(name: str) -> None:
    device = find_device(name)
    assert set(device.flops) <= PRECISIONS
    assert 1e9 < device.flops["float32"] < 2e14 and max(device.flops.values()) < 2e16
    assert 2**30 <= device.memory_bytes < 2**39 and 1e9 <= device.bandwidth <= 1e13
    assert device.domain >= device.node >= 1 and device.source
    assert 1e9 <= device.link_bytes_per_s <= 1e12 and 1e9 <= device.network_bytes_per_s <= 1.25e11
    assert near_link(device.link)["source"] and far_link(device.network)["source"]


def test_what_is_sold_with_80_gb_shows_79_gib() -> None:
    assert 79.0 < find_device("H100").memory_bytes / 2**30 < 79.7


def test_a_precision_without_units_runs_at_the_rate_of_float32() -> None:
    v100 = find_device("V100")
    assert v100.peak("float16") == 125e12 and v100.peak("bfloat16") == v100.peak("float32") == 15.7e12


def test_own_facts_replace_those_of_the_kind() -> None:
    device = device_with("H100", {"memory_gib": 60})
    assert device.memory_bytes == 60 * 2**30 and device.flops == find_device("H100").flops
    assert Cluster(1, 8, "H100", own={"memory_gib": 60}).device == device


def test_own_facts_describe_a_kind_that_is_not_known() -> None:
    facts = {
        "memory_gib": 94,
        "memory_gb_per_s": 4000,
        "tflops": {"float32": 44, "bfloat16": 148},
        "node": 8,
        "link": "nvlink4",
        "link_gb_per_s": 450,
        "network_gbit_per_s": 400,
    }
    assert device_with("H20", facts).peak("bfloat16") == 148e12
    with pytest.raises(UserError, match="no such kind is known, and node, link missing"):
        device_with("H20", {name: value for name, value in facts.items() if name not in ("node", "link")})


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"memory_gib": -1}, "memory_gib is -1"),
        ({"memory_gib": True}, "memory_gib is True"),
        ({"tflops": {"bfloat16": 1}}, "float32 among them"),
        ({"tflops": 3}, "tflops is 3"),
        ({"colour": "green"}, "colour is no fact"),
        ({"link": 3}, "link is 3"),
    ],
)
def test_own_facts_that_are_none_are_refused(own: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as caught:
        device_with("H100", own)
    assert words in caught.value.found


def test_a_variant_differs_in_what_it_states_alone() -> None:
    kind, variant = find_device("H100"), find_device("h100: memory=96GB, bandwidth=2.4TB/s, power=350W")
    assert variant.name == "H100-80:memory=96GB,bandwidth=2.4TB/s,power=350W" and variant.kind == kind.name
    assert variant.memory_bytes == 96e9 and variant.bandwidth == 2.4e12
    assert all(variant.flops[of] == pytest.approx(rate * 0.5 ** (1 / 3)) for of, rate in kind.flops.items())
    assert variant.link == kind.link and variant.node == kind.node
    assert find_device("A100:clock=705MHz").flops["bfloat16"] == pytest.approx(156e12)
    # the lower of both
    assert find_device("A100:clock=705MHz,power=399W").flops == find_device("A100:clock=705MHz").flops


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("H100:colour=red", "'colour=red' is nothing that a variant states"),
        ("H100:", "'' is nothing that a variant states"),
        ("H100:memory=", "memory is ''"),
        ("H100:memory=0GB", "memory is '0gb'"),
        ("H100:memory=96", "memory is '96'"),
        ("H100:power=500MHz", "power is '500mhz'"),
        ("B200:clock=1GHz", "the clock of other B200 is not known"),
        ("H10O:memory=96GB", "no such kind is known"),
    ],
)
def test_no_such_variant(text: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        find_device(text)
    assert words in caught.value.found


def test_a_variant_may_be_a_kind_of_its_own_and_have_facts_of_its_own() -> None:
    known = find_device("H100-96-HBM2e")
    assert known.kind == "H100-80" and known.link == "nvlink4" and known.memory_bytes > 95 * 2**30
    one = device_with("A100:memory=60GiB", {"memory_gb_per_s": 1000})
    assert (one.memory_bytes, one.bandwidth, one.kind) == (60 * 2**30, 1e12, "A100-80")
