"""What one microbatch leaves behind for the next, outside of the model's state: found by swapping two of them.

Which rank runs which microbatch, and after which, is free (the plan's affair), so a microbatch must compute the same
whatever ran before it. Two microbatches run in both orders on two models built alike; parameters and buffers of the
state dict are put back between them, since what a plan does to those is compared as numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch

from evenly.data.loader import microbatches_of_step
from evenly.data.nest import strided_parts, tensors_by_path
from evenly.data.stream import stream_key
from evenly.job import Job
from evenly.verify.reference import build_model
from evenly.verify.reference_data import batches, read_microbatch
from evenly.verify.reference_forward import run_forward


def find_hidden_state(job: Job) -> str:
    """What is carried from one microbatch to the next, as a sentence; '' if nothing is, or there is one only.

    Raises what the job raises.
    """
    numbers = [*range(min(2, len(microbatches_of_step(job, 0))))]
    if len(numbers) < 2:
        return ""
    one = [_digest(_read(job, number)[1]) for number in numbers]
    other = [_digest(_read(job, number)[1]) for number in reversed(numbers)][::-1]
    if one != other:
        changed = next(number for number in numbers if one[number] != other[number])
        return f"the data have a memory: read again in another order, microbatch {changed} of step 1 has other numbers"
    for one in job.by_phase.values():
        forwards = _run(one, numbers), _run(one, numbers[::-1])
        for number in numbers:
            if (found := _first_difference(*(run[number] for run in forwards))) is not None:
                swapped = f"microbatch {number} of step 1 where microbatch {1 - number} ran before"
                return f"{found} computes other numbers for {swapped}"
    return ""


@dataclass
class _Forward:
    """The calls of one microbatch, in the order in which they ended: (module, digest of arguments, of results)."""

    calls: list[tuple[str, bytes, bytes]] = field(default_factory=list[tuple[str, bytes, bytes]])
    loss: bytes = b""


def _run(job: Job, numbers: Sequence[int]) -> dict[int, _Forward]:
    """Runs the microbatches of step 1 with these `numbers` in this order, on a model that was just built."""
    model = build_model(job)
    state = {name: t.clone() for name, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    found: dict[int, _Forward] = {}
    for number in numbers:
        forward = found[number] = _Forward()
        handles = [
            module.register_forward_hook(_recording(forward, name or type(module).__name__), with_kwargs=True)
            for name, module in model.named_modules()
        ]
        samples, batch = _read(job, number)
        loss = run_forward(job, model, batch, stream_key(job.seed, "microbatch", 0, number), samples)
        forward.loss = _digest((loss.total, torch.as_tensor(loss.weight)))
        for name, tensor in model.state_dict().items():  # detached
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(state[name])
        for handle in handles:
            handle.remove()
    return found


def _recording(forward: _Forward, name: str) -> Callable[..., None]:
    def record(_: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        forward.calls.append((name, _digest((args, kwargs)), _digest(output)))

    return record


def _first_difference(one: _Forward, other: _Forward) -> str | None:
    """The innermost module that first computes something else from the same; else what is different; None: nothing."""
    for (name, given, result), (name_2, given_2, result_2) in zip(one.calls, other.calls, strict=False):
        if name != name_2:
            return f"the model calls other modules ({name}, {name_2}) and"
        if given == given_2 and result != result_2:
            return f"module {name}"
        if given != given_2:
            return f"the code that calls {name}"
    if len(one.calls) != len(other.calls):
        return "the model calls more modules and"
    return "the job's loss" if one.loss != other.loss else None


def _read(job: Job, number: int) -> tuple[int, Any]:
    return read_microbatch(job, next(batches(job))[number], stream_key(job.seed, "data", 0, number))


def _digest(nest: Any) -> bytes:
    """Equal for nests of the same tensors, to the bit."""
    digest = blake2b(digest_size=16)
    for path, tensor in ((path, part) for path, one in tensors_by_path(nest) for part in strided_parts(one)):
        digest.update(f"{path} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if not tensor.is_meta:
            data = tensor.detach().cpu().contiguous()
            digest.update(data.flatten().view(torch.uint8).numpy().tobytes() if data.numel() else b"")
    return digest.digest()
