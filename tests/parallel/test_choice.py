"""Which groups are split over how many ranks, and what is said of the others."""

from __future__ import annotations

import pytest
from traced import HEADS, VOCABULARY, WIDTH, Attention, Grouped, own, transformer

from evenly.errors import PlanError
from evenly.parallel.tensor.splits import Derivation, ParameterSplit, SplitGroup, derive, select
from evenly.parallel.tensor.trace import trace

SIZE = HEADS * WIDTH


def derived(units: int, moved: int = 8, products: int = 1, elements: int = 100) -> Derivation:
    """One group of one parameter, and a parameter of the same size that cannot be split."""
    group = SplitGroup(units, (ParameterSplit("w", 0, 1, units, 1),), elements, moved, 0, products, ())
    return Derivation((group,), {"w": elements, "norm": elements}, {"w": "w", "norm": "norm"}, {})


def test_everything_that_divides_is_split() -> None:
    found = derive(trace(*own(Attention(SIZE, 4, 8))))
    choice = select(found, 2)
    assert [group.units for group in choice.chosen] == [VOCABULARY, 4, 40]
    assert choice.splits["block.attention.q.weight"] == ParameterSplit("block.attention.q.weight", 0, 1, 4, 8)
    assert [*choice.splits] == [name for name in found.elements if name in choice.splits]
    whole = sum(size for name, size in found.elements.items() if name not in choice.splits)
    assert choice.share == pytest.approx(1 - whole / sum(found.elements.values()))
    ((_, reason),) = choice.unsplit  # of values and outputs, by the width of a head
    assert reason == "block.attention.v.weight is split along dim 0 as 1 x 4 x 8, for fewer bytes"


@pytest.mark.parametrize(
    ("units", "ranks", "is_split"),
    [
        (4, 2, True),
        (3, 2, False),
        (2, 4, False),
        (50257, 4, True),
        (1025, 4, True),
        (10, 4, False),
        (11, 11, True),
        (30, 14, False),
    ],
)
def test_units_that_do_not_divide(units: int, ranks: int, is_split: bool) -> None:
    choice = select(derived(units), ranks)
    assert bool(choice.chosen) == is_split
    assert choice.share == (0.5 if is_split else 0)
    if not is_split:
        assert choice.unsplit[0][1] == f"{units} units do not divide by {ranks} ranks"


@pytest.mark.parametrize(
    ("kv", "ranks", "layout"), [(2, 2, (1, 2, 16)), (2, 4, (1, 4, 8)), (1, 4, (1, 4, 8)), (4, 4, (1, 4, 8))]
)
def test_grouped_heads_at_any_number_of_ranks(kv: int, ranks: int, layout: tuple[int, int, int]) -> None:
    splits = select(derive(trace(*own(Grouped(SIZE, kv, "repeat")))), ranks).splits
    q = splits["block.attention.q.weight"]
    assert (q.outer, q.units, q.inner) == layout
    assert ("block.attention.k.weight" in splits) == (kv % ranks == 0)


def test_a_lookup_must_be_worth_its_bytes() -> None:
    assert select(derived(4, moved=1600, products=0), 2).chosen
    assert select(derived(4, moved=1601, products=0), 2).unsplit[0][1] == (
        "its 100 elements are too few for the 1601 bytes that would be moved"
    )
    choice = select(derive(trace(*transformer("bert"))), 2)
    assert "bert.embeddings.token_type_embeddings.weight" not in choice.splits


def test_patterns_keep_parameters_whole() -> None:
    found = derive(trace(*transformer("gpt2")))
    choice = select(found, 2, ["lm_head.*", "*.1.attn.c_proj.weight"])
    reasons = {group.parameters[0].name: reason for group, reason in choice.unsplit}
    assert reasons == {
        "transformer.wpe.weight": "9 units do not divide by 2 ranks",
        "transformer.wte.weight": "transformer.wte.weight is excluded by 'lm_head.*'",
        "transformer.h.1.attn.c_attn.weight": (
            "transformer.h.1.attn.c_proj.weight is excluded by '*.1.attn.c_proj.weight'"
        ),
    }
    assert select(found, 2, ["*.ln_1.*"]).unsplit == select(found, 2).unsplit


def test_a_pattern_that_nothing_has() -> None:
    with pytest.raises(PlanError, match=r"no parameter is named 'nrm'; close: norm; no parameter is named 'x\.y'"):
        select(derived(4), 2, ["nrm", "x.y", "w"])
