"""Every way past what a plan splits: equal to a plain loop, or refused before the first update."""

from __future__ import annotations

import pytest
from battery import STEPS, chosen_by_microbatch, outcome, outcomes, steps_of_ranks
from cases import CASES, COUNTS
from kept_ranks import KeptRanks, RankFailure

PLANS = {"single": 1, "ddp": 2, "zero1": 2, "zero3": 2, "tensor=2": 2, "pipeline=2": 2, "dp replicas=2": 1}

ELSEWHERE = ("norm as number", "sums and means", "products", "as lists", "by index", "whole norm", "predicted")
TWO_DIMS = {"zero3", "tensor=2", "pipeline=2"}
ALL = set(PLANS)
SEVERAL = ALL - {"single"}
SHARED = SEVERAL - {"tensor=2", "pipeline=2"}  # microbatches
OWN_OPTIMIZERS = (
    "pre_hook",
    "post_hook",
    "hooks of a list",
    "patched_step",
    "trusting",
    "lars",
    "lamb",
    "together",
    "sgld",
)
# The plans under which a case is refused; under all others it is equal.
REFUSED: dict[str, set[str]] = {
    "list": {"zero3", "pipeline=2"},
    "closure": {"zero3"},
    "view": TWO_DIMS,
    **dict.fromkeys(("two on one", "two on one float32", "transposed", "own forward of a norm"), ALL),
    **{f"optimizer {name}": {"pipeline=2"} for name in OWN_OPTIMIZERS},
    "checkpoint of two": {"pipeline=2"},
    **dict.fromkeys(("data generator", "data numpy", "data counts", "cost"), SEVERAL),
    **dict.fromkeys(("model generator", "hidden state", "first call", "queue", "saved queue", "loss counts"), SEVERAL),
    **dict.fromkeys(("model generator of Python", "model generator of numpy"), SEVERAL),
    **dict.fromkeys(("codebook", "own buffers", "momentum head", "momentum head data"), SEVERAL),
    "retyped": SEVERAL,
    "max_norm": SEVERAL - {"tensor=2", "pipeline=2"},
    **{key: {"zero3", "pipeline=2"} for key in ("double backward", "double backward of norms")},
    "iterator": {"zero3"},
    "other weights": {"zero3", "pipeline=2"},
    **{key: {"pipeline=2"} for key in ("spectral norm called twice", "moving averages")},
    **dict.fromkeys(("norms averaged", "first norms", "backwards counted", "norms noted"), SHARED),
    **{f"counted {what}": SHARED for what in ("in the first steps", "for long", "up to an end", "for gradients")},
    **{f"counted {where}": SHARED for where in (*COUNTS, "by the loss")},
    **{f"counted {where}": {*SHARED, "pipeline=2"} for where in ("in a variable", "by a class")},  # of all blocks
    "counted and averaged": {*SHARED, "pipeline=2"},
}
NOISES = ("on gradients", "by Python", "by numpy", "of a function", "on parameters")
# Between steps: numbers of a parameter of another stage, and a parameter given other memory.
BETWEEN = {**{f"own loop {name}": {"pipeline=2"} for name in ELSEWHERE}, "own loop norm of data": {"zero1"}}
# Gradients outlive a step where a rank has them as the parameters are.
NOT_TRIED = {("own loop by gradients", plan) for plan in ("zero1", "pipeline=2")}
# Where counts are kept is looked at in the same way under every plan.
NOT_TRIED |= {(f"counted {where}", plan) for where in COUNTS for plan in ("single", "zero1", "zero3", "tensor=2")}
# Refused by some ranks in a forward of the look or the first step: the others are ended with them.
STOPPED = (
    *("checkpoint of two", "saved queue", "codebook"),
    *("moving averages", "own buffers", "retyped", "counted and averaged"),
    *("norms noted", *(f"noise {where}" for where in NOISES)),
)
IN_THE_STEP = {(name, "pipeline=2") for name in STOPPED} | {("retyped", "single"), ("written gradients", "zero3")}


