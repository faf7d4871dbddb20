"""A LightningModule with a schedule that counts epochs, metrics and a DataModule, as a job file."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import evenly

SAMPLES, BATCH = 27, 6


class Rows(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        torch.manual_seed(4)
        x, y = torch.randn(SAMPLES + 11, 5), torch.randint(0, 3, (SAMPLES + 11,))
        self.rows, self.others = TensorDataset(x[:SAMPLES], y[:SAMPLES]), TensorDataset(x[SAMPLES:], y[SAMPLES:])

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.rows, batch_size=BATCH)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.others, batch_size=BATCH)


class Classifier(L.LightningModule):
    def __init__(self, interval: str = "epoch") -> None:
        super().__init__()
        torch.manual_seed(7)
        self.inner = nn.Linear(5, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.outer, self.interval = nn.Linear(8, 3), interval

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        for layer in self.layers:
            h = h + layer(h)
        return self.outer(h)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log_dict({"accuracy": (logits.argmax(1) == y).float().mean()})

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.outer.parameters(), "lr": 0.05},
            {"params": [*self.inner.parameters(), *self.layers.parameters()]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.02)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.interval}}


def make_trainer(**more: Any) -> L.Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(max_epochs=3, gradient_clip_val=0.7, accelerator="cpu", **quiet, **more)


def job() -> evenly.Job:
    return evenly.from_lightning(Classifier(), Rows(), make_trainer())
