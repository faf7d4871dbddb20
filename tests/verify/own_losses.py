"""Losses that ask more of whoever calls them than a forward, in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import evenly

BATCH, MICROBATCH = 12, 4
calls = 0


def gradient_penalty(model: nn.Module, batch: Any) -> evenly.Loss:
    x, y = batch
    x = x.requires_grad_(True)
    total = cross_entropy(model(x), y, reduction="sum")
    (slope,) = torch.autograd.grad(total, x, create_graph=True)
    return evenly.Loss(total + slope.square().sum(), len(y))


def norm_of_gradients(model: nn.Module, batch: Any) -> evenly.Loss:
    x, y = batch
    total = cross_entropy(model(x), y, reduction="sum")
    slopes = torch.autograd.grad(total, [*model.parameters()], create_graph=True)
    return evenly.Loss(total + 0.01 * sum(slope.square().sum() for slope in slopes), len(y))


def adversarial(model: nn.Module, batch: Any) -> evenly.Loss:
    x, y = batch
    x = x.clone().requires_grad_(True)
    cross_entropy(model(x), y, reduction="sum").backward(inputs=[x])
    assert x.grad is not None
    return evenly.Loss(cross_entropy(model((x + 0.05 * x.grad.sign()).detach()), y, reduction="sum"), len(y))


def needs_gradients(model: nn.Module, batch: Any) -> evenly.Loss:
    x, y = batch
    out = model(x)
    if not out.requires_grad or x.is_inference():
        raise RuntimeError("this loss is for training")
    return evenly.Loss(cross_entropy(out, y, reduction="sum"), len(y))


def of_full_microbatches(model: nn.Module, batch: Any) -> evenly.Loss:
    x, y = batch
    if len(y) != MICROBATCH:
        raise RuntimeError(f"{len(y)} samples, not {MICROBATCH}")
    return evenly.Loss(cross_entropy(model(x), y, reduction="sum"), len(y))


def of_so_many_calls(model: nn.Module, batch: Any) -> evenly.Loss:
    """Ends after the microbatches of three steps, in whose way no check may come."""
    global calls
    calls += 1
    if calls > 3 * BATCH // MICROBATCH:
        raise RuntimeError("too many calls")
    x, y = batch
    return evenly.Loss(cross_entropy(model(x), y, reduction="sum"), len(y))


LOSSES = {
    function.__name__: function
    for function in (
        gradient_penalty, norm_of_gradients, adversarial, needs_gradients, of_full_microbatches, of_so_many_calls,
    )
}  # fmt: skip
FILE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from own_losses import job
"""


def job(loss: str) -> evenly.Job:
    x = torch.randn(3 * BATCH, 8, generator=torch.Generator().manual_seed(0))
    return evenly.Job(
        model=lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)),
        loss=LOSSES[loss],
        data=TensorDataset(x, (x.sum(1) > 0).long()),
        optimizer=torch.optim.AdamW,
        global_batch=BATCH,
        microbatch=MICROBATCH,
        steps=3,
    )