@pytest.mark.full_but("single", "ddp", "pipeline=2")
@pytest.mark.parametrize("plan", PLANS)
def test_jobs_have_the_numbers_of_a_plain_loop_or_are_refused(plan: str, ranks: KeptRanks) -> None:
    late = IN_THE_STEP | {(name, where) for name, plans in BETWEEN.items() for where in plans} | NOT_TRIED
    names = [name for name in CASES if (name, plan) not in late]
    by_rank = ranks.run(outcomes, names, plan, size=PLANS[plan], limit_s=900)
    wanted = {name: "refused" if plan in REFUSED.get(name, ()) else "equal" for name in names}
    for found in by_rank:
        assert {name: found[name] for name in names if found[name][0] != wanted[name]} == {}


@pytest.mark.full_but(
    "checkpoint of two-*",
    "codebook-*",
    "noise by Python-*",
    "noise on parameters-*",
    "norms noted-*",
    "retyped-single",
    "saved queue-*",
    "written gradients-*",
)
@pytest.mark.parametrize(("name", "plan"), sorted(IN_THE_STEP))
def test_what_only_a_step_shows_is_refused_in_the_first(name: str, plan: str, ranks: KeptRanks) -> None:
    with pytest.raises(RankFailure, match="REFUSED"):
        ranks.run(outcome, name, plan, size=PLANS[plan], limit_s=60)


@pytest.mark.full_but(
    "own loop norm as number-*", "own loop norm of data-*", "own loop as lists-*", "own loop products-*"
)
@pytest.mark.parametrize(("name", "plan"), sorted((name, plan) for name, plans in BETWEEN.items() for plan in plans))
def test_what_no_rank_can_compute_between_steps_is_refused_there(name: str, plan: str, ranks: KeptRanks) -> None:
    with pytest.raises(RankFailure, match=r"REFUSED|LATE"):
        ranks.run(outcome, name, plan, size=PLANS[plan], limit_s=60)


DISAGREEMENTS = {
    "length": "len(data)",
    "clip_norm": "clip_norm",
    "shuffle": "shuffle",
    "global_batch": "global_batch",
    "schedule": "schedule",
    "optimizer": "optimizer",
    "lr": "lr of group 0",
    "samples": "microbatch 0 of the first step",
    "order": "the order of its parameters",
}


def test_ranks_that_disagree_about_the_job_are_refused(ranks: KeptRanks) -> None:
    for found in ranks.run(steps_of_ranks, [*DISAGREEMENTS], limit_s=120):
        for name, field in DISAGREEMENTS.items():
            assert found[name].startswith("every rank must "), (name, found[name])
            assert f"found: {field} on rank 1 differs from rank 0's" in found[name]


def test_cases_are_named() -> None:
    assert BETWEEN.keys() | {name for name, _ in NOT_TRIED} <= CASES.keys()
    assert REFUSED.keys() <= CASES.keys() and {name for name, _ in IN_THE_STEP} <= CASES.keys()
    assert STEPS == 3


def test_blocks_that_are_chosen_by_the_microbatch_are_refused_where_they_are_gathered(ranks: KeptRanks) -> None:
    for found in ranks.run(chosen_by_microbatch, "zero3", limit_s=120):
        assert "which blocks run depends on the microbatch" in found
    assert ranks.run(chosen_by_microbatch, "zero2", limit_s=120) == ["nothing"] * 2


@pytest.mark.full_but("full")
@pytest.mark.parametrize("how", ["full", "selective"])
def test_what_one_device_recomputes_changes_buffers_once(how: str, ranks: KeptRanks) -> None:
    names = ["moving averages", "own buffers", "codebook", "spectral norm", "frozen norm"]
    (found,) = ranks.run(outcomes, names, f"single recompute={how}", size=1, limit_s=120)
    assert {name: found[name] for name in names if found[name][0] != "equal"} == {}


@pytest.mark.full_but("selective")
@pytest.mark.parametrize("how", ["full", "selective"])
def test_what_one_device_recomputes_is_counted_once(how: str, ranks: KeptRanks) -> None:
    names = [name for name in CASES if name.startswith(("counted", "model generator"))]
    (found,) = ranks.run(outcomes, names, f"single recompute={how}", size=1, limit_s=120)
    assert {name: found[name] for name in names if found[name][0] != "equal"} == {}


def test_each_stage_of_a_rank_has_a_batch_of_its_own(ranks: KeptRanks) -> None:
    names = ["batch in place", "batch in place float32"]
    for found in ranks.run(outcomes, names, "pipeline=2 schedule=interleaved", size=2, limit_s=120):
        assert [found[name][0] for name in names] == ["equal", "equal"], found
