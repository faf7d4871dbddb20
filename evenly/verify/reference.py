"""The reference: a plain training loop on one device, short enough to check by reading.

It shares no code with the engine but the pure rules that define the run: the order of samples, microbatches, blocks and
the keys of random streams. Everything else is plain torch: sums of losses, one division by the total weight,
`clip_grad_norm_`, the optimizer, the schedule.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate

from evenly.data.generators import seeded
from evenly.data.loader import microbatches_of_evaluation, microbatches_of_step
from evenly.data.nest import map_tensors
from evenly.data.stream import block_key, stream_key
from evenly.job import Job, Loss
from evenly.model.blocks import find_blocks
from evenly.torch_private import in_backward

# Weights, gradients and optimizer state of these precisions; of the others they are float32.
WEIGHTS = {"float64": torch.float64, "pure-bfloat16": torch.bfloat16, "pure-float16": torch.float16}


@dataclass(frozen=True)
class ReferenceStep:
    """State after a step: loss and gradient norm of the step, every parameter and buffer after it."""

    step: int
    loss: float
    grad_norm: float
    tensors: dict[str, torch.Tensor]


def reference_steps(job: Job, steps: int) -> Iterator[ReferenceStep]:
    """Trains `job` on the CPU in this process; yields after every step.

    Where the job has `eval_data`, a last record, of step 0, has the evaluation loss of the trained model as its loss.
    """
    model, optimizer, schedule, scaler = _build(job)
    for step in range(steps):
        optimizer.zero_grad()
        total, weight = 0.0, 0.0
        for number, indices in enumerate(microbatches_of_step(job, step)):
            batch = _read(job, job.data, indices, stream_key(job.seed, "data", step, number))
            with _drawing(model, stream_key(job.seed, "microbatch", step, number)):
                loss = _loss(job, model, batch, len(indices))
                if loss.total.requires_grad:
                    scaler.scale(loss.total).backward()
            total, weight = total + float(loss.total.detach().double()), weight + float(loss.weight)
        scaler.unscale_(optimizer)
        used = [p for p in model.parameters() if p.grad is not None]
        for parameter in used:
            assert parameter.grad is not None
            parameter.grad /= weight
        grad_norm = torch.nn.utils.clip_grad_norm_(used, job.clip_norm or float("inf"))
        with seeded(stream_key(job.seed, "optimizer", step + 1)):
            scaler.step(optimizer)
        scaler.update()
        if schedule is not None:
            with seeded(stream_key(job.seed, "schedule", step + 1)), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a step that float16 skips counts for the schedule
                schedule.step()
        yield ReferenceStep(step + 1, total / weight, float(grad_norm), named_tensors(model))
    if job.eval_data is not None:
        yield ReferenceStep(0, reference_evaluation(job, model), 0.0, {})


def reference_evaluation(job: Job, model: torch.nn.Module) -> float:
    """The loss over all of `job.eval_data`."""
    model.eval()
    total, weight = 0.0, 0.0
    with torch.no_grad():
        for number, indices in enumerate(microbatches_of_evaluation(job)):
            batch = _read(job, job.eval_data, indices, stream_key(job.seed, "evaluation data", 0, number))
            with _drawing(model, stream_key(job.seed, "evaluation", number)):
                loss = _loss(job, model, batch, len(indices))
            total, weight = total + float(loss.total.double()), weight + float(loss.weight)
    return total / weight


def loss_not_additive(job: Job) -> str:
    """A warning if the job's loss is not a sum over samples, else ''.

    Without dropout, total and weight of the first microbatch must be the sums of those of its two halves. Raises what
    the job raises.
    """
    indices = next(iter(microbatches_of_step(job, 0)))
    if len(indices) < 2:
        return ""
    model = _build(job)[0].eval()
    found: list[tuple[float, float]] = []
    with seeded(key := stream_key(job.seed, "data", 0, 0)):
        samples = [job.data[i] for i in indices]
    for part in (samples, samples[: len(samples) // 2], samples[len(samples) // 2 :]):
        with seeded(key):
            batch = _collated(job, part)
        with torch.no_grad(), _drawing(model, stream_key(job.seed, "microbatch", 0, 0)):
            loss = _loss(job, model, batch, len(part))
        found.append((float(loss.total.double()), float(loss.weight)))
    for what, whole, *halves in zip(("total", "weight"), *found, strict=True):
        if abs(whole - sum(halves)) > 1e-3 * max(abs(whole), *map(abs, halves)):
            both = " + ".join(f"{half:.4g}" for half in halves)
            return (
                f"the loss of {len(indices)} samples has the {what} {whole:.4g}, that of its halves {both}: is it a "
                "mean where a sum is wanted, or does a sample's loss depend on the others, or on chance?"
            )
    return ""


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers, tied ones once, by name."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().cpu().clone() for name, tensor in named}


def _build(job: Job) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any, torch.amp.GradScaler]:
    with seeded(stream_key(job.seed, "model")):
        model = job.model()
    if job.precision in WEIGHTS:
        model = model.to(WEIGHTS[job.precision])
    if not model.training:
        model.train()
    with seeded(stream_key(job.seed, "optimizer", 0)):
        optimizer = job.optimizer(model.parameters())
    with seeded(stream_key(job.seed, "schedule", 0)):
        schedule = job.schedule(optimizer) if job.schedule is not None else None
    power = (job.global_batch - 1).bit_length()
    scaler = torch.amp.GradScaler("cpu", init_scale=max(1.0, 2.0 ** (16 - power)), enabled=job.precision == "float16")
    return model, optimizer, schedule, scaler


def _read(job: Job, data: Any, indices: list[int], key: int) -> Any:
    with seeded(key):
        return _collated(job, [data[i] for i in indices])


def _collated(job: Job, samples: list[Any]) -> Any:
    batch = (job.collate or default_collate)(samples)
    if (dtype := WEIGHTS.get(job.precision)) is not None:
        batch = map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, batch)
    return batch


@contextmanager
def _drawing(model: torch.nn.Module, key: int) -> Generator[None]:
    """Within, seeds all generators from the stream `key`, and again at the begin and end of every block.

    A block that the model's own checkpointing calls again in the backward draws what its first call drew: that is the
    one before which the generator had the same seed.
    """
    calls: dict[str, int] = {}
    numbers: dict[tuple[str, int], int] = {}  # by block and the seed before its call
    running: dict[str, int] = {}
    handles: list[Any] = []
    for block in find_blocks(model):

        def begin(_: Any, __: Any, name: str = block.name) -> None:
            before = torch.initial_seed()
            if not in_backward():
                numbers[name, before] = calls.get(name, 0)
                calls[name] = numbers[name, before] + 1
            running[name] = numbers.get((name, before), 0)
            torch.manual_seed(block_key(key, name, running[name], "begin"))

        def end(_: Any, __: Any, ___: Any, name: str = block.name) -> None:
            torch.manual_seed(block_key(key, name, running[name], "end"))

        handles += [block.module.register_forward_pre_hook(begin), block.module.register_forward_hook(end)]
    try:
        with seeded(key):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _loss(job: Job, model: torch.nn.Module, batch: Any, samples: int) -> Loss:
    mixed = job.precision in ("bfloat16", "float16")
    with torch.autocast("cpu", dtype=getattr(torch, job.precision)) if mixed else nullcontext():
        loss = job.loss(model, batch)
    return loss if isinstance(loss, Loss) else Loss(loss * samples, samples)
