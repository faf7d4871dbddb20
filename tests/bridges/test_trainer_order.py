"""The order of a Trainer's samples is its sampler's own, epoch after epoch; refused where the training decides it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_from_trainer import logged, trained
from torch.utils.data import WeightedRandomSampler
from trainer_job import make_trainer
from transformers import Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler

import evenly
from evenly.errors import UserError

STEPS = 16  # an epoch has 7


def drawn_by_length(data: Any, generator: torch.Generator | None) -> Any:
    return LengthGroupedSampler(6, dataset=data, lengths=[n % 5 for n in range(len(data))], generator=generator)


class ByLength(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return drawn_by_length(self.train_dataset, torch.Generator().manual_seed(4))


class Weighted(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        weights = [1.0 + n % 3 for n in range(len(self.train_dataset))]  # type: ignore[arg-type]
        return WeightedRandomSampler(weights, 26, generator=torch.Generator().manual_seed(4))


class Unseeded(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return drawn_by_length(self.train_dataset, None)


def made(kind: type[Trainer], folder: Path, **more: Any) -> Trainer:
    given: dict[str, Any] = {"max_steps": STEPS, "eval_strategy": "no", "train_sampling_strategy": "random", **more}
    trainer = make_trainer(str(folder), **given)
    trainer.__class__ = kind
    return trainer


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (Trainer, {}),
        (Trainer, {"data_seed": 11}),
        (Trainer, {"train_sampling_strategy": "sequential"}),
        (ByLength, {}),
        (Weighted, {}),
        (Weighted, {"max_steps": -1, "num_train_epochs": 3}),
    ],
)
def test_losses_in_the_trainer_s_own_order(kind: type[Trainer], more: dict[str, Any], tmp_path: Path) -> None:
    losses, rates, _ = trained(evenly.from_trainer(made(kind, tmp_path, **more)))
    trainer = made(kind, tmp_path, **more)
    trainer.train()
    assert losses == pytest.approx(logged(trainer, "loss"), rel=1e-6, abs=6e-7)
    assert rates == pytest.approx(logged(trainer, "learning_rate"), rel=1e-6)


def test_an_order_that_the_training_decides_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a LengthGroupedSampler, draws from torch's global random numbers"):
        evenly.from_trainer(made(Unseeded, tmp_path))
    with pytest.raises(UserError, match="a LengthGroupedSampler, draws from torch's global random numbers"):
        evenly.from_trainer(made(Trainer, tmp_path, train_sampling_strategy="group_by_length"))
    with pytest.raises(UserError, match=r"train_sampling_strategy='batch_rebalance'.*a BatchRebalanceSampler"):
        evenly.from_trainer(made(Trainer, tmp_path, train_sampling_strategy="batch_rebalance"))
