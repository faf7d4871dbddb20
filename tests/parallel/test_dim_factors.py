"""Uniting and refining keep every dim's size, whatever is done in whatever order."""

from __future__ import annotations

from itertools import pairwise
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from evenly.parallel.tensor.dim_factors import Dim, DimFactors


def sizes(factors: DimFactors, dim: Dim) -> list[int]:
    return [factors.size[factor] for factor in factors.now(dim)]


def test_a_view_refines_what_it_cuts() -> None:
    factors = DimFactors()
    wide = factors.new(24)
    heads, width = factors.regroup([wide], [4, 6], "view")
    assert (sizes(factors, heads), sizes(factors, width), sizes(factors, wide)) == ([4], [6], [4, 6])
    assert factors.now(wide) == (*factors.now(heads), *factors.now(width))
    (back,) = factors.regroup([heads, width], [24], "view")
    assert factors.now(back) == factors.now(wide)


def test_what_is_united_with_a_part_is_refined_too() -> None:
    factors = DimFactors()
    queries, kv, times = factors.new(8), factors.new(2), factors.new(4)
    other = factors.new(8)
    factors.unite(other, queries, "")
    factors.unite(queries, (*kv, *times), "")
    assert factors.now(other) == factors.now(queries) == (*factors.now(kv), *factors.now(times))


def test_a_bar_holds_for_parts_and_for_the_united() -> None:
    factors = DimFactors()
    one, two = factors.new(6), factors.new(6)
    factors.forbid(one, "first")
    factors.forbid(one, "second")
    factors.unite(two, one, "")
    factors.regroup([two], [2, 3], "view")
    assert [factors.reason(factor) for factor in factors.now(two)] == ["first", "first"]


def test_where_no_refinement_fits_only_the_crossing_is_barred() -> None:
    factors = DimFactors()
    left = (*factors.new(5), *factors.new(2), *factors.new(3), *factors.new(7))
    right = (*factors.new(5), *factors.new(3), *factors.new(2), *factors.new(7))
    factors.unite(left, right, "crossing")
    assert [factors.reason(factor) for factor in factors.now(left)] == ["", "crossing", "crossing", ""]
    assert [factors.reason(factor) for factor in factors.now(right)] == ["", "crossing", "crossing", ""]
    assert (left[0] in factors.now(right)) or factors.now(left)[0] == factors.now(right)[0]
    (dim,) = factors.regroup([factors.new(4)], [4], "")
    assert factors.regroup([dim, factors.new(3)], [6, 2], "odd view")[0] != ()
    assert factors.reason(factors.now(dim)[0]) == "odd view"


FACTORS = st.lists(st.sampled_from([1, 2, 2, 3, 4, 5]), max_size=4)


@given(st.lists(st.tuples(FACTORS, FACTORS, st.randoms(use_true_random=False)), max_size=6))
def test_sizes_stay(steps: list[tuple[list[int], list[int], object]]) -> None:
    """Dims of the same factors in another order, viewed and united at will."""
    factors = DimFactors()
    dims: list[tuple[Dim, int]] = []
    for first, second, order in steps:
        lengths = [*first, *second]
        shuffled = [*lengths]
        order.shuffle(shuffled)  # type: ignore[attr-defined]
        whole = factors.new(prod(lengths))
        parts = factors.regroup([whole], lengths, "view")
        other = factors.regroup([factors.new(prod(lengths))], shuffled, "view")
        dims += [(whole, prod(lengths)), *zip(parts, lengths, strict=True), *zip(other, shuffled, strict=True)]
        for dim, size in dims:
            for same, length in dims:
                if length == size:
                    factors.unite(dim, same, "united")
        factors.unite([a for part in parts for a in part], [a for part in other for a in part], "united")
    assert all(prod(sizes(factors, dim)) == size for dim, size in dims)


def test_a_chain_of_unions_of_any_length_is_followed() -> None:
    """A module that adds thousands of parameters one after the other unites each with what came before."""
    factors = DimFactors()
    chain = [factors.new(8) for _ in range(5_000)]
    for one, other in pairwise(chain):
        factors.unite(one, other, "")
    assert {factors.now(one) for one in chain} == {factors.now(chain[0])}
    factors.unite(chain[0], (*factors.new(2), *factors.new(4)), "")
    assert all(len(factors.now(one)) == 2 for one in chain)
