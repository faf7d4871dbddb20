"""Which losses are found not to add up over samples, in the first step."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from jobs import Points, classifier_job
from torch import nn
from torch.nn import functional as F

import evenly
from evenly.errors import JobWarning
from evenly.train.look_loss import FirstLoss, may_remember, warn_of_batch_norm
from evenly.train.loop import unit_of
from evenly.verify.additive import loss_not_additive

SAMPLES, CLASSES = 9, 3
WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)


def a_model() -> nn.Module:
    """Logits of classes, all alike: only gradients tell how a loss weighs samples."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, CLASSES)).double()
    nn.init.zeros_(model[-1].weight)
    nn.init.zeros_(model[-1].bias)
    return model


def a_batch() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 4, generator=draw, dtype=torch.float64)
    return {"x": x, "y": torch.randint(CLASSES, (SAMPLES,), generator=draw)}


def note_of(loss: Callable[[Any, Any], Any], model: nn.Module | None = None, batch: Any = None) -> str:
    looked = FirstLoss(loss, SAMPLES)
    looked(model or a_model(), batch or a_batch())
    return looked.note


def mixed(model: Any, batch: Any) -> torch.Tensor:
    share, order, logits = torch.rand(()), torch.randperm(len(batch["y"])), model(batch["x"])
    return share * F.cross_entropy(logits, batch["y"]) + (1 - share) * F.cross_entropy(logits, batch["y"][order])


def cut_twice(model: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), model(-batch["x"]))


def by_tokens(model: Any, batch: Any) -> torch.Tensor:
    """Two rows of outputs for each sample, next to each other."""
    logits = model(batch["x"].repeat_interleave(2, 0))
    return F.cross_entropy(logits, batch["y"].repeat_interleave(2, 0))


def by_views(model: Any, batch: Any) -> torch.Tensor:
    """Two rows of outputs for each sample, those of all samples after each other."""
    return F.cross_entropy(model(torch.cat([batch["x"], -batch["x"]])), torch.cat([batch["y"]] * 2))


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        lambda model, batch: evenly.Loss(
            F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])
        ),
        lambda model, batch: evenly.Loss(
            F.cross_entropy(model(batch["x"]), batch["y"], weight=WEIGHTS, reduction="sum"), WEIGHTS[batch["y"]].sum()
        ),
        mixed,
        cut_twice,
        by_tokens,
        by_views,
        lambda model, batch: (
            F.cross_entropy(model(batch["x"]), batch["y"], weight=WEIGHTS, reduction="mean")
            + sum(p.square().sum() for p in model.parameters())
        ),  # it asks the model for more than outputs
    ],
)
def test_nothing_is_said_of_losses_that_add_up_or_cannot_be_judged(loss: Callable[[Any, Any], Any]) -> None:
    assert note_of(loss) == ""


def pairs(model: Any, batch: Any) -> torch.Tensor:
    one, other = (F.normalize(model(x) + batch["x"][:, :CLASSES]) for x in (batch["x"], -batch["x"]))
    return F.cross_entropy(one @ other.T, torch.arange(len(one)))


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"], weight=WEIGHTS),
        lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"], ignore_index=2),
        lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"),
        lambda model, batch: evenly.Loss(F.cross_entropy(model(batch["x"]), batch["y"]), SAMPLES),
        lambda model, batch: evenly.Loss(F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), 1),
        pairs,
    ],
)
def test_a_loss_that_does_not_add_up_is_found(loss: Callable[[Any, Any], Any]) -> None:
    assert "pairs within the batch?" in note_of(loss)


