"""Handwritten digits: a small convolutional network with BatchNorm on scikit-learn's 8x8 images.

    evenly run examples/digits.py --devices 2
    evenly run examples/digits.py --devices 2 --set epochs=20 --set batch=128
    evenly verify examples/digits.py --plans "single;ddp" --devices 3

The batch does not divide the training set: the last one of an epoch is shorter, and no sample is dropped or
repeated. The loss is a plain scalar, which stands for the mean over the samples it was given.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import evenly


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """1,497 samples to train on and 300 held out: an image of (1, 8, 8) in 0..1 and its digit each."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    held_out = torch.arange(len(labels)) % 6 == 0
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(images[held_out], labels[held_out])


def convolution(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False),  # BatchNorm has the bias
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    )


def network(width: int, dropout: float) -> nn.Module:
    return nn.Sequential(
        convolution(1, width),
        nn.MaxPool2d(2),
        convolution(width, 2 * width),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(2 * width * 2 * 2, 10),
    )


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def job(epochs: int = 8, batch: int = 64, width: int = 16, dropout: float = 0.1, lr: float = 0.1) -> evenly.Job:
    train, held_out = read_digits()
    steps_per_epoch = -(-len(train) // batch)
    return evenly.Job(
        model=lambda: network(width, dropout),
        loss=loss,
        data=train,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-4),
        global_batch=batch,
        steps=epochs * steps_per_epoch,
        microbatch=16,
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, steps_per_epoch, gamma=0.8),
        eval_data=held_out,
        eval_every=steps_per_epoch,
        name="digits",
    )
