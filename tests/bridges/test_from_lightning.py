"""A LightningModule as a job: Lightning's own weights, rates and evaluations; equal under other plans; refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning_job import BATCH, SAMPLES, Classifier, Rows, make_trainer
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler
from verified import verified

import evenly
from evenly.bridges.epochs import EveryEpoch
from evenly.errors import UserError
from evenly.launcher.environment import RANK_VARIABLES, without_ranks

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")  # which lightning sets


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_weights_and_evaluations_are_lightning_s_own(interval: str) -> None:
    module, trainer = Classifier(interval), make_trainer()
    trainer.fit(module, Rows())
    job = evenly.from_lightning(Classifier(interval), Rows(), make_trainer())
    assert (job.steps, job.eval_every) == (3 * -(-SAMPLES // BATCH), -(-SAMPLES // BATCH))
    with evenly.start(job) as run:
        for batch in run.batches():
            run.step(batch)
        evaluation = run.evaluate()
        found = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
        rates = [group["lr"] for group in run.optimizer.param_groups]
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(found[f"module.{name}"], tensor, rtol=2e-6, atol=2e-7)
    assert rates == pytest.approx([group["lr"] for group in trainer.optimizers[0].param_groups])
    wanted = trainer.callback_metrics
    assert evaluation.metrics == pytest.approx(
        {name: float(wanted[name]) for name in ("val_loss", "accuracy")}, rel=1e-6
    )
    assert evaluation.loss == pytest.approx(float(wanted["val_loss"]), rel=1e-6)


@pytest.mark.full  # its numbers are held against Lightning's own above, and plans against a Trainer's job
def test_the_job_of_a_module_is_equal_under_other_plans(tmp_path: Path) -> None:
    plans = ["ddp>zero3", "pipeline=2"]
    verdicts = verified(Path(__file__).with_name("lightning_job.py"), plans, tmp_path, steps=3)
    assert verdicts == [(plan, "equal", "") for plan in plans]


def test_a_schedule_of_epochs_goes_on_from_its_state() -> None:
    def make() -> EveryEpoch:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        return EveryEpoch(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), 3)

    one, other = make(), make()
    for _ in range(7):
        one.step()
    other.load_state_dict(one.state_dict())
    other.optimizer.param_groups[0]["lr"] = one.optimizer.param_groups[0]["lr"]  # which is the optimizer's state
    for _ in range(2):
        one.step()
        other.step()
    assert one.get_last_lr() == other.get_last_lr() == [0.125]


class Numbered(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, 0) * (batch_idx + self.global_step + 1)

    def on_train_epoch_end(self) -> None: ...


class ByHand(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Numbered, ("asks for global_step", "makes use of batch_idx", "a hook on_train_epoch_end")),
        (ByHand, ("automatic_optimization is False",)),
    ],
)
def test_what_only_a_trainer_could_do_is_named(module: type[Classifier], words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as refused:
        evenly.from_lightning(module(), Rows(), make_trainer())
    assert all(word in refused.value.found for word in words)


def collated(samples: Any) -> Any:
    return torch.utils.data.default_collate(samples)


class OtherCollate(Rows):
    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.others, batch_size=BATCH, collate_fn=collated)


class Plateau(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class Summed(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("right", torch.ones(()), reduce_fx="sum")
        return super().training_step(batch, 0)


def test_settings_that_would_change_the_numbers_are_refused() -> None:
    stopping = EarlyStopping("val_loss")
    trainer = make_trainer(limit_train_batches=2, val_check_interval=2, callbacks=[stopping])
    with pytest.raises(UserError) as refused:
        evenly.from_lightning(Classifier(), OtherCollate(), trainer)
    for words in ("limit_train_batches=2", "val_check_interval=2", "callbacks EarlyStopping", "different collate_fns"):
        assert words in refused.value.found
    rows = Rows()
    rows.setup("fit")
    drawn = DataLoader(rows.rows, batch_size=3, sampler=RandomSampler(rows.rows, replacement=True))
    with pytest.raises(UserError, match="with replacement"):
        evenly.from_lightning(Classifier(), drawn, steps=3)
    with pytest.raises(UserError, match="ReduceLROnPlateau follows a metric"):
        evenly.from_lightning(Plateau(), Rows(), make_trainer())
    every_second = evenly.from_lightning(Classifier(), Rows(), make_trainer(check_val_every_n_epoch=2))
    assert every_second.eval_every == 2 * -(-SAMPLES // BATCH)
    job = evenly.from_lightning(Summed(), Rows(), make_trainer())
    with evenly.start(job) as run, pytest.raises(UserError, match="right is to be reduced by sum"):
        run.step(next(run.batches()))


def test_loaders_and_lengths_that_are_not_known_are_refused() -> None:
    rows = Rows()
    rows.setup("fit")
    weighted = DataLoader(rows.rows, batch_size=3, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))
    with pytest.raises(UserError, match="WeightedRandomSampler"):
        evenly.from_lightning(Classifier(), weighted, steps=3)
    with pytest.raises(UserError, match="how many steps"):
        evenly.from_lightning(Classifier(), rows)
    assert evenly.from_lightning(Classifier(), DataLoader(rows.rows, batch_size=4), steps=9).steps == 9
    assert evenly.from_lightning(Classifier(), rows, make_trainer(accumulate_grad_batches=2)).global_batch == 2 * BATCH


def rows_in_order(batch: int, epochs: int) -> list[Any]:
    rows = Rows()
    rows.setup("fit")
    x, y = rows.rows.tensors
    return [(x[first : first + batch], y[first : first + batch]) for first in range(0, SAMPLES, batch)] * epochs


@pytest.mark.parametrize(("devices", "strategy", "plan"), [(2, "auto", "ddp"), (3, "ddp", "ddp")])
def test_a_trainer_for_several_devices_moves_over(
    devices: int, strategy: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a rank, whose launcher has left its marks; a step has a batch of the loader's for each of these devices."""
    for name in ("TORCHELASTIC_RUN_ID", *RANK_VARIABLES):
        monkeypatch.setenv(name, "1")
    with without_ranks(), pytest.warns(UserWarning, match=f"are --devices {devices} --plan {plan} here; a step has"):
        trainer = make_trainer(devices=devices, strategy=strategy)
        job = evenly.from_lightning(Classifier("step"), Rows(), trainer)
    for name in ("TORCHELASTIC_RUN_ID", *RANK_VARIABLES):
        monkeypatch.delenv(name)
    assert (job.global_batch, job.microbatch, job.steps) == (
        devices * BATCH,
        BATCH,
        3 * -(-SAMPLES // (devices * BATCH)),
    )
    net = Classifier("step").double()
    optimizer, schedule = (
        (configured := net.configure_optimizers())["optimizer"],
        configured["lr_scheduler"]["scheduler"],
    )
    for x, y in rows_in_order(devices * BATCH, 3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x.double()), y).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.7)
        optimizer.step()
        schedule.step()
    with evenly.start(replace(job, precision="float64")) as run:
        for batch in run.batches():
            run.step(batch)
        for name, tensor in net.state_dict().items():
            torch.testing.assert_close(run.model.state_dict()[f"module.{name}"], tensor, rtol=1e-9, atol=1e-12)


class MetricOnly(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())


class Keeping(Classifier):
    def on_save_checkpoint(self, checkpoint: Any) -> None: ...


class Shifting(Rows):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] + 1, batch[1]


@pytest.mark.parametrize(
    ("module", "data", "words"),
    [
        (MetricOnly, Rows, "validation_step: it returns no loss, and it logs accuracy"),
        (Keeping, Rows, "Keeping has a hook on_save_checkpoint"),
        (Classifier, Shifting, "Shifting has a hook on_after_batch_transfer"),
    ],
)
def test_what_an_evaluation_or_a_save_would_meet_is_refused_at_once(module: Any, data: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        evenly.from_lightning(module(), data(), make_trainer())


def test_a_monitor_of_rates_is_the_run_s_own() -> None:
    trainer = make_trainer(callbacks=[LearningRateMonitor()])
    assert evenly.from_lightning(Classifier(), Rows(), trainer).global_batch == BATCH
