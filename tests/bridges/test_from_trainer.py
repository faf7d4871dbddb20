"""A Trainer as a job: the Trainer's own losses, evaluations and rates; equal under other plans; refusals by name."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_job import make_data, make_trainer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_linear_schedule_with_warmup,
    set_seed,
)
from verified import verified

import evenly
from evenly.bridges.predictions import padded_arrays, samples_of
from evenly.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:evenly.from_trainer. the loss of an evaluation")


def trained(job: evenly.Job) -> tuple[list[float], list[float], dict[int, evenly.Evaluation]]:
    """Losses, learning rates and evaluations of a run on one device, as `evenly run` makes them."""
    losses, rates, evaluations = list[float](), list[float](), dict[int, Any]()
    with evenly.start(job) as run:
        for batch in run.batches():
            report = run.step(batch)
            losses.append(report.loss)
            rates.append(report.lr)
            if job.eval_every and report.step % job.eval_every == 0:
                evaluations[report.step] = run.evaluate()
    return losses, rates, evaluations


def logged(trainer: Trainer, key: str) -> list[float]:
    return [row[key] for row in trainer.state.log_history if key in row]


def test_losses_rates_and_evaluations_are_the_trainer_s_own(tmp_path: Path) -> None:
    losses, rates, evaluations = trained(evenly.from_trainer(make_trainer(str(tmp_path))))
    trainer = make_trainer(str(tmp_path))
    trainer.train()
    assert losses == pytest.approx(logged(trainer, "loss"), rel=1e-6, abs=6e-7)
    assert rates == pytest.approx(logged(trainer, "learning_rate"), rel=1e-6)
    accuracies = [one.metrics["accuracy"] for one in evaluations.values()]
    assert accuracies == pytest.approx(logged(trainer, "eval_accuracy"), rel=1e-6)
    # Its evaluation loss is a mean of the means of batches, in which the tokens of short samples count for more.
    with torch.no_grad():
        rows = torch.utils.data.default_collate(make_data()[40:])
        expected = token_mean(trainer.model.eval()(input_ids=rows["input_ids"]).logits, rows["labels"])
    assert evaluations[30].loss == pytest.approx(float(expected), rel=2e-6)


@pytest.mark.full_but("zero3")
@pytest.mark.parametrize("plans", ["zero3", "ddp>zero3;tensor=2;pipeline=2"])
def test_the_job_of_a_trainer_is_equal_under_other_plans(plans: str, tmp_path: Path) -> None:
    verdicts = verified(Path(__file__).with_name("trainer_job.py"), plans.split(";"), tmp_path, steps=3)
    assert verdicts == [(plan, "equal", "") for plan in plans.split(";")]


class Classifier(BertForSequenceClassification):
    """Takes keywords, and returns a mean whatever number of items it is given."""


def classifier_trainer(folder: Path, **more: Any) -> Trainer:
    set_seed(2)
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(
        vocab_size=30,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        num_labels=3,
        **none,
    )
    data = [{"input_ids": row["input_ids"], "labels": n % 3} for n, row in enumerate(make_data()[:24])]
    args = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=3, max_steps=6,
        learning_rate=1e-2, save_strategy="no", logging_steps=1, report_to="none", use_cpu=True,
        train_sampling_strategy="sequential", **more,
    )  # fmt: skip
    return Trainer(model=Classifier(config), args=args, train_dataset=data)


def test_means_that_the_trainer_adds_up_are_added_up_and_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="the Trainer adds up 3 in a step"):
        losses, _, _ = trained(evenly.from_trainer(classifier_trainer(tmp_path)))
    trainer = classifier_trainer(tmp_path)
    trainer.train()
    assert losses == pytest.approx(logged(trainer, "loss"), rel=1e-6)


def token_mean(logits: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction=reduction)


class MeanLoss(Trainer):
    """As many write it: a mean, whatever number of items is given."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        loss = 2 * token_mean(outputs.logits, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class PassedOn(Trainer):
    def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
        return super().compute_loss(*arguments, **keywords)


def mean_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return token_mean(outputs.logits, labels)


def summed_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return token_mean(outputs.logits, labels, "sum") / num_items_in_batch


@pytest.mark.filterwarnings("ignore:evenly.from_trainer", "ignore:the loss does not add up over samples")
@pytest.mark.parametrize(
    ("kind", "loss", "scaled"),
    [
        (MeanLoss, None, None),
        (MeanLoss, None, False),
        (PassedOn, None, None),
        (Trainer, mean_loss, None),
        (Trainer, summed_loss, None),
        (Trainer, None, False),
    ],
)
def test_losses_of_one_s_own_are_scaled_as_the_trainer_scales_them(
    kind: type[Trainer], loss: Any, scaled: bool | None, tmp_path: Path
) -> None:
    def make() -> Trainer:
        trainer = make_trainer(str(tmp_path), max_steps=6, eval_strategy="no")
        trainer.__class__, trainer.compute_loss_func, trainer.loss_is_scaled_for_ga = kind, loss, scaled
        return trainer

    losses, _, _ = trained(evenly.from_trainer(make()))
    trainer = make()
    trainer.train()
    assert losses == pytest.approx(logged(trainer, "loss"), rel=1e-6)


