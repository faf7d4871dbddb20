"""The average of the weights under every plan, held against torch's AveragedModel in a plain loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import class_loss, classifier_job, tower_job
from jobs_pipeline import PIPELINE_JOBS, Block, Chain, text_job
from kept_ranks import KeptRanks
from kept_references import References
from torch import nn

import evenly
from evenly.errors import ResumeError, RunError, UserError
from evenly.parallel.core.memory import local
from evenly.parallel.data import grouping
from evenly.train.run import Run
from evenly.verify.compare import RankComparison, judge
from evenly.verify.ranks import compare_job, compare_steps, keep_reference
from evenly.verify.tasks import PlanSteps

STEPS, SAVED_AT = 5, 2


def tied() -> Chain:
    """Embedding and head share a parameter; one block is frozen."""
    model = Chain(Block() for _ in range(4))
    nn.init.normal_(model.embed.weight, std=0.1)
    model.head.weight = model.embed.weight
    model.blocks[2].requires_grad_(False)
    return model


JOBS: dict[str, Callable[..., evenly.Job]] = {
    "ema": partial(text_job, model=tied, average=evenly.EMA(decay=0.7)),
    "swa": partial(PIPELINE_JOBS["conv_norm"], average=evenly.SWA(start=1, every=2)),
    "late": partial(text_job, model=tied, average=evenly.EMA(decay=0.5, start=3)),
}


def prepared(name: str) -> evenly.Job:
    return JOBS[name](precision="float64")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory, prepared, STEPS)


def compare(name: str, plan: str, folder: Path) -> RankComparison:
    return compare_job(prepared(name), plan, STEPS, folder)


PLANS = [
    ("ema", "single", 1),
    ("ema", "ddp", 2),
    ("ema", "zero1", 3),
    ("ema", "zero2", 2),
    ("ema", "zero3", 2),
    ("ema", "hsdp", 4),
    ("ema", "tp", 2),
    ("ema", "pp", 2),
    ("ema", "3d", 8),
    ("ema", "replicas=2", 1),
    ("ema", "zero3 offload=parameters", 2),
    ("ema", "zero2 offload=optimizer", 2),
    ("swa", "zero2", 3),
    ("swa", "zero3", 2),
    ("swa", "pp", 2),
    ("late", "zero3", 2),
]


@pytest.mark.full_but(
    "ema-ddp-2", "ema-zero3-2", "ema-tp-2", "ema-pp-2", "ema-replicas=2-1", "swa-zero3-2", "late-zero3-2"
)
@pytest.mark.parametrize(("name", "plan", "size"), PLANS)
def test_every_plan_has_the_averages_of_one_device(
    name: str, plan: str, size: int, ranks: KeptRanks, reference: References
) -> None:
    found = ranks.run(compare, name, plan, reference(name), size=size)
    row = judge(plan, found)
    assert (row.status, row.reason) == ("equal", "")
    assert row.param_diff is not None and row.param_diff < 1e-10
    expected = {one for comparison in found for one in comparison.expected if one.startswith("average of ")}
    assert len(expected) > 10 and not any("blocks.2." in one and name != "swa" for one in expected)


@pytest.mark.full_but("ema")
@pytest.mark.parametrize("average", [evenly.EMA(decay=0.7), evenly.SWA(start=1)], ids=["ema", "swa"])
def test_averages_have_the_bits_of_one_device(average: Any, ranks: KeptRanks, tmp_path: Path) -> None:
    ranks.run(bitwise_reference, average, tmp_path, size=1)
    ranks.run(bitwise, average, "single exact=bitwise", tmp_path, size=1)
    for plan, size in (("ddp exact=bitwise", 3), ("zero2 exact=bitwise", 2), ("zero3 exact=bitwise", 2)):
        row = judge(plan, ranks.run(bitwise, average, plan, tmp_path, size=size))
        assert row.bits_differ == 0


def bitwise_reference(average: Any, folder: Path) -> None:
    keep_reference(tower_job(average=average), STEPS, folder / "reference")


def bitwise(average: Any, plan: str, folder: Path) -> RankComparison:
    return compare_job(tower_job(average=average), plan, STEPS, folder)


def part(name: str, plan: str, first: int, last: int, out: Path, folder: Path) -> RankComparison:
    return compare_steps(prepared(name), PlanSteps(plan, first, last, out), STEPS, folder)  # type: ignore[arg-type]


@pytest.mark.full_but("ema-zero3-tp")
@pytest.mark.parametrize(
    ("name", "first", "then"),
    [("ema", "ddp", "zero3"), ("ema", "zero3", "tp"), ("ema", "pp", "zero2"), ("swa", "zero2", "ddp"),
     ("late", "tp", "ddp")],
)  # fmt: skip
def test_a_run_goes_on_with_its_averages_under_another_plan(
    name: str, first: str, then: str, ranks: KeptRanks, reference: References, tmp_path: Path
) -> None:
    folder, out = reference(name), tmp_path / "run"
    assert judge(first, ranks.run(part, name, first, 0, SAVED_AT, out, folder)).reason == ""
    found = ranks.run(part, name, then, SAVED_AT, STEPS, out, folder)
    assert judge(then, found).reason == ""
    assert any(one.startswith("average of ") for one in found[0].seen)


def bits(run: Run) -> list[torch.Tensor]:
    with run.inside():
        return [local(tensor.detach()).clone() for tensor in (*run.model.parameters(), *run.model.buffers())]


def evaluated(plan: str) -> tuple[bool, bool, bool, float, float]:
    """Whether weights change within `averaged_weights`, are back after it, and after an evaluation; both losses."""
    with evenly.start(prepared("ema"), plan=plan) as run:
        for batch in run.batches():
            run.step(batch)
            if run.steps_done == 3:
                break
        before = bits(run)
        of_average = run.evaluate()
        after_evaluation = bits(run)
        of_weights = run.evaluate(average=False)
        with run.averaged_weights():
            within = bits(run)
            again = run.evaluate()
        after = bits(run)
        assert (of_average.averaged, of_weights.averaged, again.averaged) == (True, False, True)
        assert again.loss == of_average.loss
        changed = not all(map(torch.equal, before, within))
        back = all(map(torch.equal, before, after)), all(map(torch.equal, before, after_evaluation))
        return changed, *back, of_average.loss, of_weights.loss


@pytest.mark.full_but("ddp-2", "zero3-2", "tp-2")
@pytest.mark.parametrize(("plan", "size"), [("ddp", 2), ("zero2", 2), ("zero3", 2), ("tp", 2), ("pp", 2)])
def test_the_weights_come_back_with_the_same_bits(plan: str, size: int, ranks: KeptRanks) -> None:
    for changed, back, back_too, of_average, of_weights in ranks.run(evaluated, plan, size=size):
        assert (changed, back, back_too) == (True, True, True)
        assert math.isfinite(of_average) and abs(of_average - of_weights) > 1e-6


class Interrupted(Exception):
    pass


def after_an_error(plan: str) -> list[list[float]]:
    """Losses of a run whose loop survives an error among averaged weights, and of one without it."""
    found: list[list[float]] = []
    for fails in (False, True):
        with evenly.start(prepared("ema"), plan=plan) as run:
            losses: list[float] = []
            for batch in run.batches():
                losses.append(run.step(batch).loss)
                if fails:
                    with pytest.raises(Interrupted), run.averaged_weights():
                        raise Interrupted
            found.append([*losses, run.evaluate(average=False).loss])
    return found


@pytest.mark.full_but("zero3")
@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_an_error_among_averaged_weights_leaves_the_run_as_it_was(plan: str, ranks: KeptRanks) -> None:
    for undisturbed, disturbed in ranks.run(after_an_error, plan):
        assert disturbed == undisturbed


def after_a_block_of_its_own() -> list[list[float]]:
    """Losses under zero3 of a run whose loop calls a block that stays gathered among averaged weights, or does not."""
    found: list[list[float]] = []
    grouping.WHOLE_BYTES = 1 << 20
    try:
        for calls in (False, True):
            with evenly.start(prepared("ema"), plan="zero3") as run:
                block: Any = run.model.get_submodule("blocks.3")
                losses: list[float] = []
                for batch in run.batches():
                    losses.append(run.step(batch).loss)
                    if calls:
                        with run.averaged_weights(), torch.no_grad():
                            block(torch.ones(1, 3, 15, dtype=torch.float64))
                            losses[-1] += 0 * run.evaluate().loss
                            block(torch.ones(1, 3, 15, dtype=torch.float64))
                found.append([*losses, run.evaluate(average=False).loss])
    finally:
        grouping.WHOLE_BYTES = 0
    return found


def test_a_block_that_was_gathered_among_averaged_weights_has_the_weights_again(ranks: KeptRanks) -> None:
    for undisturbed, disturbed in ranks.run(after_a_block_of_its_own):
        assert disturbed == undisturbed


def test_no_step_is_made_and_nothing_saved_with_averaged_weights(tmp_path: Path) -> None:
    with evenly.start(prepared("ema"), plan="single", out=tmp_path) as run:
        batches = run.batches()
        run.step(next(batches))
        batch = next(batches)
        with run.averaged_weights():
            for forbidden in (lambda: run.step(batch), run.save, lambda: run.evaluate(average=False)):
                with pytest.raises(RunError, match="the model has the averaged weights"):
                    forbidden()
        run.step(batch)


def test_before_an_average_begins_the_weights_are_evaluated() -> None:
    with evenly.start(prepared("late"), plan="single") as run:
        found = []
        for batch in run.batches():
            run.step(batch)
            found.append(run.evaluate().averaged)
    assert found == [False, False, True, True, True, True]


def test_a_job_without_an_average_has_none_to_show() -> None:
    with (
        evenly.start(classifier_job(steps=1), plan="single") as run,
        pytest.raises(UserError, match="the job keeps no average"),
        run.averaged_weights(),
    ):
        pass


def large_loss(model: nn.Module, batch: Any) -> evenly.Loss:
    loss = class_loss(model, batch)
    return evenly.Loss(loss.total * 64, loss.weight)


def test_a_step_that_overflows_counts_for_the_average_as_in_a_plain_loop(tmp_path: Path) -> None:
    """Float16 begins with a scale at which the gradient overflows: the mean is of the first weights, then."""
    job = classifier_job(precision="float16", loss=large_loss, average=evenly.SWA(start=1))
    keep_reference(job, 3, tmp_path / "reference")
    assert judge("single", [compare_job(job, "single", 3, tmp_path)]).reason == ""
    with evenly.start(job, plan="single") as run:
        skipped = [run.step(batch).skipped for batch in run.batches()]
        assert skipped[0] == "overflow" and run.weight_average is not None
        assert run.weight_average.count == len(skipped)


@pytest.mark.parametrize(
    ("average", "found"),
    [
        (evenly.EMA(decay=1.5), "average.decay is 1.5"),
        (evenly.EMA(start=0), "average.start is 0"),
        (evenly.SWA(start=10, every=2.5), "average.every is 2.5"),  # type: ignore[arg-type]
        (evenly.EMA, "average is a EMA, must be evenly.EMA"),
        (0.999, "average is a float"),
    ],
)
def test_an_average_out_of_range_is_named(average: Any, found: str) -> None:
    with pytest.raises(UserError) as caught:
        classifier_job(average=average)
    assert found in caught.value.found


def test_another_average_is_no_way_to_go_on(tmp_path: Path) -> None:
    trained(tmp_path, evenly.EMA(decay=0.9), 2)
    with pytest.raises(ResumeError, match=r"average was EMA\(decay=0.9, start=1, every=1\), is now None"):
        trained(tmp_path, None, 3, resume=True)


def trained(out: Path, average: Any, steps: int, *, resume: bool = False) -> None:
    with evenly.start(
        classifier_job(average=average, steps=6), plan="single", out=out, steps=steps, resume=resume
    ) as run:
        for batch in run.batches():
            run.step(batch)
