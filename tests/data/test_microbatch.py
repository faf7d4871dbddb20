"""The cut is the best of all cuts (brute force), keeps its limits and never does worse than naive ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations
from math import ceil, inf, nan, nextafter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenly.data.microbatch import OVERHEAD_PER_BUDGET, cut, padded_cost
from evenly.errors import UserError

Groups = list[list[float]]
COSTS = st.one_of(st.integers(0, 40), st.floats(0, 40))


def compositions(items: Sequence[float]) -> Iterator[Groups]:
    """Every way to cut a list into consecutive groups."""
    inner = range(1, len(items))
    for count in range(len(items)):
        for ends in combinations(inner, count):
            yield [list(items[a:b]) for a, b in zip((0, *ends), (*ends, len(items)), strict=True)]


def allowed(groups: Groups, size: int | None, budget: float | None) -> bool:
    return all(
        (size is None or len(group) <= size) and (budget is None or len(group) == 1 or padded_cost(group) <= budget)
        for group in groups
    )


def padded(groups: Groups) -> float:
    return sum(padded_cost(group) for group in groups)


def objective(groups: Groups, budget: float | None) -> tuple[float, float]:
    """What the cut minimises: with a budget the charged total, else the number of groups and then padding."""
    if budget is None:
        return len(groups), padded(groups)
    return 0, padded(groups) + len(groups) * budget * OVERHEAD_PER_BUDGET


def greedy(ordered: Sequence[float], size: int | None, budget: float | None) -> Groups:
    """Fill each group with the next samples until one more would break a limit."""
    groups: Groups = []
    for cost in ordered:
        if groups and allowed([[*groups[-1], cost]], size, budget):
            groups[-1].append(cost)
        else:
            groups.append([cost])
    return groups


def cut_costs(costs: list[float], size: int | None, budget: float | None) -> Groups:
    """The costs of the groups of the cut, after checking that the cut holds every index once."""
    found = cut(range(100, 100 + len(costs)), size=size, costs=costs, budget=budget)
    assert sorted(index for group in found for index in group) == list(range(100, 100 + len(costs)))
    return [[costs[index - 100] for index in group] for group in found]


def not_above(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] <= other[0] and one[1] <= other[1] * (1 + 1e-12)


limits = st.one_of(
    st.tuples(st.integers(1, 8), st.none()),
    st.tuples(st.none(), st.floats(1, 200)),
    st.tuples(st.integers(1, 8), st.floats(1, 200)),
)


@settings(max_examples=100, deadline=None)
@given(costs=st.lists(COSTS, min_size=1, max_size=10), limit=limits)
def test_cut_is_the_best_of_all_cuts(costs: list[float], limit: tuple[int | None, float | None]):
    found = cut_costs(costs, *limit)
    assert allowed(found, *limit)
    every = (groups for groups in compositions(sorted(costs)) if allowed(groups, *limit))
    assert not_above(objective(found, limit[1]), min(objective(groups, limit[1]) for groups in every))


@settings(max_examples=100, deadline=None)
@given(costs=st.lists(COSTS, max_size=200), limit=limits)
def test_cut_ascends_keeps_its_limits_and_is_never_worse_than_filling(
    costs: list[float], limit: tuple[int | None, float | None]
):
    found = cut_costs(costs, *limit)
    assert [cost for group in found for cost in group] == sorted(costs)
    assert all(found) and allowed(found, *limit)
    filled = greedy(sorted(costs), *limit)
    assert allowed(filled, *limit)
    assert not_above(objective(found, limit[1]), objective(filled, limit[1]))


@settings(max_examples=100, deadline=None)
@given(costs=st.lists(COSTS, min_size=1, max_size=60), limit=limits)
def test_cut_pads_no_more_than_an_unsorted_one_of_the_same_sizes(
    costs: list[float], limit: tuple[int | None, float | None]
):
    found = cut_costs(costs, *limit)
    ends = list(accumulate(len(group) for group in found))
    unsorted = [costs[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    if allowed(unsorted, *limit):
        assert padded(found) <= padded(unsorted) * (1 + 1e-12)


@settings(max_examples=50, deadline=None)
@given(costs=st.lists(COSTS, min_size=1, max_size=100), size=st.integers(1, 20))
def test_without_a_budget_microbatches_are_as_few_as_the_size_allows(costs: list[float], size: int):
    assert len(cut_costs(costs, size, None)) == ceil(len(costs) / size)


@settings(max_examples=50, deadline=None)
@given(indices=st.lists(st.integers(0, 1000), max_size=100), size=st.integers(1, 20))
def test_without_costs_the_batch_is_cut_in_its_own_order(indices: list[int], size: int):
    found = cut(indices, size=size)
    assert [index for group in found for index in group] == indices
    lengths = [len(group) for group in found]
    assert len(found) == ceil(len(indices) / size)
    assert all(0 < length <= size for length in lengths)
    assert not lengths or max(lengths) - min(lengths) <= 1


def test_samples_of_like_length_come_together():
    assert cut([10, 11, 12, 13, 14], costs=[9, 1, 9, 1, 1], budget=18) == [[11, 13, 14], [10, 12]]
    assert cut([10, 11, 12, 13], size=3, costs=[100, 1, 1, 1]) == [[11, 12, 13], [10]]


def test_equal_costs_keep_the_order_of_the_batch():
    assert cut([5, 3, 9, 1], costs=[2, 2, 2, 2], budget=8) == [[5, 3, 9, 1]]


def test_a_sample_above_the_budget_runs_alone():
    assert cut([0, 1, 2], costs=[50, 1, 60], budget=10) == [[1], [0], [2]]


@pytest.mark.parametrize(("cost", "count"), [(0.7, 3), (0.3, 31), (0.1, 17), (2048, 8)])
def test_a_group_may_reach_the_budget_exactly_and_not_pass_it(cost: float, count: int):
    """The quotient of such a budget and its cost rounds to either side of the count."""
    assert len(cut(range(count), costs=[cost] * count, budget=cost * count)) == 1
    assert len(cut(range(count), costs=[cost] * count, budget=nextafter(cost * count, 0))) == 2


def test_a_batch_of_no_cost_is_one_microbatch():
    assert cut([0, 1, 2], costs=[0, 0, 0], budget=1) == [[0, 1, 2]]


@pytest.mark.parametrize("limit", [{"size": 4}, {"budget": 10.0}])
def test_an_empty_batch_has_no_microbatch(limit: dict[str, float]):
    assert cut([], costs=[], **limit) == []


@pytest.mark.parametrize("cost", [nan, inf, -1])
def test_a_cost_that_is_no_length_is_named_with_its_sample(cost: float):
    with pytest.raises(UserError, match=f"cost of sample 71 is {cost}"):
        cut([70, 71], costs=[1, cost], budget=10)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"costs": [1, 2]},
        {"size": 0},
        {"budget": 4},
        {"costs": [1], "size": 2},
        {"costs": [1, 2], "budget": 0},
        {"costs": [1, 2], "budget": inf},
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, object]):
    with pytest.raises(ValueError):
        cut([0, 1], **options)