def test_a_loss_that_cannot_be_read_and_a_trainer_that_has_trained_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer(str(tmp_path), max_steps=1)
    trainer.train()
    trainer.compute_loss_func = functools.partial(mean_loss)
    with pytest.raises(UserError) as refused:
        evenly.from_trainer(trainer)
    assert "it has trained 1 steps already" in refused.value.found
    assert "cannot be read" in refused.value.found


def test_an_optimizer_and_a_schedule_that_were_given_are_made_again(tmp_path: Path) -> None:
    def make() -> Trainer:
        set_seed(3)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=30, n_positions=10, n_embd=8, n_layer=1, n_head=2))
        model.config.use_cache = False
        groups = [{"params": [*model.transformer.parameters()], "lr": 1e-2}]
        optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.5)
        args = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=5, save_strategy="no", logging_steps=1,
            report_to="none", use_cpu=True, train_sampling_strategy="sequential",
        )  # fmt: skip
        schedule = get_linear_schedule_with_warmup(optimizer, 2, 5)
        return Trainer(model=model.eval(), args=args, train_dataset=make_data(), optimizers=(optimizer, schedule))

    _, rates, _ = trained(evenly.from_trainer(make()))
    assert rates == pytest.approx([0.0, 0.005, 0.01, 0.02 / 3, 0.01 / 3], rel=1e-6)


class Counting(TrainerCallback):
    """Notes what it is called with, and asks to stop."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.evaluated: list[tuple[int, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.steps.append(state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: Any, **more: Any) -> Any:
        self.evaluated.append((state.global_step, metrics["eval_accuracy"]))
        control.should_training_stop = state.global_step >= 20
        return control


def test_callbacks_are_hooks(tmp_path: Path) -> None:
    counting = Counting()
    losses, _, evaluations = trained(evenly.from_trainer(make_trainer(str(tmp_path), callbacks=[counting])))
    assert len(losses) == 20
    assert counting.steps == [*range(1, 21)]
    assert counting.evaluated == [(step, found.metrics["accuracy"]) for step, found in evaluations.items()]


class Stepping(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **more: Any) -> None:
        optimizer.step()


class Beginning(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None: ...


class Saving(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_save = True


class OwnStep(Trainer):
    def training_step(self, *arguments: Any, **more: Any) -> Any:
        return super().training_step(*arguments, **more)


def test_what_cannot_be_carried_over_is_named(tmp_path: Path) -> None:
    trainer = make_trainer(
        str(tmp_path), callbacks=[Stepping(), Beginning(), Saving()], neftune_noise_alpha=5.0, dataloader_drop_last=True
    )
    trainer.__class__ = OwnStep
    with pytest.raises(UserError) as refused:
        evenly.from_trainer(trainer)
    for words in (
        "OwnStep has a training_step of its own",
        "callback Stepping steps the optimizer itself",
        "callback Beginning is called on_step_begin",
        "callback Saving sets should_save",
        "neftune_noise_alpha=5.0",
        "dataloader_drop_last",
    ):
        assert words in refused.value.found


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_what_evenly_does_in_its_own_way_is_noted(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="add recompute=full"):
        evenly.from_trainer(make_trainer(str(tmp_path), gradient_checkpointing=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evenly.from_trainer(make_trainer(str(tmp_path), eval_strategy="no"))


def test_predictions_of_several_lengths_are_padded_as_transformers_pads_them() -> None:
    parts = [samples_of((torch.ones(2, 3, 4), torch.zeros(2))), samples_of((torch.ones(1, 5, 4), torch.zeros(1)))]
    whole = padded_arrays(tuple(a + b for a, b in zip(*parts, strict=True)))
    assert [array.shape for array in whole] == [(3, 5, 4), (3,)]
    assert np.array_equal(whole[0][0, 3:], np.full((2, 4), -100.0))
    assert np.array_equal(whole[0][2], np.ones((5, 4)))


class Generating(Trainer):
    """Makes its inputs itself, as those of trl that sample completions."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        return {**super()._prepare_inputs(inputs), "more": 1}


class Recounting(Trainer):
    def get_batch_samples(self, *args: Any) -> Any:
        return super().get_batch_samples(*args)


@pytest.mark.parametrize(("kind", "method"), [(Generating, "_prepare_inputs"), (Recounting, "get_batch_samples")])
def test_a_trainer_that_makes_inputs_in_its_loop_is_refused(kind: Any, method: str, tmp_path: Path) -> None:
    trainer = classifier_trainer(tmp_path)
    trainer.__class__ = kind
    with pytest.raises(UserError, match=f"{kind.__name__} has a {method} of its own .which makes the loss's inputs"):
        evenly.from_trainer(trainer)
