"""A residual network with BatchNorm on scikit-learn's 8x8 images of digits, in four stages as in torchvision.

    evenly run examples/resnet.py --devices 2
    evenly run examples/resnet.py --devices 2 --set blocks=3 --set width=24
    evenly verify examples/resnet.py --plans "ddp;zero2;zero3" --devices 2

Every stage but the first halves the image and doubles the width, so its first block differs from the others. The
batch does not divide the training set: the last one of an epoch is shorter.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import evenly


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """1,497 samples to train on and 300 held out: an image of (1, 8, 8) in -1..1 and its digit each."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(digits.target)
    held_out = torch.arange(len(labels)) % 6 == 0
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(images[held_out], labels[held_out])


class BasicBlock(nn.Module):
    """Two convolutions beside a shortcut, which is one of 1x1 where the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)  # BatchNorm has the bias
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.downsample = None
        if stride != 1 or channels_in != channels:
            shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (h + (x if self.downsample is None else self.downsample(x))).relu()


def stage(channels_in: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
    first, others = BasicBlock(channels_in, channels, stride), range(blocks - 1)
    return nn.Sequential(first, *(BasicBlock(channels, channels, 1) for _ in others))


class ResNet(nn.Module):
    def __init__(self, width: int, blocks: int, dropout: float) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.layer1 = stage(width, width, blocks, stride=1)
        self.layer2 = stage(width, 2 * width, blocks, stride=2)
        self.layer3 = stage(2 * width, 4 * width, blocks, stride=2)
        self.layer4 = stage(4 * width, 8 * width, blocks, stride=2)
        self.drop, self.fc = nn.Dropout(dropout), nn.Linear(8 * width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.bn1(self.conv1(images)).relu()
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.drop(x.mean(dim=(2, 3))))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> evenly.Loss:
    images, labels = batch
    total = nn.functional.cross_entropy(model(images), labels, reduction="sum", label_smoothing=0.1)
    return evenly.Loss(total, len(labels))


def job(steps: int = 144, width: int = 8, blocks: int = 2, dropout: float = 0.1, lr: float = 0.05) -> evenly.Job:
    train, held_out = read_digits()
    return evenly.Job(
        model=lambda: ResNet(width, blocks, dropout),
        loss=loss,
        data=train,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=5e-4),
        global_batch=64,
        steps=steps,
        microbatch=16,
        schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
        clip_norm=2.0,
        eval_data=held_out,
        eval_every=-(-len(train) // 64),
        name="resnet",
    )
