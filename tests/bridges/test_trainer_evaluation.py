"""The loss of an evaluation: that of all tokens or samples, held against what the Trainer averages."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from test_from_trainer import MeanLoss, classifier_trainer, logged, token_mean, trained
from trainer_job import make_data, make_trainer

import evenly

ROWS = make_data()[39:]  # 7 of unlike numbers of tokens: two batches of 3, and one of 1


def batch_means(model: Any, size: int) -> list[tuple[float, int, int]]:
    """By batch: the mean over its tokens, its samples, its tokens."""
    found: list[tuple[float, int, int]] = []
    for start in range(0, len(ROWS), size):
        rows = torch.utils.data.default_collate(ROWS[start : start + size])
        with torch.no_grad():
            logits = model.eval()(input_ids=rows["input_ids"]).logits
        counted = int((rows["labels"][:, 1:] != -100).sum())
        found.append((float(token_mean(logits, rows["labels"])), len(rows["labels"]), counted))
    return found


def test_a_loss_of_tokens_is_that_of_all_and_the_trainer_s_is_named(tmp_path: Path) -> None:
    trainer: Any
    other: Any
    trainer, other = (make_trainer(str(tmp_path), max_steps=10) for _ in range(2))
    trainer.eval_dataset = other.eval_dataset = ROWS
    trainer.train()
    with pytest.warns(UserWarning, match="the Trainer averages the means of its batches"):
        job = evenly.from_trainer(other)
    _, _, evaluations = trained(job)
    means = batch_means(trainer.model, 3)
    assert [samples for _, samples, _ in means] == [3, 3, 1] and len({tokens for *_, tokens in means}) == 3
    of_tokens = sum(mean * tokens for mean, _, tokens in means) / sum(tokens for *_, tokens in means)
    of_batches = sum(mean * samples for mean, samples, _ in means) / len(ROWS)
    (theirs,) = logged(trainer, "eval_loss")
    assert evaluations[10].loss == pytest.approx(of_tokens, rel=2e-6)
    assert theirs == pytest.approx(of_batches, rel=2e-6)
    assert abs(theirs / of_tokens - 1) > 1e-4  # they are not the same figure
    assert evaluations[10].metrics["accuracy"] == pytest.approx(logged(trainer, "eval_accuracy")[0], rel=1e-6)


def evaluated_classifier(folder: Path, size: int) -> Any:
    trainer: Any = classifier_trainer(folder, per_device_eval_batch_size=size)
    trainer.args.eval_strategy, trainer.args.eval_steps = "steps", 6
    trainer.eval_dataset = [{"input_ids": row["input_ids"], "labels": n % 3} for n, row in enumerate(ROWS)]
    return trainer


@pytest.mark.filterwarnings("ignore:evenly.from_trainer")
@pytest.mark.parametrize("size", [2, 3])
def test_a_mean_over_samples_is_the_trainer_s_own(size: int, tmp_path: Path) -> None:
    """The last batch is smaller, and those of the evaluation are not those of the training."""
    _, _, evaluations = trained(evenly.from_trainer(evaluated_classifier(tmp_path, size)))
    trainer = evaluated_classifier(tmp_path, size)
    trainer.train()
    assert evaluations[6].loss == pytest.approx(logged(trainer, "eval_loss")[0], rel=1e-6)


@pytest.mark.filterwarnings("ignore:the loss does not add up over samples")
@pytest.mark.parametrize(("size", "rows", "named"), [(3, 6, False), (3, 7, True), (2, 6, True)])
def test_means_of_batches_depend_on_their_sizes_which_is_named(
    size: int, rows: int, named: bool, tmp_path: Path
) -> None:
    def make() -> Any:
        trainer: Any = make_trainer(str(tmp_path), max_steps=6, eval_steps=6, per_device_eval_batch_size=size)
        trainer.__class__, trainer.eval_dataset = MeanLoss, ROWS[:rows]
        return trainer

    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        job = evenly.from_trainer(make())
    words = f"up to 3 samples at a time, in parts of like sizes, and the Trainer {size}"
    assert any(words in str(one.message) for one in noted) == named
    _, _, evaluations = trained(job)
    trainer = make()
    trainer.train()
    assert (evaluations[6].loss == pytest.approx(logged(trainer, "eval_loss")[0], rel=2e-6)) != named