def test_targets_that_are_ignored_are_found_where_the_model_computes_the_loss() -> None:
    class Tagger(nn.Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(super().forward(x).flatten(0, 1), labels.flatten())

    x, labels = torch.randn(SAMPLES, 5, 4), torch.ones(SAMPLES, 5, dtype=torch.int64)
    labels[:, 0] = -100
    batch = {"x": x, "labels": labels}
    assert note_of(lambda model, batch: model(**batch), Tagger(4, CLASSES), batch) == ""
    labels[0, 1] = -100
    assert "ignored targets" in note_of(lambda model, batch: model(**batch), Tagger(4, CLASSES), batch)


def test_the_look_changes_neither_the_batch_nor_what_is_drawn() -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        y, drawn = batch.pop("y"), 0 * (random.random() + numpy.random.rand())
        return F.cross_entropy(model(batch["x"]).mul_(2), y, weight=WEIGHTS) + drawn

    model, looked, drawn = a_model(), FirstLoss(loss, SAMPLES), list[Any]()
    for function in (looked, loss):
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)
        found = function(model, a_batch())
        drawn.append((float(found.detach()), random.random(), numpy.random.rand(), float(torch.rand(()))))
    assert looked.note and drawn[0] == drawn[1]


def weighted(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], weight=torch.tensor([0.1, 2.0, 1.0]))


def test_a_run_warns_at_the_place_of_the_loss() -> None:
    def steps(**changed: Any) -> None:
        with evenly.start(classifier_job(loss=weighted, eval_data=None, steps=2, **changed), plan="single") as run:
            for batch in run.batches():
                run.step(batch)

    with pytest.warns(
        JobWarning, match=r"no mean over samples .*microbatches of \d samples .* one forward of all"
    ) as found:
        steps()
    assert [(one.filename, one.lineno) for one in found] == [(__file__, weighted.__code__.co_firstlineno)]
    steps(microbatch=64)  # warnings are errors


def test_a_batch_norm_whose_microbatch_nobody_has_stated_is_named() -> None:
    model, job = a_model(), classifier_job(data=Points(64), microbatch=None, global_batch=64)
    with pytest.warns(JobWarning, match=r"BatchNorm \(1\) sees microbatches, of 8 of the 64 samples"):
        warn_of_batch_norm(job, model, 8)
    with warnings.catch_warnings(action="error"):
        warn_of_batch_norm(classifier_job(microbatch=8), model, 8)
        warn_of_batch_norm(job, model.eval(), 8)
        warn_of_batch_norm(job, model.train(), 64)


@pytest.mark.parametrize(("weight", "unit"), [(8.0, "samples"), (8.25, "samples"), (1.0, "samples"), (100, "tokens")])
def test_weights_that_are_no_whole_numbers_count_no_tokens(weight: float, unit: str) -> None:
    assert unit_of(weight, 8) == unit


CRITERION, COUNTED, COUNTER = nn.CrossEntropyLoss(weight=WEIGHTS), list[int](), itertools.count()
CALLS = 0


def by_criterion(model: Any, batch: Any) -> torch.Tensor:
    return CRITERION(model(batch["x"]), batch["y"])


def of_another(model: Any, batch: Any) -> evenly.Loss:
    return evenly.Loss(by_criterion(model, batch) + F.cross_entropy(model(batch["x"]), batch["y"], weight=WEIGHTS), 2)


def counts_in_a_list(model: Any, batch: Any) -> torch.Tensor:
    COUNTED.append(1)
    return by_criterion(model, batch)


def counts_by_an_iterator(model: Any, batch: Any) -> torch.Tensor:
    return by_criterion(model, batch) * next(COUNTER)


def counts_in_a_global(model: Any, batch: Any) -> torch.Tensor:
    global CALLS
    CALLS += 1
    return by_criterion(model, batch)


def counts_by_another(model: Any, batch: Any) -> torch.Tensor:
    return counts_in_a_list(model, batch)


def counts_in_place(model: Any, batch: Any) -> torch.Tensor:
    return by_criterion(model, batch) * WEIGHTS.add_(1.0)[0]


class CountsItself:
    calls = 0

    def __call__(self, model: Any, batch: Any) -> torch.Tensor:
        self.calls += 1
        return by_criterion(model, batch)


