"""A residual network on scikit-learn's digits, with mixup, label smoothing, a OneCycle schedule and averaged weights."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import evenly

epochs, batch_size, alpha = 3, 64, 0.2

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train_set = TensorDataset(images[:1500], labels[:1500])
test_set = TensorDataset(images[1500:], labels[1500:])


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


def make_model():
    stem = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*stem, *[Residual(16) for _ in range(3)], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def mixup_loss(model, batch):
    x, y = batch
    if not model.training:
        correct = (model(x).argmax(1) == y).sum()
        return evenly.Loss(nn.functional.cross_entropy(model(x), y, reduction="sum"), len(x), {"accuracy": (correct, len(x))})
    lam = torch.distributions.Beta(alpha, alpha).sample()
    order = torch.randperm(len(x))
    logits = model(lam * x + (1 - lam) * x[order])
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    return lam * criterion(logits, y) + (1 - lam) * criterion(logits, y[order])


def job(microbatch=16):
    return evenly.Job(
        model=make_model, loss=mixup_loss, data=train_set, eval_data=test_set, eval_every=24, average=evenly.EMA(0.95),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True),
        schedule=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=epochs * 24),
        global_batch=batch_size, microbatch=microbatch, steps=epochs * 24,
    )
