"""Steps whose loss or gradient is not a finite number: the batch is left out, or the run ends with the cause.

The update is not applied, the buffers are as the step began, and what a step computes follows from its number: so the
step is repeated with every operation watched (`engine.trace`), by all ranks together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from evenly.comm.collectives import gather_values
from evenly.comm.world import World
from evenly.data.loader import Share
from evenly.engine.executor import Batch, Executor
from evenly.engine.step_totals import StepTotals
from evenly.engine.trace import cause_of, describe_origin
from evenly.errors import RunError, note_rank


class BuffersBefore:
    """The buffers of `model` as a step begins, to put back where its batch is left out."""

    def __init__(self, model: nn.Module) -> None:
        self._found = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        for module, name, buffer, value in self._found:
            buffer.copy_(value)
            setattr(module, name, buffer)


def traced_error(
    executor: Executor, passes: Sequence[tuple[Batch, StepTotals]], grad_norm: float, scale: float, world: World
) -> RunError:
    """The error, the same on all ranks, of a step of these passes; repeats the last that may be its cause."""
    batch, totals = next((one for one in passes if one[1].not_finite), passes[-1])
    batch = batch.again()
    step, share = batch.share.step + 1, batch.share
    what = "loss" if totals.not_finite else "gradient"
    asked = f"step {step}: the {what} must be finite"
    seen = loss_seen(totals, share) if totals.not_finite else f"its norm is {grad_norm}"
    repeated, origins = executor.traced_step(batch, scale=scale)
    executor.composed.drop_statistics()
    failing = [number + batch.first for number in repeated.not_finite]
    cause = cause_of(gather_values(origins, world.group("world")), failing)
    if totals.not_finite and not repeated.not_finite:
        do = "look for what differs between two runs of a step: threads that race, a device that is faulty"
        return RunError(asked, f"{seen}; repeated, the step had finite losses, so nothing could be traced", do)
    if cause is None:
        found = f"{seen}; repeated with every operation watched, the step showed none that made it so"
        return RunError(asked, f"{found}: a sum over microbatches or ranks overflows", "take a lower learning rate")
    rank, finding = cause
    microbatch = finding.site.microbatch
    samples = share.microbatches[microbatch - batch.first] if microbatch is not None else []
    problem = RunError(
        asked,
        f"{seen}; {describe_origin(finding, samples, rank)}",
        "look at these samples and that operation (a division by zero, a log or root of zero), or take a lower "
        "learning rate; --skip-nonfinite N leaves out up to N such batches",
    )
    note_rank(problem, rank)
    return problem


def loss_seen(totals: StepTotals, share: Share) -> str:
    number = totals.not_finite[0]
    samples = ", ".join(map(str, share.microbatches[number]))
    others = f", as {len(totals.not_finite) - 1} more" if len(totals.not_finite) > 1 else ""
    return f"microbatch {number} (samples {samples}) has the loss {totals.totals[number]}{others}"


def check_evaluation(totals: StepTotals, share: Share, step: int, name: str = "") -> None:
    """Raises `RunError`, on all ranks alike, for an evaluation whose loss is not finite, or a metric without a count.

    name: of the evaluation set, where there are several.
    """
    totals.check(step)
    where = f"evaluation{' of ' * bool(name)}{name} after step {step}"
    if totals.not_finite:
        raise RunError(
            f"{where}: the loss must be finite",
            loss_seen(totals, share),
            "look at these samples of eval_data, or take a lower learning rate",
        )
    for metric in totals.metrics:
        if metric not in totals.values:
            raise RunError(
                f"{where}: a metric needs something that counts",
                f"the count of {metric} is 0 in every microbatch",
                "leave it out of the metrics, or evaluate samples that it counts",
            )


def is_bad(totals: StepTotals, grad_norm: float) -> bool:
    return bool(totals.not_finite) or not math.isfinite(grad_norm)
