"""What repeats from block to block is one row."""

from __future__ import annotations

from typing import Any

import pytest

from evenly.report.comm import size_in_words
from evenly.report.splits import abbreviated, full_rows, group_rows, in_a_line


@pytest.mark.parametrize(
    ("texts", "one"),
    [
        (["layers.0.up.weight"], "layers.0.up.weight"),
        (["layers.0.up.0", "layers.11.up.0"], "layers.*.up.0"),
        (["0.1.w", "2.1.w"], "*.1.w"),
        (["3.weight", "0.weight"], "*.weight"),
        (["mean in h.0.norm (model.py:33)", "mean in h.1.norm (model.py:33)"], "mean in h.*.norm (model.py:33)"),
        (["5 units do not divide by 2 ranks"] * 2, "5 units do not divide by 2 ranks"),
    ],
)
def test_texts_that_differ_in_numbers_of_blocks(texts: list[str], one: str) -> None:
    assert abbreviated(texts) == one


def group(*names: str, units: int = 4, outer: int = 1, reason: str = "") -> dict[str, Any]:
    return {
        "parameters": [{"name": name, "dim": 1, "outer": outer, "units": units, "inner": 2} for name in names],
        "elements": 100, "forward_bytes": 512, "backward_bytes": 0, "sums": [], "split": not reason, "reason": reason,
    }  # fmt: skip


def document(*groups: dict[str, Any], **whole: list[str]) -> dict[str, Any]:
    return {"ranks": 2, "share": 0.25, "elements": 1000, "groups": groups, "unsplit": whole}


def test_groups_of_repeated_blocks_are_one_row() -> None:
    groups = [group(f"h.{at}.qkv", f"h.{at}.out", outer=3) for at in range(3)]
    assert group_rows(document(*groups)) == [
        ("h.*.qkv[1] 3x\nh.*.out[1] 3x", "3", "4", "30.0%", "1.5 KiB", "0 B", "split")
    ]
    groups[1] = group("h.1.qkv", "h.1.out", outer=3, units=5)
    assert [row[:3] for row in group_rows(document(*groups))] == [
        ("h.*.qkv[1] 3x\nh.*.out[1] 3x", "2", "4"),
        ("h.1.qkv[1] 3x\nh.1.out[1] 3x", "1", "5"),
    ]


def test_a_group_over_all_blocks_names_each_kind_once() -> None:
    (row,) = group_rows(document(group("h.0.q", "h.0.table", "h.1.q")))
    assert row[:2] == ("h.*.q[1]\nh.0.table[1]", "1")


def test_a_group_that_is_not_split_says_why() -> None:
    taken = [group(f"h.{at}.v", units=16, reason=f"h.{at}.v is split along dim 0 as 1 x 4 x 2") for at in range(2)]
    rows = group_rows(document(group("h.0.v"), group("h.1.v"), *taken, group("w", reason="3 units do not divide")))
    assert [row[-1] for row in rows] == [
        "split",
        "otherwise: h.*.v is split along dim 0 as 1 x 4 x 2",
        "whole: 3 units do not divide",
    ]


def test_what_is_in_no_group_has_a_reason_by_dim() -> None:
    whole = {f"h.{at}.norm": [f"mean in h.{at}"] for at in range(2)}
    rows = full_rows(document(**whole, place=["cat", "norm", "cat"], scale=[]))
    assert rows == [
        ("h.*.norm", "2", "mean in h.*"),
        ("place", "1", "[0, 2] cat; [1] norm"),
        ("scale", "1", "has no dims"),
    ]


def test_the_share_in_a_line() -> None:
    assert in_a_line(document(group("a.w"))).startswith("25.0% of the model's elements are split over 2 ranks")
    assert in_a_line(document(group("a.w"))).endswith("tensor_exclude=a.w")
    assert (
        in_a_line(document(group("a.w", reason="no"))) == "nothing is split over 2 ranks; evenly run refuses this plan"
    )


def test_sizes_have_three_digits() -> None:
    assert [size_in_words(size) for size in (999, 1000, 1024, 1023 << 10)] == [
        "999 B",
        "0.977 KiB",
        "1 KiB",
        "0.999 MiB",
    ]