def of_a_closure() -> Callable[[Any, Any], torch.Tensor]:
    calls = 0

    def loss(model: Any, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return by_criterion(model, batch) * calls

    return loss


def test_a_loss_that_may_count_its_calls_is_not_called_more_often() -> None:
    counting = (counts_in_a_list, counts_by_an_iterator, counts_in_a_global, counts_by_another, counts_in_place)
    assert [may_remember(one) for one in (*counting, CountsItself(), of_a_closure())] == [True] * 7
    assert [may_remember(one) for one in (by_criterion, of_another, lambda model, batch: model(batch).sum())] == [
        False
    ] * 3


def test_a_loss_may_write_into_its_batch() -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        batch["y"].add_(1).remainder_(CLASSES)
        return F.cross_entropy(model(batch["x"]), batch["y"], weight=WEIGHTS)

    batch = a_batch()
    before = batch["y"].clone()
    assert "no mean over samples" in note_of(loss, batch=batch)
    assert torch.equal(batch["y"], (before + 1) % CLASSES)


# --- each warning of the guide, for outputs of several shapes ---------------------------------------------


class Shaped(nn.Module):
    """Two features of each sample, beside what belongs to no sample."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 6), nn.Linear(4, 6)
        self.norm, self.scale, self.centres = nn.BatchNorm1d(4), nn.Parameter(torch.tensor(1.3)), torch.ones(5, 6)
        self.shape = shape
        self.double()

    def forward(self, x: torch.Tensor) -> Any:
        a, b = F.normalize(self.one(x), dim=-1), F.normalize(self.other(x), dim=-1)
        if self.shape == "plain":
            return a * self.scale.exp(), b
        if self.shape == "without dims":
            return a, b, self.scale.exp()
        if self.shape == "dict":
            return {"a": a, "b": b, "scale": self.scale.exp(), "aux": 0 * self.scale}
        return a, b, self.scale.exp() * torch.eye(6).to(a)[:5], self.scale.exp()  # rows that are no samples


SHAPES = ["plain", "without dims", "dict", "other rows"]


def features(found: Any) -> tuple[torch.Tensor, torch.Tensor]:
    a, b, *rest = found.values() if isinstance(found, dict) else found
    return a * rest[0] if rest and rest[0].dim() == 0 else a @ rest[0].T @ rest[0] if rest else a, b


def of_pairs(model: Any, batch: Any) -> torch.Tensor:
    a, b = features(model(batch["x"]))
    targets = torch.arange(len(a))
    return (F.cross_entropy(a @ b.T, targets) + F.cross_entropy(b @ a.T, targets)) / 2


def of_samples(model: Any, batch: Any) -> torch.Tensor:
    a, b = features(model(batch["x"]))
    return F.cross_entropy(a * b, batch["y"])


def a_sum(model: Any, batch: Any) -> evenly.Loss:
    a, b = features(model(batch["x"]))
    return evenly.Loss(F.cross_entropy(a * b, batch["y"]), len(a))  # a mean for a sum


def ignoring(model: Any, batch: Any) -> torch.Tensor:
    a, b = features(model(batch["x"]))
    return (a * b).square().sum(-1, keepdim=True).mul(batch["labels"] != -100).mean()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("loss", "said"),
    [(of_pairs, "no mean over samples"), (a_sum, "does not add up"), (ignoring, "ignored targets"), (of_samples, "")],
)
def test_warnings_do_not_depend_on_the_shape_of_outputs(loss: Callable[[Any, Any], Any], said: str, shape: str) -> None:
    labels = torch.arange(SAMPLES * 3).view(SAMPLES, 3).tril()
    labels[labels == 0] = -100
    batch = a_batch() | ({"labels": labels} if loss is ignoring else {})
    note = note_of(loss, Shaped(shape), batch)
    assert said in note and (note == "") == (said == "")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_norm_is_named_whatever_the_shape_of_outputs(shape: str) -> None:
    with pytest.warns(JobWarning, match="BatchNorm"):
        warn_of_batch_norm(classifier_job(microbatch=None, global_batch=10), Shaped(shape), 3)


@pytest.mark.parametrize("shape", SHAPES)
def test_verify_notes_a_loss_of_pairs_whatever_the_shape_of_outputs(shape: str) -> None:
    samples = [{"x": x, "y": y} for x, y in zip(*a_batch().values(), strict=True)]
    job = classifier_job(model=lambda: Shaped(shape), data=samples, eval_data=None, precision="float64", global_batch=9)
    assert "depend on the others" in loss_not_additive(replace(job, loss=of_pairs))
    assert loss_not_additive(replace(job, loss=of_samples)) == ""
