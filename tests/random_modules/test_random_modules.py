"""Twenty of the cases of `benchmarks/random_modules`: each equal to one device, or refused before it trains."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from kept_ranks import KeptRanks, RankFailure

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks is no installed package

from benchmarks.random_modules.cases import PLANS, random_case, smaller
from benchmarks.random_modules.outcome import compare, kind_of, prepare, world_of
from evenly.errors import EvenlyError, UserError, step_of
from evenly.verify.compare import RankComparison, judge

SEEDS = range(20)
STATUSES: Counter[str] = Counter()


def prepared(seed: int, folder: Path) -> str:
    """'' if one device can train the case."""
    try:
        prepare(random_case(seed), folder)
    except UserError as problem:
        return str(problem)
    return ""


def compared(seed: int, folder: Path) -> RankComparison | str:
    """The comparison, or the refusal before the first step; one that the other ranks may not share ends them too."""
    try:
        return compare(random_case(seed), folder)
    except EvenlyError as problem:
        if step_of(problem) is not None:
            raise
        if not isinstance(problem, UserError):
            raise AssertionError(f"REFUSED: {problem}") from None
        return str(problem)


@pytest.mark.full_but("0", "1", "2")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_module_is_equal_or_refused(seed: int, ranks: KeptRanks, tmp_path: Path) -> None:
    case = random_case(seed)
    if ranks.run(prepared, seed, tmp_path, size=1)[0]:
        STATUSES["no job"] += 1
        return
    try:
        found = ranks.run(compared, seed, tmp_path, size=world_of(case))
    except RankFailure as failure:
        assert "AssertionError: REFUSED" in str(failure), failure
        found = ["refused"]
    comparisons = [one for one in found if isinstance(one, RankComparison)]
    if not comparisons:
        STATUSES["refused"] += 1
        return
    assert len(comparisons) == len(found)
    row = judge(case.plan, comparisons)
    STATUSES[row.status] += 1
    assert (row.status, row.reason) == ("equal", "")


def test_most_of_them_are_equal() -> None:
    if sum(STATUSES.values()) == len(SEEDS):  # not where one alone was asked for
        assert STATUSES["equal"] >= 14


def test_a_case_follows_from_its_seed_and_has_smaller_ones() -> None:
    cases = [random_case(seed) for seed in range(300)]
    assert cases == [random_case(seed) for seed in range(300)]
    assert {case.plan for case in cases} == {*PLANS}
    for case in cases[:20]:
        assert all(one != case for one in smaller(case))
    assert {kind_of(case) for case in cases} == {"sums", "forward"}
