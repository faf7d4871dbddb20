"""Parameter groups by name, parameters frozen for some steps, and a learning rate that follows the evaluation: the
numbers of one device under every plan.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import classifier_job
from jobs_tensor import heads_job
from kept_ranks import KeptRanks
from torch.optim.lr_scheduler import ReduceLROnPlateau

import evenly
from evenly.model.frozen import frozen_at, frozen_steps
from evenly.verify.compare import RankComparison, judge
from evenly.verify.ranks import compare_job, compare_steps, keep_reference
from evenly.verify.reference import build_model, reference_steps
from evenly.verify.shorten import shortened
from evenly.verify.tasks import PlanSteps

STEPS = 5
FROZEN: dict[str, int | None] = {"tok.*": 2, "blocks.*": 3, "blocks.1.*": 1, "*.down.bias": None, "*.norm.weight": 0}


def by_name(named_parameters: Any) -> torch.optim.Optimizer:
    """Decay for what has two dims or more, a rate of its own for each block."""
    groups: dict[tuple[str, bool], list[Any]] = {}
    for name, parameter in named_parameters:
        block = name.split(".")[1] if name.startswith("blocks.") else ""
        large = parameter.ndim >= 2 and parameter.numel() == parameter.shape[0] * parameter.shape[1]
        groups.setdefault((block, large), []).append((name, parameter))
    return torch.optim.AdamW(
        [
            {"params": named, "lr": 1e-2 / (1 + len(block)), "weight_decay": 0.2 if large else 0.0}
            for (block, large), named in groups.items()
        ]
    )


def impatient(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
    """Halves the rate at each evaluation that is not better by half."""
    return ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)


def job() -> evenly.Job:
    return heads_job(
        optimizer=by_name, frozen=FROZEN, schedule=impatient, eval_every=2, precision="float64", steps=STEPS
    )


def reference(folder: Path) -> None:
    keep_reference(job(), STEPS, folder / "reference")


def compare(plan: str, folder: Path) -> RankComparison:
    return compare_job(job(), plan, STEPS, folder)


PLANS = {
    "ddp": 2, "zero1": 2, "zero2": 3, "zero3": 2, "replicas=2": 1, "tensor=2": 2, "pipeline=2": 2,
    "data=2 tensor=2 pipeline=2": 8,
}  # fmt: skip


@pytest.mark.full_but("ddp", "zero2", "zero3", "tensor=2", "pipeline=2")
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_has_the_numbers_of_one_device(plan: str, ranks: KeptRanks, tmp_path: Path) -> None:
    ranks.run(reference, tmp_path, size=1)
    row = judge(plan, ranks.run(compare, plan, tmp_path, size=PLANS[plan]))
    assert (row.status, row.reason) == ("equal", "")


def compare_part(plan: str, first: int, last: int, folder: Path, out: Path) -> RankComparison:
    part = PlanSteps(plan, first, last, out)  # type: ignore[arg-type]
    return compare_steps(job(), part, STEPS, folder)


@pytest.mark.full_but("plans0-2")
@pytest.mark.parametrize(("plans", "border"), [(("ddp", "zero3"), 2), (("zero3", "pipeline=2"), 3)])
def test_a_run_goes_on_before_and_at_the_border_of_the_unfreezing(
    plans: tuple[str, str], border: int, ranks: KeptRanks, tmp_path: Path
) -> None:
    ranks.run(reference, tmp_path, size=1)
    for plan, first, last in ((plans[0], 0, border), (plans[1], border, STEPS)):
        row = judge(plan, ranks.run(compare_part, plan, first, last, tmp_path, tmp_path / "out", size=2))
        assert (row.status, row.reason) == ("equal", ""), plan


def test_the_job_compared_has_what_it_is_to_show() -> None:
    """In the plain loop: parameters move from their step on, and the rates of all groups fall."""
    initial = {name: p.detach().clone() for name, p in build_model(job()).named_parameters()}
    moved: dict[str, int] = {}
    for record in reference_steps(job(), STEPS):
        moves = [name for name in initial if not torch.equal(record.tensors[name], initial[name])]
        moved = dict.fromkeys(moves, record.step) | moved
        state = {name.rpartition(" of ")[2] for name in record.state}
        assert state == set(moves)
        assert record.rates == pytest.approx([rate / 2 ** max(0, record.step // 2 - 1) for rate in first_rates(job())])
    assert {name: steps for name, steps in moved.items() if steps > 1} == {
        name: 3 if name == "tok.weight" else 4 if name.startswith("blocks.0.") else 2
        for name in initial
        if name.startswith(("blocks.", "tok.")) and not name.endswith(("down.bias", ".norm.weight"))
    }
    assert {name for name in initial if name not in moved} == {name for name in initial if name.endswith("down.bias")}


def first_rates(one: evenly.Job) -> list[float]:
    return [group["lr"] for group in one.build_optimizer(build_model(one).named_parameters()).param_groups]


def rates_without_evaluating(plan: str, out: Path) -> list[float]:
    """The first group's rate after each step of a loop that never evaluates, and is cut in two by a checkpoint."""
    found = []
    for steps, resume in ((2, False), (STEPS, True)):
        with evenly.start(job(), plan=plan, out=out, steps=steps, resume=resume) as run:
            for batch in run.batches():
                run.step(batch)
                found.append(run.optimizer.param_groups[0]["lr"])
    return found


