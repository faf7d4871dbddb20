"""A small student learns scikit-learn's digits from a larger teacher that is frozen."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import evenly

epochs, batch_size, temperature = 4, 64, 3.0

digits = load_digits()
dataset = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))


def mlp(width, depth):
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *layers, nn.Linear(width, 10))


class Distillation(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher, self.student = mlp(128, 3), mlp(32, 2)
        self.teacher.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x), wanted


def distillation_loss(model, batch):
    x, y = batch
    logits, wanted = model(x)
    soft = F.kl_div(F.log_softmax(logits / temperature, 1), F.softmax(wanted / temperature, 1), reduction="batchmean")
    return 0.3 * F.cross_entropy(logits, y) + 0.7 * temperature**2 * soft


def job():
    return evenly.Job(
        model=Distillation, loss=distillation_loss, data=dataset,
        optimizer=lambda params: torch.optim.AdamW([p for p in params if p.requires_grad], lr=2e-3),
        global_batch=batch_size, microbatch=16, steps=epochs * 29,
    )
