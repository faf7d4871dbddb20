"""Metrics, figures of all predictions and several evaluation sets: those of one device, under every plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Points, Sentences, class_loss, classifier_job
from jobs_tensor import VOCABULARY, heads_job
from kept_ranks import KeptRanks
from torch import nn
from torch.nn import functional as F

import evenly
from evenly.report.run import course_rows, read_run
from evenly.train.evaluate import figures
from evenly.verify.compare import RankComparison, Rounding, judge
from evenly.verify.ranks import compare_job, keep_reference
from evenly.verify.shorten import shortened

STEPS = 3


def token_figures(model: nn.Module, batch: Any) -> evenly.Loss:
    """Ragged outputs, integers among the metrics, one that requires a gradient, and one that not every step has."""
    out, labels = model(batch["inputs"]), batch["labels"]
    counted = labels != -100
    total = F.cross_entropy(out.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    lengths = counted.sum(1)
    long = out[lengths > 14] if model.training else out
    return evenly.Loss(
        total,
        counted.sum(),
        metrics={
            "accuracy": (((out.argmax(-1) == labels) & counted).sum(), counted.sum()),
            "margin": (out[counted].amax(-1).sum(), float(counted.sum())),
            "long": (long.double().abs().sum(), long.numel()),
        },
        outputs={"rows": [row[:n] for row, n in zip(out, lengths, strict=True)], "first": (out[:, 0], lengths)},
    )


def in_order(outputs: Any) -> dict[str, float]:
    """Figures that another order, a filler or a missing sample would change; and what draws, draws the same."""
    means = torch.stack([row.double().mean() for row in outputs["rows"]])
    places = torch.arange(1, len(means) + 1, dtype=torch.float64)
    first, lengths = outputs["first"]
    return {
        "rows": float(means @ places),
        "first": float(first.double().mean(1) @ places),
        "samples": len(means),
        "tokens": int(lengths.sum()),
        "drawn": float(torch.rand(())),
    }


def metrics_job(**changes: Any) -> evenly.Job:
    # Of 13 samples in 4 microbatches, the first of three ranks runs the first and the third.
    sets = {"valid": Sentences(13, seed=1, tokens=VOCABULARY), "test": Sentences(2, seed=2, tokens=VOCABULARY)}
    fields: dict[str, Any] = {"loss": token_figures, "evaluate": in_order, "eval_data": sets, "precision": "float64"}
    return heads_job(**{**fields, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("metrics")
    keep_reference(metrics_job(), STEPS, made / "reference")
    return made


def compared(plan: str, folder: Path) -> RankComparison:
    return compare_job(metrics_job(), plan, STEPS, folder)


@pytest.mark.full_but("ddp-3", "zero3-3", "tensor=2-2", "pipeline=2-2")
@pytest.mark.parametrize(
    ("plan", "size"),
    [("ddp", 3), ("zero2", 2), ("zero3", 3), ("tensor=2", 2), ("pipeline=2", 2), ("tensor=2 pipeline=2", 4)],
)
def test_metrics_and_figures_are_those_of_one_device(plan: str, size: int, ranks: KeptRanks, folder: Path) -> None:
    row = judge(plan, ranks.run(compared, plan, folder, size=size))
    assert (row.status, row.reason) == ("equal", "")


def trained(folder: Path) -> tuple[list[Any], Any, list[float]]:
    """Of this rank: the metrics of each step, the last evaluation, and what an own loop draws after it."""
    with evenly.start(metrics_job(), plan="zero3", out=folder) as run:
        torch.manual_seed(run.world.rank)
        found = [run.step(batch).metrics for batch in run.batches()]
        return found, run.evaluate(), torch.rand(2).tolist()


def test_all_ranks_have_the_metrics_and_the_folder_has_them_once(ranks: KeptRanks, tmp_path: Path) -> None:
    (one, last, drawn), (other, last_of_other, others) = ranks.run(trained, tmp_path, size=2)
    for rank, numbers in enumerate((drawn, others)):
        assert numbers == torch.rand(2, generator=torch.Generator().manual_seed(rank)).tolist()
    assert (one, last) == (other, last_of_other)
    assert [*one[0]] == ["accuracy", "margin", "long"] and "long" not in one[3]
    assert [*last.sets] == ["valid", "test"] and last.loss == last.sets["valid"].loss != last.sets["test"].loss
    assert (last.metrics["samples"], last.sets["test"].metrics["samples"], last.sets["test"].samples) == (13.0, 2.0, 2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps, evaluations = [x for x in lines if "loss" in x], [x for x in lines if "eval_loss" in x]
    assert [line["metrics"] for line in steps] == one
    assert [(line["eval_set"], line["eval_metrics"]) for line in evaluations[-2:]] == [
        (name, found.metrics) for name, found in last.sets.items()
    ]
    rows = dict(course_rows(read_run(tmp_path)))
    assert rows["accuracy"] == f"{one[0]['accuracy']:.4f} -> {one[-1]['accuracy']:.4f}"
    assert rows["evaluation of test, accuracy"].endswith(f"{last.sets['test'].metrics['accuracy']:.4f}")


def with_logits(model: nn.Module, batch: Any) -> evenly.Loss:
    """Its logits are split over the tensor axis, as far as the outputs."""
    labels, out = batch["labels"].flatten(), model(batch["inputs"])
    total = F.cross_entropy(out.flatten(0, 1), labels, ignore_index=-100, reduction="sum")
    outputs = None if model.training else {"means": out.mean(1), "rows": [*out]}
    return evenly.Loss(total, (labels != -100).sum(), outputs=outputs)


def of_logits(outputs: Any) -> dict[str, float]:
    rows = torch.stack([row.mean(0) for row in outputs["rows"]])
    places = torch.arange(1.0, 1 + rows.numel(), dtype=torch.float64).view(rows.shape)
    return {"rows": float((rows * places).sum()), "means": float((outputs["means"] * places).sum())}


def evaluated_logits(plan: str) -> dict[str, float]:
    with evenly.start(metrics_job(loss=with_logits, evaluate=of_logits), plan=plan) as run:
        return run.evaluate().metrics


def test_outputs_are_whole_where_the_tensor_axis_splits_them(ranks: KeptRanks) -> None:
    (expected,) = ranks.run(evaluated_logits, "single", size=1)
    for found in ranks.run(evaluated_logits, "tensor=2", size=2, limit_s=120):
        assert found == pytest.approx(expected, rel=1e-9)


# --- what is wrong -------------------------------------------------------------------------------------


def never_counted(model: nn.Module, batch: Any) -> evenly.Loss:
    loss = class_loss(model, batch)
    return evenly.Loss(loss.total, loss.weight, metrics={"rare": (0.0, 0)})


class Numbered(Points):
    def __getitem__(self, index: int) -> Any:
        return (*super().__getitem__(index), index)


def problem_of(**changes: Any) -> str:
    with evenly.start(classifier_job(**{"steps": 2, **changes}), plan="ddp") as run:
        try:
            for batch in run.batches():
                assert run.step(batch).metrics == {}
            run.evaluate()
        except evenly.RunError as problem:
            run.close(failed=True)
            return str(problem)
    return ""


def evaluated_uncounted() -> str:
    return problem_of(loss=never_counted)


def unlike_names() -> str:
    """Only microbatches of rank 0, the first of the batch, have a metric."""
    return problem_of(loss=now_and_then, data=Numbered(37), shuffle=False)


def now_and_then(model: nn.Module, batch: Any) -> evenly.Loss:
    loss = class_loss(model, batch[:2])
    return evenly.Loss(loss.total, loss.weight, metrics={"a": (1, 1)} if int(batch[2][0]) < 4 else {})


def raising(outputs: Any) -> Any:
    raise ValueError(f"no figures of {len(outputs)}")


def raised_figures() -> str:
    return problem_of(loss=with_outputs, evaluate=raising)


def with_outputs(model: nn.Module, batch: Any) -> evenly.Loss:
    x, y = batch
    out = model(x)
    return evenly.Loss(F.cross_entropy(out, y, reduction="sum"), len(y), outputs=(out, y))


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (evaluated_uncounted, "evaluation after step 2: a metric needs something that counts"),
        (unlike_names, "microbatch 0 has a, microbatch 2 none"),
        (raised_figures, "ValueError: no figures of 2 (test_metrics.py:"),
    ],
)
def test_a_problem_is_the_same_error_on_all_ranks(job: Any, words: str, ranks: KeptRanks) -> None:
    one, other = ranks.run(job, size=2)
    assert one == other and words in one


def without_outputs() -> str:
    return problem_of(evaluate=raising)


def test_evaluate_needs_outputs(ranks: KeptRanks) -> None:
    assert "in an evaluation the loss returned none" in ranks.run(without_outputs, size=1)[0]


@pytest.mark.parametrize(
    ("found", "words"),
    [(0.5, "it returned a float"), ({"a": torch.ones(3)}, "a is tensor([1., 1., 1.])"), ({"a": "b"}, "a is 'b'")],
)
def test_figures_are_numbers_by_name(found: Any, words: str) -> None:
    with pytest.raises(evenly.RunError, match="numbers by name") as problem:
        figures(dict(found=found).get, "found")
    assert problem.value.found == words


def test_a_missing_metric_is_a_difference() -> None:
    for found in ({}, {"metric a": 0.5}, {"metric a": 0.25, "metric b": 1.0}, {"metric a": float("nan")}):
        trace = RankComparison("float64", rank=0, rounding=Rounding())
        trace.add_figures(1, found, {"metric a": 0.25})
        assert judge("ddp", [trace]).status == "different"
    trace = RankComparison("float64", rank=0, rounding=Rounding(figures=[0.0, 0.125]))
    trace.add_figures(1, {"metric a": 0.5, "metric b": float("nan")}, {"metric a": 0.25, "metric b": float("nan")})
    assert judge("ddp", [trace]).status == "equal"  # near ties tip over: as where rounding is added


def test_evaluation_sets_are_checked_and_shortened_each() -> None:
    with pytest.raises(evenly.UserError, match="eval_data 'test' is empty"):
        classifier_job(eval_data={"valid": Points(3), "test": Points(0)})
    with pytest.raises(evenly.UserError, match="eval_data has no dataset in it"):
        classifier_job(eval_data={})
    short = shortened(classifier_job(eval_data={"valid": Points(500), "test": Points(3)}), 3)
    assert {name: len(data) for name, data in short.eval_sets.items()} == {"valid": 20, "test": 3}  # type: ignore[arg-type]
    assert [*classifier_job(eval_data={0: 1, 1: 2}).eval_sets] == [""]  # a mapping of numbers is a dataset itself


# --- torchmetrics --------------------------------------------------------------------------------------


def with_torchmetrics() -> dict[str, float]:
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

    metrics = MetricCollection({"macro": MulticlassAccuracy(3), "auroc": MulticlassAUROC(3)})
    with evenly.start(classifier_job(loss=with_outputs, evaluate=metrics, precision="float64"), plan="ddp") as run:
        return run.evaluate().metrics


def test_torchmetrics_see_all_samples_once(ranks: KeptRanks, tmp_path: Path) -> None:
    expected = ranks.run(with_torchmetrics, size=1)[0]
    assert {*expected} == {"macro", "auroc"} and 0 < expected["auroc"] < 1
    for size in (2, 3):
        for found in ranks.run(with_torchmetrics, size=size):
            assert found == pytest.approx(expected, rel=1e-9)


def test_a_single_metric_has_the_name_of_its_class() -> None:
    from torchmetrics.classification import BinaryAccuracy

    metric = BinaryAccuracy()
    metric.update(torch.tensor([1, 1]), torch.tensor([0, 0]))
    outputs = torch.tensor([1, 0, 1, 1]), torch.tensor([1, 0, 0, 1])
    assert figures(metric, outputs) == {"BinaryAccuracy": 0.75}
    assert figures(metric, dict(zip(("preds", "target"), outputs, strict=True))) == {"BinaryAccuracy": 0.75}
    assert float(metric.compute()) == 0.0  # the user's own stays as it was
