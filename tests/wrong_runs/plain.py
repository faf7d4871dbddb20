"""A plain training loop on one device, written apart from evenly.

It is given the order of samples, the microbatches and the keys of random streams as data; all else is torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import default_collate

import evenly
from evenly.data.loader import microbatches_of_step
from evenly.data.stream import block_key, stream_key


@dataclass(frozen=True)
class Case:
    """A job, and what differs from it in the plain loop.

    twin:  builds the model of the plain loop, where that is written otherwise.
    after: what an own loop does to the model after each step. loop: the same, with the optimizer.
    """

    job: evenly.Job
    twin: Callable[[], nn.Module] | None = None
    after: Callable[[nn.Module], None] | None = None
    loop: Callable[[nn.Module, torch.optim.Optimizer], None] | None = None


def plain_steps(case: Case, steps: int) -> list[dict[str, torch.Tensor]]:
    """The parameters and buffers after each step."""
    job = case.job
    draw_from(stream_key(job.seed, "model"))
    model = (case.twin or job.model)().to(torch.float64 if job.precision == "float64" else torch.float32)
    draw_from(stream_key(job.seed, "optimizer", 0))
    optimizer = job.optimizer(model.parameters())
    draw_from(stream_key(job.seed, "schedule", 0))
    schedule = job.schedule(optimizer) if job.schedule else None
    reseed_blocks(model, key := [0])
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        weight = 0.0
        for number, indices in enumerate(microbatches_of_step(job, step)):
            draw_from(stream_key(job.seed, "data", step, number))
            batch = as_floats((job.collate or default_collate)([job.data[i] for i in indices]), model)
            key[0] = draw_from(stream_key(job.seed, "microbatch", step, number))
            loss = job.loss(model, batch)
            if loss.total.requires_grad:
                loss.total.backward()
            weight += float(loss.weight)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= weight
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm or float("inf"))
        draw_from(stream_key(job.seed, "optimizer", step + 1))
        optimizer.step()
        if schedule is not None:
            draw_from(stream_key(job.seed, "schedule", step + 1))
            schedule.step()
        draw_from(stream_key(job.seed, "after step", step + 1))
        if case.after is not None:
            case.after(model)
        if case.loop is not None:
            case.loop(model, optimizer)
        state = (*model.named_parameters(), *model.named_buffers())
        found.append({name: tensor.detach().clone() for name, tensor in state})
    return found


def draw_from(key: int) -> int:
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    return key


def reseed_blocks(model: nn.Module, key: list[int]) -> None:
    """Has each of `model.blocks` begin and end with random streams of its own."""
    for number, block in enumerate(getattr(model, "blocks", ())):

        def begin(*_: Any, name: str = f"blocks.{number}") -> None:
            torch.default_generator.manual_seed(block_key(key[0], name, 0, "begin"))

        def end(*_: Any, name: str = f"blocks.{number}") -> None:
            torch.default_generator.manual_seed(block_key(key[0], name, 0, "end"))

        block.register_forward_pre_hook(begin)
        block.register_forward_hook(end)


def as_floats(batch: Any, model: nn.Module) -> Any:
    dtype = next(model.parameters()).dtype
    if isinstance(batch, torch.Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    return [as_floats(one, model) for one in batch]
