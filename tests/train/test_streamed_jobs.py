"""A streamed job with all that a job may have: metrics, figures, streamed evaluation sets, an average and hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Sentences
from jobs_streams import sentences
from jobs_tensor import VOCABULARY, heads_job
from kept_ranks import KeptRanks, RankFailure
from torch import nn
from torch.nn import functional as F

import evenly
from evenly.train import streaming
from evenly.verify.compare import RankComparison, judge
from evenly.verify.ranks import compare_job, keep_reference
from evenly.verify.reference import reference_steps
from evenly.verify.shorten import shortened

STEPS, DONE = 4, 2


def token_loss(model: nn.Module, batch: Any) -> evenly.Loss:
    """Outputs are ragged rows of every sample."""
    out, labels = model(batch["inputs"]), batch["labels"]
    counted = labels != -100
    total = F.cross_entropy(out.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    rows = [row[:n] for row, n in zip(out, counted.sum(1), strict=True)]
    accuracy = (((out.argmax(-1) == labels) & counted).sum(), counted.sum())
    return evenly.Loss(total, counted.sum(), metrics={"accuracy": accuracy}, outputs=(rows, labels[:, 0]))


def in_order(outputs: Any) -> dict[str, float]:
    """Figures that another order of samples would change."""
    rows, first = outputs
    places = torch.arange(1, len(rows) + 1, dtype=torch.float64)
    means = torch.stack([row.double().mean() for row in rows])
    return {"rows": float(means @ places), "first": float(first.double() @ places), "samples": len(rows)}


class Seen:
    """Notes what it is called with, and saves that."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.sets: list[Any] = []

    def on_step(self, run: Any, report: Any) -> None:
        self.steps.append([report.step, report.loss, report.metrics])

    def __call__(self, run: Any, evaluation: Any) -> None:
        found = {name: {"loss": one.loss, **one.metrics} for name, one in evaluation.by_name.items()}
        self.sets.append([run.steps_done, found])

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "sets": self.sets}

    def load_state_dict(self, state: Any) -> None:
        self.steps, self.sets = [*state["steps"]], [*state["sets"]]


def streamed_job(**changes: Any) -> evenly.Job:
    """One set is a dataset, and stands between two streams; one has a single sample, of which some ranks have none."""
    sets: dict[str, Any] = {
        "valid": sentences(13, seed=1), "kept": Sentences(5, seed=3, tokens=VOCABULARY), "test": sentences(1, seed=2),
    }  # fmt: skip
    fields: dict[str, Any] = dict(
        data=sentences(29), eval_data=sets, cost=len, microbatch_cost=40, microbatch=2, shuffle_buffer=6,
        loss=token_loss, evaluate=in_order, average=evenly.EMA(decay=0.6), steps=STEPS, eval_every=2,
        precision="float64",
    )  # fmt: skip
    return heads_job(**{**fields, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("streamed")
    keep_reference(streamed_job(), STEPS, made / "reference")
    return made


def compared(plan: str, folder: Path) -> RankComparison:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "EVALUATED_AT_ONCE", 1)  # the first set takes several turns
        return compare_job(streamed_job(), plan, STEPS, folder)


@pytest.mark.full_but("single-1", "ddp-2", "zero3-3", "tensor=2-2")
@pytest.mark.parametrize(
    ("plan", "size"), [("single", 1), ("ddp", 2), ("zero3", 3), ("tensor=2", 2), ("data=2 pipeline=2", 4)]
)
def test_a_streamed_job_is_that_of_one_device(plan: str, size: int, ranks: KeptRanks, folder: Path) -> None:
    row = judge(plan, ranks.run(compared, plan, folder, size=size))
    assert (row.status, row.reason) == ("equal", "")
    assert row.param_diff is not None and row.param_diff < 1e-11


def seen_in(folder: Path, plan: str, last: int, resume: bool) -> tuple[list[Any], list[Any]]:
    """What the hooks were called with until step `last`; they save and evaluate."""
    seen = Seen()
    job = streamed_job(on_step=seen.on_step, on_evaluation=seen)
    with evenly.start(job, plan=plan, out=folder, resume=resume) as run:
        for batch in run.batches():
            run.step(batch)
            if run.steps_done % 2 == 0:
                run.evaluate()
            if run.steps_done == last:
                break
        with run.whole_model() as model:
            assert sum(p.numel() for p in model.parameters())
    return seen.steps, seen.sets


@pytest.mark.full_but("zero3-2")
@pytest.mark.parametrize(("plan", "size"), [("ddp", 2), ("zero3", 2)])
def test_hooks_of_a_streamed_job_see_what_one_device_computes(
    plan: str, size: int, ranks: KeptRanks, tmp_path: Path
) -> None:
    expected = [*reference_steps(streamed_job(), STEPS)]
    found = ranks.run(seen_in, tmp_path, plan, STEPS, False, size=size)
    assert found[0] == found[1]
    steps, sets = found[0]
    for (step, loss, metrics), one in zip(steps, expected, strict=True):
        assert (step, loss, metrics) == (one.step, pytest.approx(one.loss), pytest.approx(one.metrics))
    assert [step for step, _ in sets] == [2, 4]
    for step, by_name in sets:
        evaluation = expected[step - 1].evaluation
        assert [*by_name] == [*evaluation] == ["valid", "kept", "test"]
        for name, values in by_name.items():
            assert values == pytest.approx(evaluation[name])
        assert [values["samples"] for values in by_name.values()] == [13, 5, 1]


def test_a_streamed_job_goes_on_with_its_hooks_under_another_plan(ranks: KeptRanks, tmp_path: Path) -> None:
    whole = ranks.run(seen_in, tmp_path / "whole", "ddp", STEPS, False, size=2)[0]
    ranks.run(seen_in, tmp_path / "parts", "zero3", 3, False, size=3)
    steps, sets = ranks.run(seen_in, tmp_path / "parts", "ddp", STEPS, True, size=2)[0]
    assert [(step, loss) for step, loss, _ in steps[3:]] == [(4, pytest.approx(whole[0][3][1]))]
    assert sets[-1][1]["valid"] == pytest.approx(whole[1][-1][1]["valid"])


def test_each_set_is_shortened_by_itself() -> None:
    job = streamed_job(global_batch=3, microbatch=None)
    sets = shortened(job, 3).eval_sets
    counts = [sum(1 for _ in iter(sets[name])) for name in ("valid", "test")]  # type: ignore[call-overload]
    assert counts == [7, 1] and len(sets["kept"]) == 5  # type: ignore[arg-type]


def now_and_then(model: nn.Module, batch: Any) -> evenly.Loss:
    """Only microbatches of two samples have a metric in an evaluation."""
    found = token_loss(model, batch)
    short = not model.training and len(batch["labels"]) < 2
    return evenly.Loss(found.total, found.weight, metrics={} if short else found.metrics)


def evaluate_unlike() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "EVALUATED_AT_ONCE", 1)
        job = streamed_job(loss=now_and_then, evaluate=None, eval_data=sentences(5), steps=1)
        with evenly.start(job, plan="ddp") as run:
            run.evaluate()


def test_metrics_of_a_streamed_set_have_the_same_names_throughout(ranks: KeptRanks) -> None:
    with pytest.raises(RankFailure) as failed:
        ranks.run(evaluate_unlike, size=2)
    assert str(failed.value).count("microbatch 0 has accuracy, microbatch 2 none") == 2