def test_the_rate_follows_evaluations_that_no_one_asks_for(ranks: KeptRanks, tmp_path: Path) -> None:
    """That after step 2 is made before the third, that after step 4 before the fifth."""
    first = first_rates(job())[0]
    for rates in ranks.run(rates_without_evaluating, "zero3", tmp_path, size=2):
        assert rates == [first, first, first, first, first / 2]


def groups_seen(plan: str) -> list[Any]:
    """What the optimizer finds in its groups while it steps, and the job's code between steps."""
    seen: list[Any] = []
    with evenly.start(job(), plan=plan) as run:

        def look(optimizer: torch.optim.Optimizer) -> list[list[str]]:
            assert all(len(group["params"]) == len(group["param_names"]) for group in optimizer.param_groups)
            return [group["param_names"] for group in optimizer.param_groups]

        seen.append(look(run.optimizer))
        with run.inside():
            seen.append(look(run.optimizer))
        run.step(next(iter(run.batches())))
        seen.append(look(run.optimizer))
    return seen


def test_groups_keep_their_names(ranks: KeptRanks) -> None:
    first, second = ranks.run(groups_seen, "pipeline=2", size=2)
    assert first[0] == first[2] == second[0] == second[2]
    assert first[0][0] == ["place", "tok.weight"]
    halves = zip(first[0], first[1], second[1], strict=True)
    assert all({*whole} == {*one, *other} for whole, one, other in halves)
    assert any(first[1]) and first[1] != first[0] != second[1]


def without_names(named_parameters: Any) -> torch.optim.Optimizer:
    decayed, other = [], []
    for name, parameter in named_parameters:
        (decayed if "weight" in name else other).append(parameter)
    return torch.optim.AdamW([{"params": decayed}, {"params": other, "weight_decay": 0.0}])


def half_with_names(named_parameters: Any) -> torch.optim.Optimizer:
    named = [*named_parameters]
    return torch.optim.AdamW([{"params": named[:2]}, {"params": [p for _, p in named[2:]]}])


def test_a_callable_may_drop_the_names_of_all_groups_but_not_of_some() -> None:
    with evenly.start(classifier_job(optimizer=without_names), plan="single") as run:
        assert all("param_names" not in group for group in run.optimizer.param_groups)
        run.step(next(iter(run.batches())))
    with pytest.raises(evenly.UserError, match=r"calling the job's optimizer\n.*with/without names"):
        evenly.start(classifier_job(optimizer=half_with_names), plan="single")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frozen": {"first.*": 1, "encoder.*": 3, "fisrt*": None}}, r"frozen as 'encoder\.\*', 'fisrt\*'\n.*no param"),
        ({"frozen": {"*": 1}}, "all parameters are frozen in it"),
        ({"schedule": impatient, "eval_data": None}, "the job has no eval_data and no eval_every"),
        ({"schedule": impatient}, "the job has no eval_every"),
        ({"schedule": lambda o: torch.optim.lr_scheduler.ChainedScheduler([impatient(o)])}, "ReduceLROnPlateau"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(evenly.UserError, match=message):
        evenly.start(classifier_job(**changes), plan="single")


def test_the_last_pattern_that_matches_decides() -> None:
    names = ["encoder.0.weight", "encoder.1.weight", "head.weight"]
    steps = frozen_steps(names, {"*": None, "encoder.1.*": 3, "head*": 0})
    assert steps == {"encoder.0.weight": None, "encoder.1.weight": 3}
    assert [frozen_at(steps, step) for step in (1, 3, 4)] == [{*names[:2]}, {*names[:2]}, {names[0]}]


def test_what_is_verified_in_few_steps_shows_the_unfreezing_and_the_rate() -> None:
    short = shortened(classifier_job(frozen={"first.*": 500, "last.*": None, "norm.*": 1}, eval_every=100), 3)
    assert (short.frozen, short.eval_every) == ({"first.*": 2, "last.*": None, "norm.*": 1}, 1)
