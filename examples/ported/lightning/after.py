"""A classifier of scikit-learn's digits as a LightningModule with a DataModule."""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import evenly


class Digits(L.LightningDataModule):
    def setup(self, stage):
        digits = load_digits()
        x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
        self.train_set, self.val_set = TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=50, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=50)


class Classifier(L.LightningModule):
    def __init__(self, width=64):
        super().__init__()
        self.inner = nn.Linear(64, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU()) for _ in range(3))
        self.outer = nn.Linear(width, 10)

    def forward(self, x):
        h = self.inner(x)
        for layer in self.layers:
            h = h + layer(h)
        return self.outer(h)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("accuracy", (logits.argmax(1) == y).float().mean())
        return F.cross_entropy(logits, y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_accuracy", (logits.argmax(1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)}


L.seed_everything(0)
module, data = Classifier(), Digits()
trainer = L.Trainer(
    max_epochs=3, gradient_clip_val=1.0, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
job = evenly.from_lightning(module, data, trainer)
