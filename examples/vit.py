"""A vision transformer of transformers from a small configuration, on scikit-learn's 8x8 images of digits.

    evenly run examples/vit.py --devices 2
    evenly run examples/vit.py --devices 2 --set epochs=16 --set width=96
    evenly verify examples/vit.py --plans "single;ddp" --devices 2

An image is 16 patches of 2x2 and one token more, which decides. The batch does not divide the training set: the last
one of an epoch is shorter.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset
from transformers import ViTConfig, ViTForImageClassification

import evenly


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """1,497 samples to train on and 300 held out: an image of (1, 8, 8) in -1..1 and its digit each."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(digits.target)
    held_out = torch.arange(len(labels)) % 6 == 0
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(images[held_out], labels[held_out])


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> evenly.Loss:
    images, labels = batch
    logits = model(pixel_values=images).logits
    return evenly.Loss(nn.functional.cross_entropy(logits, labels, reduction="sum"), len(labels))


def job(epochs: int = 8, width: int = 64, layers: int = 3, heads: int = 4, lr: float = 2e-3) -> evenly.Job:
    train, held_out = read_digits()
    steps_per_epoch = -(-len(train) // 64)
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=10,
    )
    return evenly.Job(
        model=lambda: ViTForImageClassification(config),
        loss=loss,
        data=train,
        # A key bias has a true gradient of 0: this epsilon keeps its rounding noise from becoming steps.
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr, eps=1e-6),
        global_batch=64,
        steps=epochs * steps_per_epoch,
        microbatch=16,
        clip_norm=1.0,
        eval_data=held_out,
        eval_every=steps_per_epoch,
        name="vit",
    )
