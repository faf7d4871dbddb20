"""Uniting and refining keep every dim's size, whatever is done in whatever order."""

from __future__ import annotations

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from evenly.parallel.tensor.dim_factors import Dim, DimFactors


def sizes(atoms: DimFactors, dim: Dim) -> list[int]:
    return [atoms.size[atom] for atom in atoms.now(dim)]


def test_a_view_refines_what_it_cuts() -> None:
    atoms = DimFactors()
    wide = atoms.new(24)
    heads, width = atoms.regroup([wide], [4, 6], "view")
    assert (sizes(atoms, heads), sizes(atoms, width), sizes(atoms, wide)) == ([4], [6], [4, 6])
    assert atoms.now(wide) == (*atoms.now(heads), *atoms.now(width))
    (back,) = atoms.regroup([heads, width], [24], "view")
    assert atoms.now(back) == atoms.now(wide)


def test_what_is_united_with_a_part_is_refined_too() -> None:
    atoms = DimFactors()
    queries, kv, times = atoms.new(8), atoms.new(2), atoms.new(4)
    other = atoms.new(8)
    atoms.unite(other, queries, "")
    atoms.unite(queries, (*kv, *times), "")
    assert atoms.now(other) == atoms.now(queries) == (*atoms.now(kv), *atoms.now(times))


def test_a_bar_holds_for_parts_and_for_the_united() -> None:
    atoms = DimFactors()
    one, two = atoms.new(6), atoms.new(6)
    atoms.forbid(one, "first")
    atoms.forbid(one, "second")
    atoms.unite(two, one, "")
    atoms.regroup([two], [2, 3], "view")
    assert [atoms.reason(atom) for atom in atoms.now(two)] == ["first", "first"]


def test_where_no_refinement_fits_only_the_crossing_is_barred() -> None:
    atoms = DimFactors()
    left = (*atoms.new(5), *atoms.new(2), *atoms.new(3), *atoms.new(7))
    right = (*atoms.new(5), *atoms.new(3), *atoms.new(2), *atoms.new(7))
    atoms.unite(left, right, "crossing")
    assert [atoms.reason(atom) for atom in atoms.now(left)] == ["", "crossing", "crossing", ""]
    assert [atoms.reason(atom) for atom in atoms.now(right)] == ["", "crossing", "crossing", ""]
    assert (left[0] in atoms.now(right)) or atoms.now(left)[0] == atoms.now(right)[0]
    (dim,) = atoms.regroup([atoms.new(4)], [4], "")
    assert atoms.regroup([dim, atoms.new(3)], [6, 2], "odd view")[0] != ()
    assert atoms.reason(atoms.now(dim)[0]) == "odd view"


FACTORS = st.lists(st.sampled_from([1, 2, 2, 3, 4, 5]), max_size=4)


@given(st.lists(st.tuples(FACTORS, FACTORS, st.randoms(use_true_random=False)), max_size=6))
def test_sizes_stay(steps: list[tuple[list[int], list[int], object]]) -> None:
    """Dims of the same factors in another order, viewed and united at will."""
    atoms = DimFactors()
    dims: list[tuple[Dim, int]] = []
    for first, second, order in steps:
        factors = [*first, *second]
        shuffled = [*factors]
        order.shuffle(shuffled)  # type: ignore[attr-defined]
        whole = atoms.new(prod(factors))
        parts = atoms.regroup([whole], factors, "view")
        other = atoms.regroup([atoms.new(prod(factors))], shuffled, "view")
        dims += [(whole, prod(factors)), *zip(parts, factors, strict=True), *zip(other, shuffled, strict=True)]
        for dim, size in dims:
            for same, length in dims:
                if length == size:
                    atoms.unite(dim, same, "united")
        atoms.unite([a for part in parts for a in part], [a for part in other for a in part], "united")
    assert all(prod(sizes(atoms, dim)) == size for dim, size in dims)
