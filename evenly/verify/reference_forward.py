"""The forwards of the reference: the loss of a microbatch under its random stream, and evaluations."""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from evenly.data.generators import reseed, seeded
from evenly.data.nest import map_tensors
from evenly.data.stream import block_key, stream_key
from evenly.errors import UserError
from evenly.job import Job
from evenly.loss import Loss
from evenly.model.blocks import find_blocks
from evenly.model.modes import evaluating
from evenly.torch_private import in_backward
from evenly.verify.reference_data import evaluation_microbatches, read_microbatch
from evenly.verify.reference_sums import LossSums


def run_forward(job: Job, model: torch.nn.Module, batch: Any, key: int, samples: int) -> Loss:
    """The job's loss of one microbatch of so many samples, with random numbers from the stream `key`."""
    with drawing(model, key):
        return loss_of(job, model, batch, samples)


@contextmanager
def drawing(model: torch.nn.Module, key: int, device: str = "cpu") -> Generator[None]:
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
            reseed(block_key(key, name, running[name], "begin"), device)

        def end(_: Any, __: Any, ___: Any, name: str = block.name) -> None:
            reseed(block_key(key, name, running[name], "end"), device)

        handles += [block.module.register_forward_pre_hook(begin), block.module.register_forward_hook(end)]
    try:
        with seeded(key, device):
            yield
    finally:
        for handle in handles:
            handle.remove()


def loss_of(job: Job, model: torch.nn.Module, batch: Any, samples: int) -> Loss:
    mixed = job.precision in ("bfloat16", "float16")
    device = next((p.device.type for p in model.parameters()), "cpu")
    with torch.autocast(device, dtype=getattr(torch, job.precision)) if mixed else nullcontext():
        found = job.loss(model, batch)
    loss = found if isinstance(found, Loss) else Loss(found, samples)
    if not isinstance(loss.total, torch.Tensor) or loss.total.numel() != 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UserError(
            "the job's loss must return evenly.Loss(total, weight) or a scalar tensor",
            f"it returned a {type(found).__name__}" + (" whose total is no scalar tensor" if found is loss else ""),
            "sum the losses into `total`, a tensor, and count what they cover in `weight`",
        )
    total = loss.total.reshape(())
    return replace(loss, total=total) if found is loss else Loss(total * samples, samples)


def reference_evaluation(job: Job, model: torch.nn.Module, device: str = "cpu") -> dict[str, dict[str, float]]:
    """By evaluation set and name: the loss over all of it, its metrics, and the figures of the job's `evaluate`."""
    return {name: _evaluate(job.with_eval_data(data), model, device) for name, data in job.eval_sets.items()}


def _evaluate(job: Job, model: torch.nn.Module, device: str) -> dict[str, float]:
    sums, outputs = LossSums(), list[Any]()
    with torch.no_grad(), evaluating(model):
        for number, microbatch in enumerate(evaluation_microbatches(job)):
            key = stream_key(job.seed, "evaluation data", 0, number)
            samples, batch = read_microbatch(job, microbatch, key, device)
            with drawing(model, stream_key(job.seed, "evaluation", number), device):
                loss = loss_of(job, model, batch, samples)
            sums.add(loss)
            outputs.append(loss.outputs)
    if sums.weight == 0:
        raise UserError(
            "evaluating the job", "nothing in its eval_data counts: the weight is 0", "give it samples that count"
        )
    with seeded(stream_key(job.seed, "evaluate")):
        figures = {} if job.evaluate is None else _figures(job.evaluate, _together(outputs))
    return {"loss": sums.loss, **sums.metrics, **figures}


def _together(parts: list[Any]) -> Any:
    """The outputs of all microbatches in order, joined along the samples."""
    first: Any = parts[0]
    kind: Any = type(first)
    if isinstance(first, torch.Tensor):
        return torch.cat([part.detach().cpu() for part in parts])
    if isinstance(first, list):
        return [map_tensors(lambda t: t.detach().cpu(), one) for part in parts for one in part]
    if isinstance(first, Mapping):
        return kind({key: _together([part[key] for part in parts]) for key in first})
    if isinstance(first, tuple):
        columns = [_together([*column]) for column in zip(*parts, strict=True)]
        return kind(*columns) if hasattr(first, "_fields") else kind(columns)
    if is_dataclass(first):
        return replace(first, **{f.name: _together([getattr(p, f.name) for p in parts]) for f in fields(first)})  # type: ignore
    raise UserError("evaluating the job", f"its loss gives a {kind.__name__} as outputs", "give tensors and lists")


def _figures(evaluate: Any, outputs: Any) -> dict[str, float]:
    if not hasattr(evaluate, "compute"):
        return {name: float(value) for name, value in evaluate(outputs).items()}
    metric = copy.deepcopy(evaluate)
    metric.reset()
    if isinstance(outputs, Mapping):
        metric.update(**outputs)
    else:
        metric.update(*(outputs if isinstance(outputs, tuple) else [outputs]))
    found = metric.compute()
    named = found if isinstance(found, Mapping) else {type(metric).__name__: found}
    return {name: float(value) for name, value in named.items()}
